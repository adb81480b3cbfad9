package kit

// Pauses between repetitions. All are jittered, since clients that lost the same server at the same moment would
// otherwise come back at the same moment, for ever; and all end with a context.

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// RetryPause returns how long to wait before a repetition of something that should succeed within ttl: a random time
// between a fortieth and a twentieth of the TTL, no less than 25 ms and no more than 1 s. So twenty repetitions or more
// fit in a TTL of a second or more, and a service that is down is asked no more than about twice a second by a client
// with a long one.
func RetryPause(ttl time.Duration) time.Duration {
	longest := min(max(ttl/20, 50*time.Millisecond), time.Second)
	return longest/2 + rand.N(longest/2)
}

// Sleep waits for d and returns nil. If ctx ends first it returns Ended at once, and leaves no timer behind.
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

// Ended says why ctx has ended: backend.ErrClosed if the gate closed it, see Gate.Bind, and ctx.Err() otherwise. The
// cause of a caller's own context is not the contract's business and is left out; the core adds it where it matters.
// Nil if ctx has not ended.
func Ended(ctx context.Context) error {
	if cause := context.Cause(ctx); errors.Is(cause, backend.ErrClosed) {
		return backend.ErrClosed
	}
	return ctx.Err()
}
