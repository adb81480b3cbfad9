package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

func TestLeaseIsRenewed(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		c, _ := b.client(fencelock.Options{TTL: time.Second, Observer: &seen})
		lease := mustAcquire(t, c, "x")
		time.Sleep(time.Minute)
		if err := lease.Err(); err != nil {
			t.Fatal(err)
		}
		if left := time.Until(lease.Deadline()); left <= 0 || left > time.Second {
			t.Errorf("the deadline is %v away, want within the TTL", left)
		}
		if n := len(seen.of(fencelock.EventRenewed)); n < 60 || n > 600 {
			t.Errorf("renewed %d times in a minute of a 1s lease", n)
		}
	})
}

// The basic promise: the holder's context ends before another client holds the lock, whichever direction of the
// network fails.
func TestLossIsReportedBeforeTheRivalHolds(t *testing.T) {
	for what, cut := range map[string]func(n *memory.Network){
		"both directions held":    func(n *memory.Network) { n.Hold(memory.Both) },
		"requests dropped":        func(n *memory.Network) { n.Drop(memory.Requests) },
		"replies dropped":         func(n *memory.Network) { n.Drop(memory.Replies) },
		"connections are refused": func(n *memory.Network) { n.Refuse() },
		"slower than the TTL":     func(n *memory.Network) { n.Delay(memory.Replies, 3*time.Second) },
	} {
		t.Run(what, func(t *testing.T) {
			simulate(t, func(t *testing.T, b *bed) {
				var seen recorder
				a, d := b.client(fencelock.Options{TTL: 2 * time.Second, Observer: &seen})
				rival, _ := b.client(fencelock.Options{})
				lease := mustAcquire(t, a, "x")
				time.Sleep(5*time.Second + 300*time.Millisecond)
				cut(d.Network())
				var toldAt time.Time
				told := make(chan struct{})
				go func() {
					<-lease.Context().Done()
					toldAt = time.Now()
					close(told)
				}()
				mustAcquire(t, rival, "x")
				rivalAt := time.Now()
				<-told
				if !toldAt.Before(rivalAt) {
					t.Errorf("the holder was notified %v after the rival held the lock", toldAt.Sub(rivalAt))
				}
				cause := context.Cause(lease.Context())
				wantErr(t, cause, fencelock.ErrLost)
				lost := (*fencelock.LostError)(nil)
				if !errors.As(cause, &lost) || lost.Name != "x" || lost.Token != lease.Token() ||
					lost.Reason != fencelock.ReasonExpired {
					t.Errorf("cause is %#v, want name, token and reason", cause)
				}
				wantErr(t, lease.Release(t.Context()), fencelock.ErrLost)
				wantErr(t, lease.Extend(t.Context(), time.Second), fencelock.ErrLost)
				if len(seen.of(fencelock.EventSuspect)) == 0 || len(seen.of(fencelock.EventLost)) != 1 {
					t.Errorf("observed %+v, want suspect and one loss", seen.events)
				}
				d.Network().Pass()
			})
		})
	}
}

// A service with sessions would keep the entry of a lost lease indefinitely if nobody released it.
func TestLostLeaseIsReleasedAfterItsTTL(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		var given time.Time
		done := make(chan struct{})
		s.release = func(ctx context.Context, g backend.Grant) error {
			given = time.Now()
			close(done)
			return s.Driver.Release(ctx, g)
		}
		s.renew = func(_ context.Context, grants []backend.Grant) []backend.Renewal {
			return []backend.Renewal{{Err: backend.ErrUnavailable}}
		}
		began := time.Now()
		mustAcquire(t, b.over(s, fencelock.Options{TTL: 10 * time.Second, StopEarly: 4 * time.Second}), "x")
		<-done // no call of Release follows
		if after := given.Sub(began); after < 10*time.Second || after > 11*time.Second {
			t.Errorf("released after %v, want when the TTL of 10s is over", after)
		}
	})
}

