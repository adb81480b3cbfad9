package fencelock

// Request ids of callers. An id that a caller gives with RequestID makes a repetition through the same client
// idempotent, and is never sent: the service gets a random key for each attempt.
//
//	free ──find──► in flight ──settle(hold)──► of a hold ──drop──► free
//	                   └──────settle(nil)─────────────────────────► free
//
// The simpler way, to send the caller's id as the key, would be wrong in two respects: another client with the same id
// would get the same hold with the same token, so that a guard could not tell the two apart; and a Release for the
// first attempt that is delivered late would take the hold of the second (TestALateReleaseMeetsOnlyItsOwnAttempt).

import (
	"context"
	"errors"
	"sync"

	"github.com/fencelock/fencelock/backend"
)

// repeats finds the holds of this client by the ids that its callers gave them with RequestID. The service never sees
// these ids: each attempt has a random key of its own, so that whatever is delivered late can only meet the attempt
// that it belongs to, and so that nobody else's client can move a hold.
//
// A worker takes "order/7" with the id of a message, and the message is delivered again:
//
//	same process       the second call gets a lease of the same hold, with the same token; the first lease is replaced
//	another process    the second call waits, or gets ErrHeld with HeldError.SameRequest
//	after a release    the id is free: a new hold, with a new key and a greater token
type repeats struct {
	mu sync.Mutex // protects the following field and those of all repeats
	by map[repeatKey]*repeat
}

// repeatKey is the whole name, with the namespace, and the caller's id: one id may be in use for several names.
type repeatKey struct{ name, requestID string }

// repeat is one id in use: by a call in flight, and then by its hold.
//
// It is in the table from find until settle(nil) or the end of its hold.
type repeat struct {
	// key is where the place stands in the table.
	key repeatKey
	// done is closed by settle, under repeats.mu, when the call that owns the id has ended; hold is set before that.
	done chan struct{}
	// hold is what the call got; nil before settle, and if it failed.
	hold *hold
}

// find returns the place of an id that is in use, or makes one: the caller owns it then, and has to call settle, also
// after a panic, or every later call with the id would wait until its context ends.
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

// settle ends the call that owns a place, and lets those in who wait for it. h is nil if it failed. A hold that has
// ended meanwhile frees the id at once, since its drop may have come first.
func (rs *repeats) settle(r *repeat, h *hold) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r.hold = h
	close(r.done)
	if h == nil || h.cause.Load() != nil {
		rs.remove(r)
	}
}

// drop frees the id of a hold that has ended. The caller holds h.mu.
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

// remove frees a place, unless another one has the id already. The caller holds mu.
func (rs *repeats) remove(r *repeat) {
	if rs.by[r.key] == r {
		delete(rs.by, r.key)
	}
}

// repeated waits for the call that has the id already, and returns a lease of its hold. Nil and no error: the id is
// free again, because that call failed or its hold has ended. TryAcquire does not wait: a call that is in flight is
// somebody who may hold the lock, so it is ErrHeld with SameRequest.
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

// replace hands the hold to a new lease; those that had it before are lost with ReasonReplaced, and their Release does
// nothing then: it must not end the hold under the lease that has it now. To the observer one lease is lost and another
// begins. Nil and no error: the hold has ended.
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

// fits returns ErrLimitMismatch unless the hold is what r asks for. The caller holds mu.
func (h *hold) fits(r *backend.Request) error {
	g := &h.grant
	if g.Kind != r.Kind || g.Permits != r.Permits || g.Limit != r.Limit || g.Hierarchical != r.Hierarchical {
		return ErrLimitMismatch
	}
	return nil
}

// sameRequest marks the error of meeting a holder that has the same request id, in another client or in an earlier life
// of this process. They are recognized by HoldID, a hash of the id, which is all that others see.
func sameRequest(err error, r *backend.Request) {
	if held := (*HeldError)(nil); errors.As(err, &held) && held.HoldID == r.HoldID && r.HoldID != "" {
		held.SameRequest = true
	}
}
