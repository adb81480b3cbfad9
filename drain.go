package fencelock

import (
	"context"
)

// Drain closes the client gracefully: it refuses new work, waits until every lease has ended and the functions of Do
// and Lead have returned, and then closes the client as Close does.
//
//	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
//	defer cancel()
//	if locks.Drain(ctx) != nil {
//		locks.Close(ctx) // interrupts what still runs
//	}
//
// From the call on, acquires of every kind return ErrClosed, and waiting acquires end with it; only a caller that
// holds a lease of this client may acquire more, with a context that comes from that lease, to finish its work.
// Leases are renewed as before. A leader leads until its function returns.
//
// If ctx ends first, Drain returns its error and interrupts no work: the client still refuses new acquires, and
// Drain or Close may follow. If the client is closed meanwhile, Drain returns the result of Close.
func (c *Client) Drain(ctx context.Context) error {
	if c.zero() {
		return callError("drain", "", errZeroClient)
	}
	settled := c.work.drain()
	defer c.work.drained(settled)
	for !c.settled() {
		select {
		case <-settled:
		case <-ctx.Done():
			return callError("drain", "", endOf(ctx))
		}
	}
	return c.Close(ctx)
}

// settled reports whether Drain is done: no call is in progress and no lease is held, or Close has begun.
func (c *Client) settled() bool {
	c.work.mu.Lock()
	defer c.work.mu.Unlock()
	c.heart.mu.Lock() // both: an acquire under a lease has a flight when that lease ends
	defer c.heart.mu.Unlock()
	return c.work.closing || len(c.work.flights) == 0 && len(c.heart.due) == 0
}

// drain refuses acquires from now on, ends acquires in progress, and returns a channel that gets a value whenever a
// flight or a hold may have ended.
func (w *work) drain() (settled chan struct{}) {
	settled = make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.settled == nil {
		w.settled = map[chan struct{}]struct{}{}
	}
	w.settled[settled] = struct{}{}
	if !w.draining.Swap(true) {
		w.end(acquiring, false)
	}
	return settled
}

// drained ends the notification that drain began.
func (w *work) drained(settled chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.settled, settled)
}

// wake notifies the calls of Drain. The caller holds mu.
func (w *work) wake() {
	for settled := range w.settled {
		select {
		case settled <- struct{}{}:
		default:
		}
	}
}

// wakeAll is wake, for callers that do not hold mu. Without a Drain it is one atomic load.
func (w *work) wakeAll() {
	if w.draining.Load() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.wake()
	}
}