func TestMarginEndsTheLeaseEarlier(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, d := b.client(fencelock.Options{TTL: 10 * time.Second, StopEarly: 4 * time.Second})
		lease := mustAcquire(t, c, "x")
		d.Network().Drop(memory.Both)
		began := time.Now()
		<-lease.Context().Done()
		if held := time.Since(began); held > 6*time.Second {
			t.Errorf("the lease ended after %v, want 4s before the TTL of 10s", held)
		}
		d.Network().Pass()
	})
}

func TestOneFailedRenewalIsNoLoss(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		calls := 0
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			if calls++; calls%3 != 0 {
				out := make([]backend.Renewal, len(grants))
				for i := range out {
					out[i].Err = fmt.Errorf("connection reset: %w", backend.ErrUnknown)
				}
				return out
			}
			return s.Driver.Renew(ctx, grants)
		}
		lease := mustAcquire(t, b.over(s, fencelock.Options{TTL: 3 * time.Second}), "x")
		time.Sleep(time.Minute)
		if err := lease.Err(); err != nil {
			t.Errorf("two of three renewals failed and the lease is lost: %v", err)
		}
	})
}

func TestDeletionBehindTheLibraryIsNoticed(t *testing.T) {
	for _, push := range []bool{true, false} {
		t.Run(fmt.Sprintf("push=%v", push), func(t *testing.T) {
			simulate(t, func(t *testing.T, b *bed) {
				s := &scripted{Driver: b.store.Driver()}
				if !push {
					s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
						r.Lost = nil
						return s.Driver.Acquire(ctx, r)
					}
				}
				lease := mustAcquire(t, b.over(s, fencelock.Options{TTL: 9 * time.Second}), "x")
				b.store.Evict("x")
				began := time.Now()
				<-lease.Context().Done()
				if took := time.Since(began); took > 3*time.Second {
					t.Errorf("noticed after %v, want within a renewal interval", took)
				}
				lost := (*fencelock.LostError)(nil)
				if !errors.As(context.Cause(lease.Context()), &lost) || lost.Reason != fencelock.ReasonEvicted {
					t.Errorf("cause is %v, want evicted", context.Cause(lease.Context()))
				}
			})
		})
	}
}

func TestNoRenewAndExtend(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		lease := mustAcquire(t, c, "x", fencelock.TTL(2*time.Second), fencelock.NoRenew())
		for range 5 {
			time.Sleep(1500 * time.Millisecond)
			if err := lease.Extend(t.Context(), 2*time.Second); err != nil {
				t.Fatal(err)
			}
		}
		if err := lease.Extend(t.Context(), time.Minute); err != nil {
			t.Fatal(err)
		}
		wantErr(t, lease.Extend(t.Context(), 0), fencelock.ErrInvalidTTL)
		time.Sleep(50 * time.Second)
		if err := lease.Err(); err != nil {
			t.Fatalf("extended by a minute, lost after 50s: %v", err)
		}
		time.Sleep(10 * time.Second)
		wantErr(t, lease.Err(), fencelock.ErrLost)
		if n := b.store.Names(); n != 0 {
			t.Error("the store still has the name")
		}
	})
}

// A renewal without an answer changes nothing, since renewals never shorten a hold: a later Extend counts in full.
func TestExtendAfterARenewalWithoutAnswer(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		unanswered := make(chan struct{})
		var once sync.Once
		s.renew = func(ctx context.Context, grants []backend.Grant) (out []backend.Renewal) {
			once.Do(func() {
				out = []backend.Renewal{{Err: backend.ErrUnknown}} // sent, and not answered
				close(unanswered)
			})
			if out == nil {
				out = s.Driver.Renew(ctx, grants)
			}
			return out
		}
		lease := mustAcquire(t, b.over(s, fencelock.Options{TTL: 3 * time.Second}), "x")
		<-unanswered
		if err := lease.Extend(t.Context(), time.Hour); err != nil {
			t.Fatal(err)
		}
		if left := time.Until(lease.Deadline()); left < 59*time.Minute {
			t.Errorf("extended by an hour, and %v are left", left)
		}
	})
}

