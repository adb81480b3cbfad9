package fencelock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend/memory"
)

func TestReentrantLeasesShareOneHold(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		outer := mustAcquire(t, c, "x")
		inner, err := c.Acquire(outer.Context(), "x", fencelock.Reentrant())
		if err != nil {
			t.Fatal(err)
		}
		deeper, err := c.TryAcquire(inner.Context(), "x", fencelock.Reentrant())
		if err != nil {
			t.Fatal(err)
		}
		if inner.Token() != outer.Token() || deeper.Token() != outer.Token() || inner.HoldID() != outer.HoldID() {
			t.Errorf("tokens %v, %v, %v of one hold", outer.Token(), inner.Token(), deeper.Token())
		}
		held := func() bool {
			_, err := c.TryAcquire(t.Context(), "x")
			return errors.Is(err, fencelock.ErrHeld)
		}
		release(t, inner)
		wantErr(t, inner.Err(), fencelock.ErrNotHeld)
		wantErr(t, inner.Release(t.Context()), fencelock.ErrNotHeld)
		if inner.Context().Err() == nil || outer.Context().Err() != nil || deeper.Context().Err() != nil || !held() {
			t.Error("the release of one of three leases ended another, or not itself")
		}
		release(t, outer) // before the inner lease: the hold continues
		wantErr(t, outer.Release(t.Context()), fencelock.ErrNotHeld)
		wantErr(t, outer.Extend(t.Context(), time.Minute), fencelock.ErrNotHeld)
		time.Sleep(10 * fencelock.DefaultTTL)
		if deeper.Err() != nil || !held() {
			t.Error("the hold ended with its first lease, though another one lives")
		}
		if err := deeper.Extend(t.Context(), time.Minute); err != nil {
			t.Error(err)
		}
		release(t, deeper)
		release(t, mustAcquire(t, c, "x"))
		if _, err := c.TryAcquire(context.WithoutCancel(outer.Context()), "x", fencelock.Reentrant()); err != nil {
			t.Errorf("with a lease that was released: %v, want its own hold", err)
		}
	})
}

func TestReentrantLeasesAreLostTogether(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		outer := mustAcquire(t, c, "x")
		inner, err := c.Acquire(outer.Context(), "x", fencelock.Reentrant())
		if err != nil {
			t.Fatal(err)
		}
		ctx := inner.Context()
		b.store.Evict("x")
		<-ctx.Done()
		<-outer.Context().Done()
		for _, l := range []*fencelock.Lease{inner, outer} {
			lost := (*fencelock.LostError)(nil)
			if !errors.As(context.Cause(l.Context()), &lost) || lost.Reason != fencelock.ReasonEvicted {
				t.Errorf("the cause is %v, want a LostError: evicted", context.Cause(l.Context()))
			}
			wantErr(t, l.Err(), fencelock.ErrLost)
			wantErr(t, l.Release(t.Context()), fencelock.ErrLost)
		}
		_, err = c.Acquire(outer.Context(), "x", fencelock.Reentrant())
		wantErr(t, err, fencelock.ErrLost)
	})
}

// A loss that a renewal reports has the driver's ErrNotHeld in its chain, but is no release: the work under the lease
// is notified, even if its context has not ended.
func TestLossIsNoReleaseForTheWorkUnderIt(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, d := b.client(fencelock.Options{TTL: 3 * time.Second})
		outer := mustAcquire(t, c, "x")
		d.Network().Drop(memory.Replies) // including the pushed loss
		b.store.Evict("x")
		d.Network().Pass()
		<-outer.Context().Done()
		wantErr(t, outer.Err(), fencelock.ErrLost)
		wantErr(t, outer.Err(), fencelock.ErrNotHeld)
		again, err := c.Acquire(context.WithoutCancel(outer.Context()), "x", fencelock.Reentrant())
		if wantErr(t, err, fencelock.ErrLost); err == nil {
			release(t, again)
		}
	})
}

func TestReentrantNeedsTheContextOfTheLease(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		other, _ := b.client(fencelock.Options{})
		outer := mustAcquire(t, c, "x")
		for what, try := range map[string]func() (*fencelock.Lease, error){
			"another context": func() (*fencelock.Lease, error) {
				return c.TryAcquire(t.Context(), "x", fencelock.Reentrant())
			},
			"another client": func() (*fencelock.Lease, error) {
				return other.TryAcquire(outer.Context(), "x", fencelock.Reentrant())
			},
			"no option": func() (*fencelock.Lease, error) { return c.TryAcquire(outer.Context(), "x") },
		} {
			if _, err := try(); !errors.Is(err, fencelock.ErrHeld) {
				t.Errorf("with %s: %v, want ErrHeld", what, err)
			}
		}
		release(t, outer)
		read := mustAcquire(t, c, "x", fencelock.Shared())
		_, err := c.Acquire(read.Context(), "x", fencelock.Reentrant())
		wantErr(t, err, fencelock.ErrDeadlock)
		again, err := c.Acquire(read.Context(), "x", fencelock.Shared(), fencelock.Reentrant())
		if err != nil {
			t.Fatal(err)
		}
		release(t, again, read)
	})
}

