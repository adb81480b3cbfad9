package fencelock_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

func TestSharedHoldsKeepWritersOut(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		a, _ := b.client(fencelock.Options{})
		c, _ := b.client(fencelock.Options{})
		one := mustAcquire(t, a, "catalog", fencelock.Shared())
		two := mustAcquire(t, c, "catalog", fencelock.Shared())
		for _, l := range []*fencelock.Lease{one, two} {
			if !l.Token().Valid() || l.Token().Exclusive() {
				t.Errorf("the token of a shared hold is %v", l.Token())
			}
		}
		_, err := c.TryAcquire(t.Context(), "catalog")
		wantErr(t, err, fencelock.ErrHeld)

		wrote := make(chan *fencelock.Lease)
		go func() { wrote <- mustAcquire(t, c, "catalog") }()
		synctest.Wait()
		_, err = a.TryAcquire(t.Context(), "catalog", fencelock.Shared())
		wantErr(t, err, fencelock.ErrHeld) // a writer waits
		_, err = a.TryAcquire(t.Context(), "catalog", fencelock.Permits(1, 2))
		wantErr(t, err, fencelock.ErrLimitMismatch)
		release(t, one, two)
		writer := <-wrote
		if !writer.Token().Exclusive() || writer.Token().Order() <= two.Token().Order() {
			t.Errorf("the writer's token %v does not follow %v", writer.Token(), two.Token())
		}
		release(t, writer)
	})
}

func TestPermitsAreCounted(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		a, network := b.client(fencelock.Options{TTL: time.Second})
		c, _ := b.client(fencelock.Options{TTL: time.Second})
		mustAcquire(t, a, "gpus", fencelock.Permits(5, 8))
		rest := mustAcquire(t, c, "gpus", fencelock.Permits(3, 8))
		_, err := c.TryAcquire(t.Context(), "gpus", fencelock.Permits(1, 8))
		wantErr(t, err, fencelock.ErrHeld)
		_, err = c.TryAcquire(t.Context(), "gpus", fencelock.Permits(1, 9))
		wantErr(t, err, fencelock.ErrLimitMismatch)
		_, err = c.TryAcquire(t.Context(), "gpus")
		wantErr(t, err, fencelock.ErrLimitMismatch)
		network.Network().Refuse() // cuts off the holder of five
		five := mustAcquire(t, c, "gpus", fencelock.Permits(5, 8))
		release(t, five, rest)
		network.Network().Pass()
	})
}

func TestHierarchicalNamesExcludePathsAboveAndBelow(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		a, _ := b.client(fencelock.Options{})
		c, _ := b.client(fencelock.Options{Namespace: "shop"})
		_ = c
		held := mustAcquire(t, a, "a/b", fencelock.Hierarchical())
		for name, want := range map[string]error{
			"a": fencelock.ErrHeld, "a/b/c": fencelock.ErrHeld, "a/b": fencelock.ErrHeld, "a/c": nil,
			"ab": nil, "a/bc": nil,
		} {
			l, err := a.TryAcquire(t.Context(), name, fencelock.Hierarchical())
			if !errors.Is(err, want) {
				t.Errorf("beside a/b, %s is answered %v, want %v", name, err, want)
			}
			if err == nil {
				release(t, l)
			}
		}
		_, err := a.TryAcquire(t.Context(), "a")
		wantErr(t, err, fencelock.ErrLimitMismatch)
		release(t, held)
		read := mustAcquire(t, a, "a/b", fencelock.Hierarchical(), fencelock.Shared())
		beside := mustAcquire(t, a, "a", fencelock.Hierarchical(), fencelock.Shared())
		_, err = a.TryAcquire(t.Context(), "a", fencelock.Hierarchical())
		wantErr(t, err, fencelock.ErrHeld)
		release(t, read, beside)
	})
}

func TestBadKindOptions(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		for what, opts := range map[string][]fencelock.AcquireOption{
			"no permits":            {fencelock.Permits(0, 3)},
			"more than there are":   {fencelock.Permits(4, 3)},
			"a limit beyond int32":  {fencelock.Permits(1, 1<<31)},
			"two kinds":             {fencelock.Shared(), fencelock.Permits(1, 2)},
			"two kinds, turned":     {fencelock.Permits(1, 2), fencelock.Shared()},
			"permits of a path":     {fencelock.Hierarchical(), fencelock.Permits(1, 2)},
			"an id for a hold held": {fencelock.Reentrant(), fencelock.RequestID(backend.NewRequestID())},
		} {
			_, err := c.TryAcquire(t.Context(), "x", opts...)
			if !errors.Is(err, fencelock.ErrInvalidOption) {
				t.Errorf("%s: %v, want ErrInvalidOption", what, err)
			}
		}
		if b.store.Names() != 0 {
			t.Errorf("%d names are left", b.store.Names())
		}
	})
}

// A name stays closed for the delay after its holder was cut off, and not after a release.
func TestLockDelay(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		a, driver := b.client(fencelock.Options{TTL: time.Second, LockDelay: 10 * time.Second})
		c, _ := b.client(fencelock.Options{})
		release(t, mustAcquire(t, a, "x"))
		began := time.Now()
		release(t, mustAcquire(t, c, "x"))
		if took := time.Since(began); took > 0 {
			t.Errorf("after a release the name was closed for %v", took)
		}
		lease := mustAcquire(t, a, "x")
		time.Sleep(5 * time.Second)
		if err := lease.Err(); err != nil {
			t.Fatalf("the lease is not renewed: %v", err)
		}
		driver.Network().Refuse()
		cut := time.Now()
		<-lease.Context().Done()
		lost := time.Since(cut)
		next := mustAcquire(t, c, "x")
		if free := time.Since(cut); lost > time.Second || free < lost+10*time.Second || free > 11*time.Second {
			t.Errorf("lost %v after the cut, free after %v; want at most 1s, and 10s later", lost, free)
		}
		release(t, next)
		driver.Network().Pass()
	})
}

func TestLockDelayBelongsToTheTTL(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		for _, o := range []fencelock.Options{
			{LockDelay: -time.Second}, {LockDelay: 365 * 24 * time.Hour},
			{TTL: time.Second, LockDelay: 366 * 24 * time.Hour},
		} {
			_, err := fencelock.ForCorrectness(b.store.Driver(), &o)
			if !errors.Is(err, fencelock.ErrInvalidOption) && !errors.Is(err, fencelock.ErrInvalidTTL) {
				t.Errorf("LockDelay %v: %v", o.LockDelay, err)
			}
		}
	})
}

func release(t *testing.T, leases ...*fencelock.Lease) {
	t.Helper()
	for _, l := range leases {
		if err := l.Release(context.Background()); err != nil {
			t.Errorf("release of %q: %v", l.Name(), err)
		}
	}
}
