package memory

import (
	"maps"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// entry is one name that is held, closed or waited for, or an ancestor of such a name. Other names have none.
type entry struct {
	name  string
	limit int  // of permits; zero for all other kinds
	tree  bool // in use by hierarchical requests

	holds   []*hold   // of this very name
	queue   []*waiter // by arrival, those for names below too
	claimed [uses]int // how many holds, of this name and below, by use
	permits int       // held

	single hold // the memory of the first hold: most names never have two
}

// hold is one hold of a name. Once it has ended it may go on to keep the name closed, for what is left of its minimum.
type hold struct {
	entry       *entry
	claim       claim // of the name itself
	kind        backend.Kind
	requestID   string
	holdID      string
	owner       string
	token       fencing.Token
	incarnation string
	ttl         time.Duration
	since       backend.Instant
	expires     backend.Instant
	closes      backend.Instant // the end of the minimum; zero: none
	vacant      bool            // over, and only keeps the name closed
	queued      bool            // granted out of the queue
	metadata    map[string]string
	lost        func(backend.Reason)
	driver      *Driver // whom lost belongs to
	alarm       alarm
}

// waiter is one set of requests that waits for all of its names at once, with a place in the queue of each.
type waiter struct {
	requests []backend.Request
	claims   []claim
	driver   *Driver
	push     func(answer)
	alarm    alarm
}

// entryFor returns the entry of a claim's name, and makes it if there is none.
func (s *Store) entryFor(c *claim) *entry {
	e := s.names[c.name]
	if e == nil {
		if n := len(s.spare); n > 0 {
			e, s.spare = s.spare[n-1], s.spare[:n-1]
		} else {
			e = &entry{}
		}
		e.name, e.limit, e.tree = c.name, c.limit, c.tree
		s.names[c.name] = e
	}
	return e
}

// dropIdle forgets e if nothing is left of it, and keeps some of the memory for the next name.
func (s *Store) dropIdle(e *entry) {
	if len(e.queue) > 0 || e.claimed != [uses]int{} {
		return
	}
	delete(s.names, e.name)
	e.name, e.queue = "", nil
	if len(s.spare) < 64 {
		s.spare = append(s.spare, e)
	}
}

// newHold returns the memory for one more hold.
func (e *entry) newHold() *hold {
	h := &e.single
	if h.entry != nil {
		h = &hold{}
	}
	h.entry = e
	h.alarm = alarm{index: idle, hold: h}
	e.holds = append(e.holds, h)
	return h
}

func (e *entry) removeHold(h *hold) {
	i := slices.Index(e.holds, h)
	e.holds = slices.Delete(e.holds, i, i+1)
	*h = hold{}
}

// count adds n times what c claims.
func (e *entry) count(c *claim, n int) {
	e.claimed[c.use] += n
	e.permits += n * c.permits
}

// bars tells whether those who have e keep c out.
func (e *entry) bars(c *claim) bool {
	for u, n := range e.claimed {
		if n > 0 && excludes[c.use][u] {
			return true
		}
	}
	return c.use == permits && e.permits+c.permits > c.limit
}

// behind tells whether c has to stay behind w, which waits: a waiter for permits lets nobody past.
func (c *claim) behind(w *waiter) bool {
	for i := range w.claims {
		if other := &w.claims[i]; other.name == c.name && (excludes[c.use][other.use] || c.use == permits) {
			return true
		}
	}
	return false
}

// find returns the living hold of a request, or nil.
func (e *entry) find(requestID string) *hold {
	for _, h := range e.holds {
		if h.requestID == requestID && !h.vacant {
			return h
		}
	}
	return nil
}

// findGrant returns the living hold that g is, by request and by incarnation, never by name alone.
func (e *entry) findGrant(g *backend.Grant) *hold {
	if h := e.find(g.RequestID); h != nil && h.token == g.Token && h.incarnation == g.Incarnation {
		return h
	}
	return nil
}

// waiter returns the waiter that a request belongs to, or nil.
func (e *entry) waiter(requestID string) *waiter {
	for _, w := range e.queue {
		for i := range w.requests {
			if r := &w.requests[i]; r.RequestID == requestID && r.Name == e.name {
				return w
			}
		}
	}
	return nil
}

// ends is when a hold stops to keep others out, unless it is renewed.
func (h *hold) ends() backend.Instant {
	if h.vacant {
		return h.closes
	}
	return max(h.expires, h.closes)
}

// held counts the living holds of the name itself.
func (e *entry) held() int {
	n := 0
	for _, h := range e.holds {
		if !h.vacant {
			n++
		}
	}
	return n
}

// heldError tells a newcomer under the given name who is in its way.
func (e *entry) heldError(name string, now backend.Instant) error {
	held := &backend.HeldError{Name: name}
	for _, h := range e.holds {
		left := h.ends().Sub(now)
		if held.RetryAfter == 0 || left < held.RetryAfter {
			held.RetryAfter = left
		}
		if held.Holder == "" && !h.vacant {
			held.Holder, held.HoldID = h.owner, h.holdID
		}
	}
	return held
}

func cloneMetadata(m map[string]string) map[string]string {
	if len(m) == 0 {
		return nil
	}
	return maps.Clone(m)
}
