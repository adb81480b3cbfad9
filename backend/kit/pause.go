package kit

// Pauses between repetitions. All are jittered, since clients that lost the same server at the same moment would
// otherwise always come back at the same moment; and all end with a context.

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// RetryPause returns how long to wait before the repetition of an operation that should succeed within ttl: a random
// time
// between a fortieth and a twentieth of the TTL, no less than 25 ms and no more than 1 s. So twenty repetitions or
// more fit in a TTL of a second or more, and a client with a long TTL asks a service that is down at most about twice
// a second.
func RetryPause(ttl time.Duration) time.Duration { return RetryPauseAt(ttl, rand.Float64()) }

// RetryPauseAt is RetryPause for a given chance, at least 0 and below 1.
func RetryPauseAt(ttl time.Duration, chance float64) time.Duration {
	longest := min(max(ttl/20, 50*time.Millisecond), time.Second)
	return longest/2 + time.Duration(chance*float64(longest/2))
}

// Sleep waits for d and returns nil. If ctx ends first it returns Ended immediately, and leaves no timer behind.
//
//	for {
//		done, err := attempt(ctx)
//		if done || !passes(err) {
//			return err
//		}
//		if ended := kit.Sleep(ctx, kit.RetryPause(r.TTL)); ended != nil {
//			return errors.Join(ended, err)
//		}
//	}
func Sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return Ended(ctx)
	}
}

// Ended returns why ctx has ended: backend.ErrClosed if the gate closed it, see Gate.Bind, and ctx.Err() otherwise.
// The cause of a caller's own context, which may be another driver's backend.ErrClosed, is left out; the core adds it
// where it matters. Nil if ctx has not ended.
func Ended(ctx context.Context) error {
	if closed := (*gateClosed)(nil); errors.As(context.Cause(ctx), &closed) {
		return backend.ErrClosed
	}
	return ctx.Err()
}
