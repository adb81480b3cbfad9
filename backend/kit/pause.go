package kit

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// RetryPause spreads repetitions: a fortieth to a twentieth of the TTL, between 25 ms and 1 s.
func RetryPause(ttl time.Duration) time.Duration {
	longest := min(max(ttl/20, 50*time.Millisecond), time.Second)
	return longest/2 + rand.N(longest/2)
}

// Sleep waits for d. If ctx ends first it returns Ended.
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

// Ended is why ctx has ended: backend.ErrClosed if the gate closed it, see Gate.Bind, and ctx.Err() otherwise.
func Ended(ctx context.Context) error {
	if cause := context.Cause(ctx); errors.Is(cause, backend.ErrClosed) {
		return backend.ErrClosed
	}
	return ctx.Err()
}
