package fencelock

import (
	"context"
	"errors"
	"sync"

	"github.com/fencelock/fencelock/backend"
)

// repeats finds the holds of this client by the ids that its callers gave them with RequestID. The service never sees
// these ids: each attempt has a random key of its own, so that whatever is delivered late can only meet the attempt
// that it belongs to, and so that nobody else's client can move a hold.
type repeats struct {
	mu sync.Mutex // protects the following field and those of all repeats
	by map[repeatKey]*repeat
}

type repeatKey struct{ name, requestID string }

// repeat is one id in use: by a call in flight, and then by its hold.
type repeat struct {
	key  repeatKey
	done chan struct{} // closed when the call has ended
	hold *hold         // what it got
}

// find returns the place of an id that is in use, or makes one: the caller owns it then, and calls settle.
func (rs *repeats) find(key repeatKey) (r *repeat, owner bool) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if r := rs.by[key]; r != nil {
		return r, false
	}
	if rs.by == nil {
		rs.by = map[repeatKey]*repeat{}
	}
	r = &repeat{key: key, done: make(chan struct{})}
	rs.by[key] = r
	return r, true
}

// settle ends the call that owns a place. h is nil if it failed.
func (rs *repeats) settle(r *repeat, h *hold) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r.hold = h
	close(r.done)
	if h == nil || h.cause.Load() != nil {
		rs.remove(r)
	}
}

// drop frees the id of a hold that has ended.
func (rs *repeats) drop(h *hold) {
	if h.repeat == nil {
		return
	}
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if h.repeat.hold == h {
		rs.remove(h.repeat)
	}
}

func (rs *repeats) remove(r *repeat) {
	if rs.by[r.key] == r {
		delete(rs.by, r.key)
	}
}

// repeated waits for the call that has the id already, and returns a lease of its hold. Nil and no error: the id is
// free again.
func (c *Client) repeated(ctx context.Context, p *repeat, l line, r *backend.Request) (*Lease, error) {
	select {
	case <-p.done:
	default:
		if !r.Wait {
			return nil, &HeldError{Name: r.Name, HoldID: r.HoldID, SameRequest: true}
		}
		select {
		case <-p.done:
		case <-ctx.Done():
			return nil, endOf(ctx)
		}
	}
	c.repeats.mu.Lock()
	h := p.hold
	c.repeats.mu.Unlock()
	if h == nil || h.ended() != nil {
		return nil, nil
	}
	return h.replace(l, r)
}

// replace hands the hold to a new lease; those that had it before are lost with ReasonReplaced. Nil and no error: the
// hold has ended.
func (h *hold) replace(l line, r *backend.Request) (*Lease, error) {
	h.mu.Lock()
	if h.cause.Load() != nil {
		h.mu.Unlock()
		return nil, nil
	}
	if err := h.fits(r); err != nil {
		h.mu.Unlock()
		return nil, err
	}
	cause := h.lostFor(ReasonReplaced, nil)
	before := ending{cause: cause}
	before.take(h.leases)
	for _, old := range h.leases {
		old.over.Store(&cause)
	}
	lease := &Lease{of: h, line: l}
	h.leases = append(h.one[:0], lease)
	now := h.client.observedNow()
	h.tell(Event{Type: EventLost, Held: now.Sub(h.since), Reason: ReasonReplaced})
	h.tell(Event{Type: EventAcquired})
	h.mu.Unlock()
	before.cancel()
	return lease, nil
}

// fits reports whether the hold is what r asks for. The caller holds mu.
func (h *hold) fits(r *backend.Request) error {
	g := &h.grant
	if g.Kind != r.Kind || g.Permits != r.Permits || g.Limit != r.Limit || g.Hierarchical != r.Hierarchical {
		return ErrLimitMismatch
	}
	return nil
}

// sameRequest marks the error of meeting a holder that has the same request id, in another client or in an earlier life
// of this process.
func sameRequest(err error, r *backend.Request) {
	if held := (*HeldError)(nil); errors.As(err, &held) && held.HoldID == r.HoldID && r.HoldID != "" {
		held.SameRequest = true
	}
}
