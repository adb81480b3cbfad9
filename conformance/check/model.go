package check

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"github.com/anishathalye/porcupine"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// The model is one name of a lock service, as an object that executes one operation at a time. Its state is the
// holders of the name, and the highest token so far. Each operation takes effect at one instant of its interval:
//
//	take h     interval of the acquire      no hold excludes h, and h's token is the highest so far
//	prove h    from sending to the answer   h holds
//	give h     interval of the release      h holds, and no longer holds after it
//	expire h   from the end of the TTL on   h no longer holds; no effect if it did not hold
//	ask        interval of the question     every holder is among the seen holders
//
// A release that may have arrived after the end of the TTL, and a release of unknown outcome, are like expire.
//
// Operations of unknown outcome need no second branch. A release of unknown outcome has an interval without end: if
// unexecuted, it comes after all other operations. An acquire of unknown outcome does not appear at all: no other
// operation needs its hold, so any order that is legal with it is legal without it.
//
// An unreleased hold expires at the end of its TTL or at any later time. Before that, no conflicting hold is legal: a
// service that loses holds (by an eviction, a failover, a clock jump) has no legal history.

// deed is the kind of an operation.
type deed uint8

const (
	take deed = iota
	prove
	give
	expire
	ask
)

var deeds = [...]string{"acquire", "renew", "release", "expire", "ask"}

// input is an operation of the model. It has no output: the search only needs the operations.
type input struct {
	do   deed
	hold int  // index in history.holds
	held bool // give: h certainly held
	seen []fencing.Token
}

// state is the state of a name. holders has the sorted indexes of the holds, four bytes each, so that states are
// comparable.
type state struct {
	holders string
	top     uint64 // the highest token so far, without its mark
}

func (s state) has(hold int) bool {
	for i := 0; i < len(s.holders); i += 4 {
		if int(binary.BigEndian.Uint32([]byte(s.holders[i:i+4]))) == hold {
			return true
		}
	}
	return false
}

func (s state) all() []int {
	var all []int
	for i := 0; i < len(s.holders); i += 4 {
		all = append(all, int(binary.BigEndian.Uint32([]byte(s.holders[i:i+4]))))
	}
	return all
}

func holders(all []int) string {
	slices.Sort(all)
	var b []byte
	for _, h := range all {
		b = binary.BigEndian.AppendUint32(b, uint32(h))
	}
	return string(b)
}

// with and without return the state after a hold began or ended.
func (s state) with(hold int) state {
	s.holders = holders(append(s.all(), hold))
	return s
}

func (s state) without(hold int) state {
	s.holders = holders(slices.DeleteFunc(s.all(), func(h int) bool { return h == hold }))
	return s
}

// model returns the model of a name with these holds, with first as its initial state.
func model(holds []*hold, fenced bool, first state) porcupine.Model {
	seed := maphash.MakeSeed()
	return porcupine.Model{
		Init: func() any { return first },
		Step: func(now, op, _ any) (bool, any) {
			ok, next := step(holds, fenced, now.(state), op.(input))
			return ok, next
		},
		Hash: func(now any) uint64 { return maphash.Comparable(seed, now.(state)) },
		DescribeOperation: func(op, _ any) string {
			in := op.(input)
			if in.do == ask {
				return fmt.Sprintf("ask: %v", in.seen)
			}
			return deeds[in.do] + " " + holds[in.hold].short()
		},
		DescribeState: func(now any) string {
			s := now.(state)
			if s.holders == "" {
				return fmt.Sprintf("free after %d", s.top)
			}
			var who []string
			for _, h := range s.all() {
				who = append(who, holds[h].short())
			}
			return strings.Join(who, ", ")
		},
	}
}

func (h *hold) short() string {
	s := h.client + " " + h.token.String()
	switch h.kind {
	case backend.KindShared:
		s += " shared"
	case backend.KindPermits:
		s += fmt.Sprintf(" %d/%d", h.permits, h.limit)
	}
	return s
}

// step reports whether an operation can happen in a state, and returns the next state.
func step(holds []*hold, fenced bool, s state, in input) (bool, state) {
	switch in.do {
	case take:
		h := holds[in.hold]
		var others []*hold
		for _, o := range s.all() {
			others = append(others, holds[o])
		}
		if exceeds(h, others) != nil || fenced && h.token.Order() <= s.top {
			return false, s
		}
		s.top = max(s.top, h.token.Order())
		return true, s.with(in.hold)
	case prove:
		return s.has(in.hold), s
	case give, expire:
		if !s.has(in.hold) {
			return !in.held, s
		}
		return true, s.without(in.hold)
	case ask:
		for _, o := range s.all() {
			if t := holds[o].token; t.Valid() && !slices.Contains(in.seen, t) {
				return false, s
			}
		}
		return true, s
	}
	return false, s
}
