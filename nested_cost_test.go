package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/internal/race"
	"github.com/fencelock/fencelock/internal/testtier"
)

// heapInUse returns the number of reachable bytes.
func heapInUse() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// grown returns the growth of the reachable bytes by f.
func grown(f func()) int64 {
	before := heapInUse()
	f()
	return int64(heapInUse()) - int64(before)
}

// A held lease keeps no reference to earlier leases beside it.
func TestAHeldLeasePinsNoOther(t *testing.T) {
	d := memory.New(nil)
	c := opened(t, d, fencelock.Options{TTL: time.Hour})
	defer c.Close(t.Context())
	const n = 20_000
	var held *fencelock.Lease
	more := grown(func() {
		before := mustAcquire(t, c, "before")
		held = mustAcquire(t, c, "held")
		for i := range n { // each overlaps with the next
			next := mustAcquire(t, c, fmt.Sprint("lock-", i%2))
			release(t, before)
			before = next
		}
		release(t, before)
	})
	if each := more / n; each > 100 {
		t.Errorf("%d bytes are kept for each of %d leases that are gone", each, n)
	}
	release(t, held)
}

// The memory of leases: bounded while they are held, and zero after their end, except for the tokens of the latest
// 65,536 names. The test logs the figures.
func TestLeaseMemory(t *testing.T) {
	cycles := 100_000
	if testtier.Wanted() {
		cycles = 1_000_000
	}
	n := 100_000
	if race.Enabled {
		cycles, n = cycles/10, n/10
	}
	c := opened(t, &instant{}, fencelock.Options{TTL: time.Hour})
	defer c.Close(t.Context())
	release(t, mustAcquire(t, c, "x"))
	gone := grown(func() {
		for range cycles {
			release(t, mustAcquire(t, c, "x"))
		}
	})
	leases := make([]*fencelock.Lease, n)
	held := grown(func() {
		for i := range leases {
			leases[i] = mustAcquire(t, c, strconv.Itoa(i))
		}
	})
	released := held + grown(func() {
		release(t, leases...)
		clear(leases)
	})
	names := int64(min(n, 1<<16)) // with remembered tokens
	t.Logf("%d acquires and releases keep %d bytes; %d leases take %d bytes each while they are held, and leave %d for each of %d names",
		cycles, gone, n, held/int64(n), released/names, names)
	if gone > int64(cycles) || held/int64(n) > 900 || released/names > 150 {
		t.Error("that is too much")
	}
}

// The context of several leases is made once.
func TestTheContextOfLeasesIsMadeOnce(t *testing.T) {
	c := opened(t, memory.New(nil), fencelock.Options{TTL: time.Hour})
	defer c.Close(t.Context())
	all, err := c.AcquireAll(t.Context(), []string{"a", "b", "c"})
	if err != nil {
		t.Fatal(err)
	}
	first := all.Context()
	for range 1000 {
		if all.Context() != first {
			t.Fatal("asked again, it is another one")
		}
	}
	if err := all.Release(t.Context()); err != nil {
		t.Error(err)
	}
	<-first.Done()
}

// Lock coupling is linear: no step keeps or visits the earlier steps.
func TestLockCouplingIsLinear(t *testing.T) {
	c := opened(t, memory.New(nil), fencelock.Options{TTL: time.Hour})
	defer c.Close(t.Context())
	const n = 10_000
	var last *fencelock.Lease
	more := grown(func() {
		ctx := t.Context()
		for i := range n {
			next, err := c.Acquire(ctx, fmt.Sprint("step-", i))
			if err != nil {
				t.Fatal(err)
			}
			if last != nil {
				release(t, last)
			}
			last, ctx = next, next.Context()
		}
	})
	if each := more / n; each > 200 {
		t.Errorf("%d bytes are kept for each of %d steps with one lease held", each, n)
	}
	release(t, last)
}

// Two goroutines under one hold that want one name, one after the other, are no deadlock.
func TestFanOutUnderOneHold(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		err := c.Do(t.Context(), "job", func(ctx context.Context, _ *fencelock.Lease) error {
			errs := make(chan error, 8)
			for range cap(errs) {
				go func() {
					errs <- c.Do(ctx, "account", func(context.Context, *fencelock.Lease) error {
						time.Sleep(time.Second)
						return nil
					})
				}()
			}
			var all error
			for range cap(errs) {
				all = errors.Join(all, <-errs)
			}
			return all
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// A released lease is no ancestor.
func TestAReleasedLeaseIsNoAncestor(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		c := b.over(s, fencelock.Options{})
		lease := mustAcquire(t, c, "x")
		worker := context.WithoutCancel(lease.Context())
		under := -1
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			under = len(r.Under)
			return s.Driver.Acquire(ctx, r)
		}
		inner, err := c.Acquire(worker, "y")
		if err != nil || under != 1 {
			t.Errorf("under a live lease: %d ancestors, %v", under, err)
		}
		release(t, inner, lease)
		again, err := c.Acquire(worker, "x")
		if err != nil || under != 0 {
			t.Errorf("under a released lease: %d ancestors, %v", under, err)
		}
		release(t, again)
	})
}

// Any number of shared holds of one name is allowed by the order.
func TestOrderAllowsSharedHoldsOfOneName(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{Order: strings.Compare})
		ctx := t.Context()
		for i := range 3 {
			lease, err := c.Acquire(ctx, "x", fencelock.Shared())
			if err != nil {
				t.Fatalf("shared hold %d: %v", i+1, err)
			}
			defer lease.Release(t.Context())
			ctx = lease.Context()
		}
	})
}

