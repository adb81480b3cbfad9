package fencelock_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

// Drain refuses new work, lets running work finish, including the locks that it still takes, and then closes.
func TestDrainFinishesRunningWork(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c := opened(t, b.store.Driver(), fencelock.Options{TTL: 3 * time.Second})
		rival, _ := b.client(fencelock.Options{})
		held := mustAcquire(t, c, "held")
		taken := mustAcquire(t, rival, "taken")
		worked := make(chan error, 1)
		go func() {
			worked <- c.Do(t.Context(), "work", func(ctx context.Context, _ *fencelock.Lease) error {
				time.Sleep(10 * time.Second) // Drain has begun
				return c.Do(ctx, "inner", func(ctx context.Context, _ *fencelock.Lease) error {
					time.Sleep(10 * time.Second)
					return ctx.Err()
				})
			})
		}()
		waited := make(chan error, 1)
		go func() {
			_, err := c.Acquire(t.Context(), "taken")
			waited <- err
		}()
		synctest.Wait()
		drained := make(chan error, 1)
		began := time.Now()
		go func() { drained <- c.Drain(t.Context()) }()
		synctest.Wait()
		wantErr(t, <-waited, fencelock.ErrClosed)
		_, err := c.TryAcquire(t.Context(), "new")
		wantErr(t, err, fencelock.ErrClosed)
		if err := <-worked; err != nil {
			t.Errorf("the work that ran: %v", err)
		}
		time.Sleep(time.Minute)
		select {
		case err := <-drained:
			t.Fatalf("drained with a lease that is held: %v", err)
		default:
		}
		if err := held.Err(); err != nil {
			t.Errorf("a lease that is not renewed while Drain waits: %v", err)
		}
		release(t, held)
		if err := <-drained; err != nil || time.Since(began) < time.Minute {
			t.Errorf("Drain = %v after %v", err, time.Since(began))
		}
		wantErr(t, c.Lead(t.Context(), "x", func(context.Context, *fencelock.Lease) error { return nil }),
			fencelock.ErrClosed)
		release(t, taken)
		if n := b.store.Names(); n != 0 {
			t.Errorf("%d names are in use", n)
		}
	})
}

// A Drain whose context ends does not close the client and interrupts no work.
func TestInterruptedDrainKeepsTheClientOpen(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c := opened(t, b.store.Driver(), fencelock.Options{})
		stop := make(chan struct{})
		led := make(chan error, 1)
		go func() {
			led <- c.Lead(t.Context(), "x", func(ctx context.Context, _ *fencelock.Lease) error {
				<-stop
				return ctx.Err()
			})
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		wantErr(t, c.Drain(ctx), context.DeadlineExceeded)
		_, err := c.TryAcquire(t.Context(), "y")
		wantErr(t, err, fencelock.ErrClosed)
		again := make(chan error, 1)
		go func() { again <- c.Drain(t.Context()) }()
		synctest.Wait()
		close(stop)
		if err := <-led; err != nil {
			t.Errorf("the leader: %v", err)
		}
		if err := <-again; err != nil {
			t.Errorf("the second Drain: %v", err)
		}
		if err := c.Drain(t.Context()); err != nil {
			t.Errorf("Drain of a closed client: %v", err)
		}
	})
}

// A concurrent Close ends Drain.
func TestCloseEndsDrain(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c := opened(t, b.store.Driver(), fencelock.Options{})
		mustAcquire(t, c, "x")
		drained := make(chan error, 1)
		go func() { drained <- c.Drain(t.Context()) }()
		synctest.Wait()
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-drained; err != nil {
			t.Errorf("Drain = %v", err)
		}
	})
}

// Close with an ended context releases the locks, and passes the driver a context that has not ended.
func TestCloseAfterTheEndOfItsContext(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		s.release = func(ctx context.Context, g backend.Grant) error {
			time.Sleep(50 * time.Millisecond) // the latency of a network
			if err := ctx.Err(); err != nil {
				return err
			}
			return s.Driver.Release(ctx, g)
		}
		d := &lateClose{scripted: s}
		c := opened(t, d, fencelock.Options{})
		for _, name := range []string{"a", "b", "c"} {
			mustAcquire(t, c, name)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		began := time.Now()
		if err := c.Close(ctx); err != nil {
			t.Errorf("Close = %v", err)
		}
		if took := time.Since(began); took > time.Second || b.store.Names() != 0 || d.with != nil {
			t.Errorf("after %v %d names are in use, and the driver's context was %v", took, b.store.Names(), d.with)
		}
	})
}

// An unresponsive network delays Close by a second at most.
func TestCloseAfterTheEndOfItsContextIsBounded(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c := opened(t, b.store.Driver(), fencelock.Options{})
		mustAcquire(t, c, "x")
		b.store.Pause()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		began := time.Now()
		wantErr(t, c.Close(ctx), fencelock.ErrUnknown, context.Canceled)
		if took := time.Since(began); took > 1100*time.Millisecond {
			t.Errorf("returned after %v", took)
		}
		b.store.Resume()
	})
}

// lateClose notes whether Close gets a context that has not ended.
type lateClose struct {
	*scripted
	with error
}

func (d *lateClose) IssuesFencingTokens() backend.Driver { return d }
func (d *lateClose) Close(ctx context.Context) error {
	d.with = ctx.Err()
	return d.Driver.Close(ctx)
}
