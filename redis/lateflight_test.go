package redis

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// TestCancelledRequestArrivesLast for a request that shared its round trip, on an abandoned connection.
func TestFailedFlightArrivesLast(t *testing.T) {
	t.Parallel()
	for _, wait := range []bool{false, true} {
		s := startServer(t)
		r := request("n", time.Minute, wait)
		link := newLateLink(t, s.addr, r.RequestID)
		d, other := openAt(t, link.addr), s.open(t)
		mustRelease(t, d, mustAcquire(t, d, request("warm-up", time.Minute, wait)))
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second) // the maximum time of a step
		defer cancel()
		if _, err := d.Acquire(ctx, r); !errors.Is(err, backend.ErrUnknown) ||
			!errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("wait %v: out of time: %v", wait, err)
		}
		<-link.held
		link.passRelease(t, d, r, fmt.Sprint("wait ", wait))
		g, err := other.Acquire(within(t, 10*slack), request("n", time.Minute, true))
		if err != nil {
			t.Fatalf("wait %v: the name stays closed: %v", wait, err)
		}
		mustRelease(t, other, g)
		nothingLeft(t, s)
	}
}