// The loss of another lock is a result like any other, and never repeats the function without a pause.
func TestLeadJudgesByItsOwnLease(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		runs := 0
		other := &fencelock.LostError{Name: "another"}
		err := c.Lead(t.Context(), "x", func(context.Context, *fencelock.Lease) error { runs++; return other })
		if runs != 1 || !errors.Is(err, other) {
			t.Errorf("%d runs, %v; want the function's error after one", runs, err)
		}
		runs = 0
		began := time.Now()
		_ = c.Lead(t.Context(), "x", func(ctx context.Context, _ *fencelock.Lease) error {
			if runs++; runs == 20 {
				return nil
			}
			b.store.Evict("x")
			<-ctx.Done()
			return nil
		})
		if took := time.Since(began); took < time.Second {
			t.Errorf("19 losses, and 20 runs within %v", took)
		}
	})
}

// Lead retries after an error that the driver did not classify, and after a candidacy that WaitAtMost ended.
func TestLeadRetriesAfterTemporaryErrors(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		c := b.over(s, fencelock.Options{})
		rival, _ := b.client(fencelock.Options{})
		tries := 0
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if tries++; tries < 3 {
				return backend.Grant{}, errors.New("LOADING the dataset in memory")
			}
			return s.Driver.Acquire(ctx, r)
		}
		held := mustAcquire(t, rival, "x")
		go func() {
			time.Sleep(time.Minute)
			release(t, held)
		}()
		ran := false
		err := c.Lead(t.Context(), "x", func(context.Context, *fencelock.Lease) error { ran = true; return nil },
			fencelock.WaitAtMost(5*time.Second))
		if err != nil || !ran {
			t.Errorf("Lead = %v, ran: %v", err, ran)
		}
	})
}

// Lead refuses Reentrant: a leader on a lease of another holder could not resign.
func TestLeadRefusesReentrant(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		outer := mustAcquire(t, c, "x")
		err := c.Lead(outer.Context(), "x",
			func(context.Context, *fencelock.Lease) error { return fencelock.ErrResign },
			fencelock.Reentrant())
		wantErr(t, err, fencelock.ErrInvalidOption)
		release(t, outer)
	})
}

// The names that a failed AcquireAll has taken are released without their minimum, and without events of leases that
// never began.
func TestFailedAcquireAllKeepsNoName(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		c := b.over(lone{b.store.Driver()}, fencelock.Options{Observer: &seen})
		rival, _ := b.client(fencelock.Options{})
		held := mustAcquire(t, rival, "b")
		for range 10 {
			_, err := c.TryAcquireAll(t.Context(), []string{"a", "b"}, fencelock.HoldAtLeast(10*time.Minute))
			wantErr(t, err, fencelock.ErrHeld)
		}
		began := time.Now()
		release(t, mustAcquire(t, rival, "a"), held)
		if took := time.Since(began); took > time.Second {
			t.Errorf("the name that was released was closed for %v", took)
		}
		synctest.Wait()
		if n := len(seen.of(fencelock.EventReleased)) + len(seen.of(fencelock.EventLost)); n != 0 {
			t.Errorf("%d releases and losses without an acquire were observed", n)
		}
	})
}

// The loss of an acquired name ends the wait for the others.
func TestAcquireAllNoticesALossWhileItWaits(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		c := b.over(loneScripted{s}, fencelock.Options{TTL: 3 * time.Second})
		rival, _ := b.client(fencelock.Options{})
		held := mustAcquire(t, rival, "b")
		var tries atomic.Int32
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if r.Name == "a" {
				tries.Add(1)
			}
			return s.Driver.Acquire(ctx, r)
		}
		go func() {
			time.Sleep(10 * time.Second)
			b.store.Evict("a")
			time.Sleep(10 * time.Second)
			if n := tries.Load(); n != 2 {
				t.Errorf("the lost name was asked for %d times while the other was waited for, want twice", n)
			}
			release(t, held)
		}()
		all, err := c.AcquireAll(t.Context(), []string{"a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		if err := all.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// loneScripted is scripted without AcquireAll.
type loneScripted struct{ *scripted }

func (d loneScripted) Describe() backend.Description { return lone{d.Driver}.Describe() }

func (d loneScripted) IssuesFencingTokens() backend.Driver { return d }

// The end of a wait does not hide the driver's error.
func TestEndedWaitKeepsTheDriversError(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		s.acquire = func(ctx context.Context, _ backend.Request) (backend.Grant, error) {
			<-ctx.Done()
			return backend.Grant{}, backend.ErrMisconfigured
		}
		c := b.over(s, fencelock.Options{})
		_, err := c.Acquire(t.Context(), "x", fencelock.WaitAtMost(time.Second))
		wantErr(t, err, fencelock.ErrMisconfigured)
		if errors.Is(err, fencelock.ErrHeld) {
			t.Errorf("%v: nobody holds it", err)
		}
	})
}

// Names of two namespaces are never equal, and a namespace leaves room for names.
func TestNamespacesNeverMeet(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		for _, bad := range []string{"a/b", "a:b", strings.Repeat("n", 512)} {
			_, err := fencelock.ForEfficiency(b.store.Driver(), &fencelock.Options{Namespace: bad})
			wantErr(t, err, fencelock.ErrInvalidOption)
		}
		in, _ := b.client(fencelock.Options{Namespace: "n"})
		out, _ := b.client(fencelock.Options{})
		plain := mustAcquire(t, out, "n")
		release(t, mustAcquire(t, in, "a/b", fencelock.Hierarchical()), plain)
	})
}