// When Extend returns nil, Deadline and Err have the new length, although they wait for no lock: here the core takes a
// while between the service's answer and the new deadline.
func TestDeadlineHasMovedWhenExtendReturns(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		var answered atomic.Bool
		s.describe = func() {
			if answered.Load() {
				time.Sleep(time.Millisecond)
			}
		}
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			defer answered.Store(true)
			return s.Driver.Renew(ctx, grants)
		}
		lease := mustAcquire(t, b.over(s, fencelock.Options{TTL: 3 * time.Second}), "x")
		if err := lease.Extend(t.Context(), time.Hour); err != nil {
			t.Fatal(err)
		}
		if left := time.Until(lease.Deadline()); left < 59*time.Minute {
			t.Errorf("extended by an hour, and %v are left", left)
		}
		answered.Store(false)
		time.Sleep(time.Second) // what waits for a lock would stop the simulated time
	})
}

// An Extend to less needs no request: only the holder's deadline changes.
func TestExtendToLessIsLocal(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		lease := mustAcquire(t, b.over(s, fencelock.Options{TTL: time.Hour}), "x", fencelock.NoRenew())
		s.renew = func(_ context.Context, grants []backend.Grant) []backend.Renewal {
			return []backend.Renewal{{Err: backend.ErrUnknown}}
		}
		if err := lease.Extend(t.Context(), time.Second); err != nil {
			t.Fatal(err)
		}
		if left := time.Until(lease.Deadline()); left > time.Second {
			t.Errorf("believed for another %v, want less than a second", left)
		}
		time.Sleep(time.Second)
		wantErr(t, lease.Err(), fencelock.ErrLost)
	})
}

func TestHoldAtLeast(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{TTL: 5 * time.Second})
		lease := mustAcquire(t, c, "cron/minute", fencelock.HoldAtLeast(time.Minute))
		if err := lease.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(59 * time.Second)
		_, err := c.TryAcquire(t.Context(), "cron/minute")
		wantErr(t, err, fencelock.ErrHeld)
		time.Sleep(2 * time.Second)
		mustAcquire(t, c, "cron/minute")
	})
}

func TestReleaseWithAnEndedContext(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, d := b.client(fencelock.Options{TTL: time.Hour})
		rival, _ := b.client(fencelock.Options{})
		ended, cancel := context.WithCancel(t.Context())
		cancel()

		lease := mustAcquire(t, c, "x")
		if err := lease.Release(ended); err != nil {
			t.Errorf("a healthy service: %v", err)
		}
		lease = mustAcquire(t, c, "x")
		d.Network().Hold(memory.Both)
		began := time.Now()
		wantErr(t, lease.Release(ended), context.Canceled, fencelock.ErrUnknown)
		if took := time.Since(began); took > time.Second {
			t.Errorf("returned after %v", took)
		}
		time.Sleep(30 * time.Second)
		d.Network().Pass()
		began = time.Now()
		mustAcquire(t, rival, "x")
		if took := time.Since(began); took > 15*time.Second {
			t.Errorf("the lock was left behind for %v after the network healed", took)
		}
	})
}

func TestReleaseAfterTheServiceEndedTheHold(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver(), acquire: nil}
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			r.Lost = nil // no push
			return s.Driver.Acquire(ctx, r)
		}
		c := b.over(s, fencelock.Options{TTL: time.Hour})
		rival, _ := b.client(fencelock.Options{})
		lease := mustAcquire(t, c, "x")
		b.store.Evict("x")
		next := mustAcquire(t, rival, "x")
		wantErr(t, lease.Release(t.Context()), fencelock.ErrLost, fencelock.ErrNotHeld)
		if err := next.Extend(t.Context(), time.Minute); err != nil {
			t.Errorf("the stale release touched the next hold: %v", err)
		}
	})
}

// suspendable is a suspended machine: the lease clock advances, and Go's timers do not.
type suspendable struct {
	mu      sync.Mutex
	skipped time.Duration
}

