package memory

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
)

// answer is what the store says about one acquire: of one request, or of a set of them.
type answer struct {
	grants []granted // one for each request
	err    error     // nil: granted
	gone   bool      // the place in the queue is gone; ask again
}

// granted is what the store tells about one hold.
type granted struct {
	token       fencing.Token
	incarnation string
	ttl         time.Duration
	minHold     time.Duration // what is left of it
	queued      bool          // granted out of the queue
}

func (h *hold) granted(now backend.Instant) granted {
	return granted{
		token: h.token, incarnation: h.incarnation, ttl: h.ttl, queued: h.queued, minHold: max(0, h.closes.Sub(now)),
	}
}

// refusal is the answer to requests that were not granted.
func (s *Store) refusal(now backend.Instant, rs []backend.Request, r *machine.Result) error {
	switch r.Code {
	case machine.CodeHeld, machine.CodeQueued:
		return s.heldError(now, rs, r.Holder)
	case machine.CodeDeadlock:
		all := &backend.DeadlockError{}
		holds := r.Cycle[len(r.Cycle)-1].Name
		for i, b := range r.Cycle[1:] {
			all.Cycle = append(all.Cycle, backend.DeadlockEdge{Owner: r.Cycle[i].Owner, Holds: holds, Wants: b.Name})
			holds = b.Name
		}
		return all
	case machine.CodeMismatch:
		return fmt.Errorf("%w: %q", backend.ErrLimitMismatch, r.Detail)
	}
	return kit.InvalidOption(cmp.Or(r.Field, "request"), "of the request for "+fmt.Sprintf("%q", rs[0].Name), r.Detail)
}

// heldError tells who is in the way of rs. Nobody is who only keeps the name closed.
func (s *Store) heldError(now backend.Instant, rs []backend.Request, in *machine.Blocker) error {
	held := &backend.HeldError{Name: rs[0].Name}
	closed := rs[0].Name
	if in != nil {
		closed = in.Name
		for i := range rs {
			if name := rs[i].Name; name == closed || strings.HasPrefix(name, closed+"/") {
				held.Name = name
			}
		}
		if !in.Waits {
			held.Holder, held.HoldID = in.Owner, in.HoldID
		}
	}
	for _, h := range s.machine.Holder(closed).Holders {
		left := s.holds[h.Token].ends().Sub(now)
		if held.RetryAfter == 0 || left < held.RetryAfter {
			held.RetryAfter = left
		}
		if held.Holder == "" && !h.Lingering {
			held.Holder, held.HoldID = h.Owner, h.HoldID
		}
	}
	return held
}

// notHeld tells why the hold that g names is gone, if the store remembers.
func (s *Store) notHeld(d *Driver, g *backend.Grant) error {
	reason := s.ended.reason(g.Token)
	if s.forgot(d) != nil {
		reason = backend.ReasonHistoryLost
	}
	return &backend.NotHeldError{Name: g.Name, Reason: reason}
}

// forgot says that the store knows nothing any more of what it told d, after a Wipe.
func (s *Store) forgot(d *Driver) error {
	if d.space == s.space {
		return nil
	}
	return &backend.HistoryError{What: "token space", Was: d.space, Now: s.space}
}