func TestWaitingForOneselfIsADeadlock(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		err := c.Do(t.Context(), "x", func(ctx context.Context, _ *fencelock.Lease) error {
			return c.Do(ctx, "x", func(context.Context, *fencelock.Lease) error { return nil })
		})
		wantErr(t, err, fencelock.ErrDeadlock)
		cycle := (*fencelock.DeadlockError)(nil)
		if !errors.As(err, &cycle) || len(cycle.Cycle) != 1 || cycle.Cycle[0].Wants != "x" {
			t.Errorf("error %v does not contain the cycle", err)
		}
	})
}

// Two clients of one driver are one service: the line of work leads from one to the other.
func TestWaitingForOneselfThroughAnotherClientIsADeadlock(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		d := b.store.Driver()
		one, two := b.over(d, fencelock.Options{}), b.over(d, fencelock.Options{})
		err := one.Do(t.Context(), "x", func(ctx context.Context, _ *fencelock.Lease) error {
			_, err := two.Acquire(ctx, "x", fencelock.WaitAtMost(time.Hour))
			return err
		})
		wantErr(t, err, fencelock.ErrDeadlock)
	})
}

func TestDeadlockIsRefusedWithItsCycle(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		clients := map[string]*fencelock.Client{}
		leases := map[string]*fencelock.Lease{}
		for _, name := range []string{"a", "b", "c"} {
			clients[name], _ = b.client(fencelock.Options{Owner: "holder of " + name})
			leases[name] = mustAcquire(t, clients[name], name)
		}
		done := make(chan error, 2)
		next := func(has, wants string) error {
			l, err := clients[has].Acquire(leases[has].Context(), wants)
			if err == nil {
				err = l.Release(t.Context())
			}
			return err
		}
		for has, wants := range map[string]string{"a": "b", "b": "c"} {
			go func() {
				err := next(has, wants)
				release(t, leases[has])
				done <- err
			}()
		}
		synctest.Wait()
		err := next("c", "a")
		cycle := (*fencelock.DeadlockError)(nil)
		if !errors.As(err, &cycle) || len(cycle.Cycle) != 3 {
			t.Fatalf("closing the cycle = %v, want an error", err)
		}
		for _, part := range []string{`holder of c has "c" and wants "a"`, `holder of a has "a" and wants "b"`} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%v does not say: %s", err, part)
			}
		}
		release(t, leases["c"])
		for range 2 {
			if err := <-done; err != nil {
				t.Errorf("a waiter outside the refused request = %v", err)
			}
		}
	})
}

// Two lines of work of one client that wait for locks of that client are no cycle: neither waits for itself.
func TestAgentsOfOneClientDoNotStandForEachOther(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		d, _ := b.client(fencelock.Options{})
		x := mustAcquire(t, c, "x")
		y := mustAcquire(t, d, "y")
		got := make(chan *fencelock.Lease)
		go func() { got <- mustAcquire(t, c, "y") }() // not under the lease of x
		synctest.Wait()
		go func() {
			l, err := d.Acquire(y.Context(), "x")
			if err != nil {
				t.Errorf("waiting for a line of work that waits for nothing = %v", err)
			}
			got <- l
		}()
		synctest.Wait()
		release(t, x)
		release(t, <-got)
		release(t, y)
		release(t, <-got)
	})
}

func TestOrderIsChecked(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{Order: strings.Compare})
		outer := mustAcquire(t, c, "b")
		_, err := c.Acquire(outer.Context(), "a")
		order := (*fencelock.DeadlockError)(nil)
		if !errors.Is(err, fencelock.ErrDeadlock) || !errors.As(err, &order) || !order.Order ||
			order.Cycle[0].Holds != "b" || order.Cycle[0].Wants != "a" {
			t.Errorf("against the order: %v", err)
		}
		if _, err := c.AcquireAll(outer.Context(), []string{"c", "a"}); !errors.As(err, &order) {
			t.Errorf("one of several against the order: %v", err)
		}
		for _, name := range []string{"c", "b"} {
			inner, err := c.Acquire(outer.Context(), name, fencelock.Reentrant())
			if err != nil {
				t.Fatalf("in the order: %v", err)
			}
			release(t, inner)
		}
		try, err := c.TryAcquire(outer.Context(), "a") // does not wait
		if err != nil {
			t.Fatal(err)
		}
		release(t, try, outer)
		release(t, mustAcquire(t, c, "a"))
	})
}
