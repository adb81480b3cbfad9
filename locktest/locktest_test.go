package locktest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/locktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// nightly is code under test: it works until its lock is lost.
func nightly(ctx context.Context, locks fencelock.Locker) error {
	return locks.Do(ctx, "nightly", func(ctx context.Context, _ *fencelock.Lease) error {
		<-ctx.Done()
		return context.Cause(ctx)
	})
}

// simulated runs f in simulated time, while c runs nightly. The work must end with the reason.
func simulated(
	t *testing.T, reason fencelock.Reason, f func(t *testing.T, s *locktest.Service, c *locktest.Contender),
) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := locktest.New(t, &fencelock.Options{Namespace: "app"})
		c := s.Contender()
		done := make(chan error, 1)
		go func() { done <- nightly(t.Context(), c) }()
		synctest.Wait()
		f(t, s, c)
		var lost *fencelock.LostError
		if err := <-done; !errors.As(err, &lost) || lost.Reason != reason {
			t.Errorf("the work ended with %v, want its lock lost as %s", err, reason)
		}
	})
}

// TestStopsWithoutItsLock is the example of the package comment.
func TestStopsWithoutItsLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // time is simulated: a TTL of 30 s passes at once
		service := locktest.New(t, nil)
		mine := service.Contender() // a fencelock.Locker, for the code under test
		done := make(chan error, 1)
		go func() { done <- nightly(t.Context(), mine) }()
		synctest.Wait() // until it works under its lock

		theirs := service.Steal("nightly") // as if it had slept past its TTL
		defer theirs.Release(t.Context())
		if err := <-done; !errors.Is(err, fencelock.ErrLost) {
			t.Errorf("nightly = %v, want it to stop", err)
		}
	})
}

func TestStealTakesWithAGreaterToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := locktest.New(t, nil)
		first, err := s.Contender().Acquire(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		second := s.Steal("x")
		synctest.Wait()
		if second.Token() <= first.Token() || first.Err() == nil || second.Err() != nil {
			t.Errorf("tokens %v and %v, leases %v and %v", first.Token(), second.Token(), first.Err(), second.Err())
		}
	})
}

func TestLosses(t *testing.T) {
	simulated(t, fencelock.ReasonExpired, func(t *testing.T, s *locktest.Service, _ *locktest.Contender) {
		if !s.Expire("nightly") || s.Expire("nightly") {
			t.Error("Expire does not say whether somebody held the name")
		}
	})
	simulated(t, fencelock.ReasonEvicted, func(t *testing.T, s *locktest.Service, _ *locktest.Contender) {
		if !s.Evict("nightly") || s.Evict("nightly") {
			t.Error("Evict does not say whether somebody held the name")
		}
	})
	simulated(t, fencelock.ReasonExpired, func(t *testing.T, s *locktest.Service, _ *locktest.Contender) {
		s.Steal("nightly")
	})
	simulated(t, fencelock.ReasonExpired, func(_ *testing.T, _ *locktest.Service, c *locktest.Contender) { c.Cut() })
	simulated(t, fencelock.ReasonHistoryLost,
		func(_ *testing.T, s *locktest.Service, _ *locktest.Contender) { s.Store().Wipe() })
}

func TestNetworks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := locktest.New(t, nil)
		one, other := s.Contender(), s.Contender()
		try := func(c *locktest.Contender) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			lease, err := c.TryAcquire(ctx, "x")
			if err == nil {
				err = lease.Release(ctx)
			}
			return err
		}
		one.Cut()
		if err := try(one); !errors.Is(err, fencelock.ErrUnknown) {
			t.Errorf("cut off: %v, want ErrUnknown", err)
		}
		one.Refuse()
		if err := try(one); !errors.Is(err, fencelock.ErrUnavailable) {
			t.Errorf("refused: %v, want ErrUnavailable", err)
		}
		if err := try(other); err != nil {
			t.Errorf("the other contender: %v", err)
		}
		one.Heal()
		one.Delay(100 * time.Millisecond)
		if began := time.Now(); try(one) != nil || time.Since(began) != 400*time.Millisecond {
			t.Errorf("two calls over a slow network took %v, want four times 100 ms", time.Since(began))
		}
	})
}
