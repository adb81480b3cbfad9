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
// these ids: each attempt has its own random key, so that a late request can only meet its own attempt, and so that
// no other client can move a hold.
//
// A worker takes "order/7" with the id of a message, and the message is delivered again:
//
//	same process       the second call gets a lease of the same hold, with the same token; the first lease is replaced
//	another process    the second call waits, or gets ErrHeld with HeldError.SameRequest
//	after a release    the id is free: a new hold, with a new key and a greater token
type repeats struct {
	mu sync.Mutex // protects the following field and the fields of all repeats
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
	// hold is the result of the call; nil before settle, and if it failed.
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

// settle ends the call that owns an id, and admits the calls that wait for it. h is nil if it failed. A hold that has
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

// free frees the id of a call that failed, or of a hold that has ended.
func (rs *repeats) free(r *repeat) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.remove(r)
}

// wait waits for the call that owns the id, and returns its hold; nil if that call failed. TryAcquire does not wait: a
// call in flight may hold the lock, so the error is ErrHeld with SameRequest.
func (rs *repeats) wait(ctx context.Context, owned *repeat, r *backend.Request) (*hold, error) {
	select {
	case <-owned.done:
	default:
		if !r.Wait {
			return nil, &HeldError{Name: r.Name, HoldID: r.HoldID, SameRequest: true}
		}
		select {
		case <-owned.done:
		case <-ctx.Done():
			return nil, endOf(ctx)
		}
	}
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return owned.hold, nil
}

// sameRequest marks the error of meeting a holder that has the same request id, in another client or in an earlier life
// of this process. They are recognized by HoldID, a hash of the id, which is all that others see.
func sameRequest(err error, r *backend.Request) {
	if held := (*HeldError)(nil); errors.As(err, &held) && held.HoldID == r.HoldID && r.HoldID != "" {
		held.SameRequest = true
	}
}
