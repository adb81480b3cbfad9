package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// opened returns a client that the test closes.
func opened(t *testing.T, d backend.FencingDriver, o fencelock.Options) *fencelock.Client {
	t.Helper()
	c, err := fencelock.ForCorrectness(d, &o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The pattern of SIGTERM. Close waits for a release that is in flight, and the lock is free afterwards.
func TestCloseWaitsForAReleaseInFlight(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		s.release = func(ctx context.Context, g backend.Grant) error {
			time.Sleep(100 * time.Millisecond)
			return s.Driver.Release(ctx, g)
		}
		c := opened(t, s, fencelock.Options{})
		lease := mustAcquire(t, c, "x")
		released := make(chan error, 1)
		go func() { released <- lease.Release(t.Context()) }()
		synctest.Wait()
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-released; err != nil {
			t.Errorf("the release that was in flight: %v", err)
		}
		if n := b.store.Names(); n != 0 {
			t.Errorf("%d names are closed", n)
		}
	})
}

// Close releases no lock while a function of Do is still stopping.
func TestCloseWaitsForTheFunctionOfDo(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c := opened(t, b.store.Driver(), fencelock.Options{})
		rival, _ := b.client(fencelock.Options{})
		var inside atomic.Bool
		done := make(chan error, 1)
		go func() {
			done <- c.Do(t.Context(), "x", func(ctx context.Context, _ *fencelock.Lease) error {
				inside.Store(true)
				<-ctx.Done()
				time.Sleep(5 * time.Second) // the function takes a while to stop
				inside.Store(false)
				return nil
			})
		}()
		synctest.Wait()
		got := make(chan struct{})
		go func() {
			release(t, mustAcquire(t, rival, "x"))
			if inside.Load() {
				t.Error("the rival holds while the function runs")
			}
			close(got)
		}()
		synctest.Wait()
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		wantErr(t, <-done, fencelock.ErrLost)
		<-got
	})
}

// Close ends with its context, whatever the observer, the driver or a function does, and reports the remaining locks.
func TestCloseEndsWithItsContext(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		stuck := make(chan struct{})
		s := &scripted{Driver: b.store.Driver()}
		// It ignores its context.
		s.release = func(context.Context, backend.Grant) error { <-stuck; return backend.ErrUnknown }
		c := opened(t, s, fencelock.Options{})
		mustAcquire(t, c, "x")
		go func() {
			_ = c.Do(t.Context(), "y", func(context.Context, *fencelock.Lease) error { <-stuck; return nil })
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		began := time.Now()
		err := c.Close(ctx)
		wantErr(t, err, fencelock.ErrUnknown, context.DeadlineExceeded)
		if took := time.Since(began); took > 4100*time.Millisecond {
			t.Errorf("returned after %v, with a context of 3s and a grace of 1s", took)
		}
		close(stuck)
		time.Sleep(time.Minute)
	})
}

// An observer that calls Close does not hang indefinitely.
func TestAnObserverMayCloseTheClient(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var c *fencelock.Client
		closed := make(chan error, 1)
		c = opened(t, b.store.Driver(), fencelock.Options{Observer: fencelock.ObserverFunc(
			func(_ context.Context, e fencelock.Event) {
				if e.Type == fencelock.EventAcquired {
					closed <- c.Close(context.Background())
				}
			},
		)})
		mustAcquire(t, c, "x")
		if err := <-closed; err != nil {
			t.Error(err)
		}
	})
}

// No event is delivered after Close has returned.
func TestNoEventAfterClose(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var closed atomic.Bool
		var late atomic.Int32
		c := opened(t, b.store.Driver(), fencelock.Options{Observer: fencelock.ObserverFunc(
			func(context.Context, fencelock.Event) {
				if closed.Load() {
					late.Add(1)
				}
				time.Sleep(10 * time.Millisecond)
			},
		)})
		for i := range 500 {
			mustAcquire(t, c, fmt.Sprint("lock-", i))
		}
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		time.Sleep(10 * time.Millisecond) // the event in delivery
		closed.Store(true)
		time.Sleep(time.Minute)
		if n := late.Load(); n > 0 {
			t.Errorf("%d events after Close", n)
		}
	})
}

// A second Close returns the result of the first.
func TestASecondCloseAnswersLikeTheFirst(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c := opened(t, b.store.Driver(), fencelock.Options{})
		mustAcquire(t, c, "x")
		b.store.Pause()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		first := c.Close(ctx)
		wantErr(t, first, fencelock.ErrUnknown)
		if second := c.Close(t.Context()); second == nil || second.Error() != first.Error() {
			t.Errorf("first %v, second %v", first, second)
		}
		b.store.Resume()
	})
}

// A driver under two clients works until the last of them is closed.
func TestASharedDriverIsClosedByTheLastClient(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		d := b.store.Driver()
		one := opened(t, d, fencelock.Options{Namespace: "one"})
		two := opened(t, d, fencelock.Options{Namespace: "two"})
		if err := one.Close(t.Context()); err != nil {
			t.Error(err)
		}
		release(t, mustAcquire(t, two, "x"))
		if err := two.Close(t.Context()); err != nil {
			t.Error(err)
		}
		_, err := d.Acquire(t.Context(),
			backend.Request{Name: "x", RequestID: backend.NewRequestID(), TTL: time.Second})
		wantErr(t, err, backend.ErrClosed)
	})
}

// Hung releases do not delay other releases.
func TestHungReleasesDelayNoOtherName(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		s.release = func(ctx context.Context, g backend.Grant) error {
			if g.Name != "healthy" {
				<-ctx.Done()
				return errors.Join(backend.ErrUnknown, ctx.Err())
			}
			return s.Driver.Release(ctx, g)
		}
		c := opened(t, s, fencelock.Options{TTL: time.Hour})
		rival, _ := b.client(fencelock.Options{})
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		healthy := mustAcquire(t, c, "healthy")
		var all sync.WaitGroup
		for i := range 1000 {
			lease := mustAcquire(t, c, fmt.Sprint("hung-", i))
			all.Go(func() { _ = lease.Release(ended) })
		}
		all.Wait()
		began := time.Now()
		_ = healthy.Release(ended)
		release(t, mustAcquire(t, rival, "healthy"))
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("a healthy name stayed closed for %v behind 1000 that hang", took)
		}
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		wantErr(t, c.Close(ctx), fencelock.ErrUnknown)
	})
}

// Do and Release end soon after their context, however long the TTL, while the network does not answer.
func TestDoAndReleaseEndWithTheirContext(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, d := b.client(fencelock.Options{TTL: 30 * time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		var ended time.Time
		_ = c.Do(ctx, "x", func(ctx context.Context, _ *fencelock.Lease) error {
			d.Network().Drop(memory.Both)
			cancel()
			ended = time.Now()
			return ctx.Err()
		})
		if took := time.Since(ended); took > time.Second {
			t.Errorf("Do returned %v after the end of its context", took)
		}
		d.Network().Pass()
		lease := mustAcquire(t, c, "y")
		d.Network().Drop(memory.Both)
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		wantErr(t, lease.Release(ctx), fencelock.ErrUnknown, context.DeadlineExceeded)
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("Release returned %v after it was called with a context of 1s", took)
		}
		d.Network().Pass()
	})
}
