package redisconn

// This file waits: between repetitions, and for contexts. All pauses are random within bounds, since what fails for one
// client fails for all of them at the same moment.

import (
	"context"
	mathrand "math/rand/v2"
	"time"
)

// Backoff returns the pause before the n-th repetition: about 10 ms, doubling to 640 ms, between half and all of it,
// so that callers that failed together do not come back together.
func Backoff(n int) time.Duration {
	d := 10 * time.Millisecond << min(n-1, 6)
	return d/2 + mathrand.N(d/2)
}

// Pause waits for Backoff(n). It is false if ctx ended.
func Pause(ctx context.Context, n int) bool { return PauseFor(ctx, Backoff(n)) }

// tryTime is the least that a context has to leave for another try.
const tryTime = 20 * time.Millisecond

// PauseFor waits for d. It is false if ctx ended. A pause after which ctx would leave no time for a try lasts until
// ctx ends: that try could only report a timeout, and not why the earlier tries have failed.
func PauseFor(ctx context.Context, d time.Duration) bool {
	if at, ok := ctx.Deadline(); ok && time.Until(at) < d+tryTime {
		d = time.Until(at) + time.Second // bounded, for a context that never ends although its deadline has passed
	}
	// Bounded in any case: the timer ends with this call.
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// Await waits until all have ended, or for ctx.
func Await(ctx context.Context, all ...<-chan struct{}) error {
	for _, ended := range all {
		select {
		case <-ended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// WithDeadline bounds an exchange without the cost of a timer: go-redis sets the connection's deadline from the
// context's.
func WithDeadline(ctx context.Context, at time.Time) context.Context { return deadlineContext{ctx, at} }

// deadlineContext has a deadline and does not end by it.
type deadlineContext struct {
	context.Context
	at time.Time
}

// Deadline returns the deadline given to WithDeadline.
func (c deadlineContext) Deadline() (time.Time, bool) { return c.at, true }