func (s *suspendable) Now() backend.Instant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return backend.GoClock().Now().Add(s.skipped)
}

func (s *suspendable) suspend(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.skipped += d
}

func TestSuspendedMachineLosesItsLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := &suspendable{}
		d := memory.New(&memory.Options{Clock: clock})
		c, err := fencelock.ForCorrectness(d, &fencelock.Options{TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close(t.Context())
		lease := mustAcquire(t, c, "x")
		other := mustAcquire(t, c, "y")
		clock.suspend(time.Hour)
		wantErr(t, other.Err(), fencelock.ErrLost) // exact, without a timer
		began := time.Now()
		<-lease.Context().Done()
		if took := time.Since(began); took > time.Second {
			t.Errorf("noticed %v after the machine woke up", took)
		}
	})
}

func TestTenThousandLeasesShareRenewals(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		const n = 10_000
		s := &scripted{Driver: b.store.Driver()}
		var calls, renewed atomic.Int32
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			calls.Add(1)
			renewed.Add(int32(len(grants)))
			return s.Driver.Renew(ctx, grants)
		}
		c := b.over(s, fencelock.Options{TTL: 30 * time.Second})
		before := runtime.NumGoroutine()
		leases := make([]*fencelock.Lease, n)
		for i := range leases {
			leases[i] = mustAcquire(t, c, fmt.Sprint("lock-", i))
			if i%1000 == 0 {
				time.Sleep(300 * time.Millisecond) // the leases begin at several instants
			}
		}
		if more := runtime.NumGoroutine() - before; more > 2 {
			t.Errorf("%d leases cost %d goroutines", n, more)
		}
		time.Sleep(5 * time.Minute)
		for _, l := range leases {
			if err := l.Err(); err != nil {
				t.Fatal(err)
			}
		}
		if renewed.Load() < n*20 || calls.Load() > 60*n/1000 {
			t.Errorf("%d renewals in %d calls within 5 minutes; want at least %d, a thousand in a call",
				renewed.Load(), calls.Load(), n*20)
		}
	})
}

// Leases of very different lengths do not share a call: the shortest lease would bound the call for all.
func TestRenewalsAreBoundedByTheirDeadlines(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			deadline, ok := ctx.Deadline()
			if left := time.Until(deadline); !ok || left > grants[0].TTL {
				t.Errorf("a renewal of %v leases may take %v", grants[0].TTL, left)
			}
			for _, g := range grants {
				if g.TTL != grants[0].TTL {
					t.Errorf("leases of %v and %v are renewed in one call", g.TTL, grants[0].TTL)
				}
			}
			return s.Driver.Renew(ctx, grants)
		}
		c := b.over(s, fencelock.Options{})
		long := mustAcquire(t, c, "long", fencelock.TTL(time.Hour))
		short := mustAcquire(t, c, "short", fencelock.TTL(500*time.Millisecond))
		time.Sleep(3 * time.Hour)
		if err := errors.Join(long.Err(), short.Err()); err != nil {
			t.Error(err)
		}
	})
}

func TestConcurrentReleaseExtendAndLoss(t *testing.T) {
	d := memory.New(nil)
	c, err := fencelock.ForCorrectness(d, &fencelock.Options{TTL: 150 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	for round := range 50 {
		name := fmt.Sprint("lock-", round)
		lease := mustAcquire(t, c, name)
		var wg sync.WaitGroup
		for _, act := range []func(){
			func() { _ = lease.Release(t.Context()) },
			func() { _ = lease.Release(t.Context()) },
			func() { _ = lease.Extend(t.Context(), time.Second) },
			func() { _ = lease.Err() },
			func() { _ = lease.Deadline() },
			func() { d.Store().Evict(name) },
		} {
			wg.Go(act)
		}
		wg.Wait()
		<-lease.Context().Done()
	}
	if n := d.Store().Names(); n != 0 {
		t.Errorf("%d names are still in use", n)
	}
}
