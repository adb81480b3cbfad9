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
	"github.com/fencelock/fencelock/internal/race"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testtier"
)

// cut returns a driver and a switch that makes every renewal fail.
func cut(b *bed) (*scripted, *atomic.Bool) {
	off := &atomic.Bool{}
	s := &scripted{Driver: b.store.Driver()}
	s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
		if !off.Load() {
			return s.Driver.Renew(ctx, grants)
		}
		out := make([]backend.Renewal, len(grants))
		for i := range out {
			out[i].Err = backend.ErrUnavailable
		}
		return out
	}
	return s, off
}

// A driver may report a loss on any goroutine, beside the grant too. The holder finds the operator's text.
func TestLossBesideTheGrant(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		var reports sync.WaitGroup
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			reports.Go(func() {
				time.Sleep(time.Millisecond)
				r.Lost(backend.Loss{Reason: backend.ReasonForceReleased, Text: "maintenance"})
			})
			return s.Driver.Acquire(ctx, r)
		}
		lease := mustAcquire(t, b.over(s, fencelock.Options{}), "x")
		<-lease.Context().Done()
		reports.Wait()
		if lost := (*fencelock.LostError)(nil); !errors.As(lease.Err(), &lost) || lost.Text != "maintenance" {
			t.Errorf("the lease ended with %v", lease.Err())
		}
	})
}

// However slow the observer, every holder is notified before the TTL ends in the service.
func TestObserverDoesNotDelayLosses(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s, off := cut(b)
		t.Cleanup(func() { time.Sleep(time.Second) }) // after Close, for the event in delivery
		c := b.over(s, fencelock.Options{TTL: 3 * time.Second, Observer: fencelock.ObserverFunc(
			func(context.Context, fencelock.Event) { time.Sleep(5 * time.Millisecond) },
		)})
		off.Store(true)
		began := time.Now()
		var late atomic.Int32
		var all sync.WaitGroup
		for i := range 100 {
			ctx := mustAcquire(t, c, fmt.Sprint("lock-", i)).Context()
			all.Go(func() {
				<-ctx.Done()
				if time.Since(began) >= 3*time.Second {
					late.Add(1)
				}
			})
		}
		all.Wait()
		if n := late.Load(); n > 0 {
			t.Errorf("%d of 100 holders were notified after their TTL had ended in the service", n)
		}
	})
}

// An observer that hangs on one loss does not affect the healthy leases of the same client.
func TestHangingObserverLosesNoLease(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		hang := make(chan struct{})
		c, _ := b.client(fencelock.Options{TTL: 3 * time.Second, Observer: fencelock.ObserverFunc(
			func(_ context.Context, e fencelock.Event) {
				if e.Type == fencelock.EventLost {
					<-hang
				}
			},
		)})
		mustAcquire(t, c, "doomed", fencelock.NoRenew())
		healthy := mustAcquire(t, c, "healthy")
		time.Sleep(time.Minute)
		if err := healthy.Err(); err != nil {
			t.Errorf("while the observer hangs: %v", err)
		}
		close(hang)
	})
}

// The panic of an observer is contained and counted.
func TestObserverPanicIsContained(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var shed atomic.Int32
		c, _ := b.client(fencelock.Options{TTL: time.Second, Observer: fencelock.ObserverFunc(
			func(_ context.Context, e fencelock.Event) {
				if e.Type == fencelock.EventShed {
					shed.Add(int32(e.Count))
					return
				}
				panic("observer")
			},
		)})
		ran := false
		err := c.Do(t.Context(), "x", func(context.Context, *fencelock.Lease) error {
			ran = true
			time.Sleep(time.Minute)
			return nil
		})
		if err != nil || !ran {
			t.Errorf("Do = %v, ran: %v", err, ran)
		}
		synctest.Wait()
		if shed.Load() < 60 || b.store.Names() != 0 {
			t.Errorf("%d events counted as shed, %d names in use", shed.Load(), b.store.Names())
		}
	})
}

// A full queue drops events, and reports their number.
func TestShedEventsAreCounted(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		hang := make(chan struct{})
		var got, shed int
		c, _ := b.client(fencelock.Options{Observer: fencelock.ObserverFunc(func(_ context.Context, e fencelock.Event) {
			<-hang
			got++
			shed += e.Count
		})})
		const calls = 1<<17 + 500
		held := mustAcquire(t, c, "x")
		for range calls {
			if _, err := c.TryAcquire(t.Context(), "x"); !errors.Is(err, fencelock.ErrHeld) {
				t.Fatal(err)
			}
		}
		close(hang)
		synctest.Wait()
		if shed == 0 || got-1+shed < calls {
			t.Errorf("%d events delivered, %d reported as shed, of more than %d", got, shed, calls)
		}
		release(t, held)
	})
}

// An Extend that gets no answer does not keep the lease from being renewed, and cannot lose it.
func TestExtendWithoutAnswerKeepsTheLease(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		lease := mustAcquire(t, b.over(s, fencelock.Options{TTL: 30 * time.Second}), "x")
		first := true
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			if first {
				first = false
				<-ctx.Done()
				return []backend.Renewal{{Err: backend.ErrUnknown}}
			}
			return s.Driver.Renew(ctx, grants)
		}
		if err := lease.Extend(t.Context(), time.Minute); err != nil {
			t.Errorf("Extend = %v, want it to be repeated until it is confirmed", err)
		}
		if err := lease.Err(); err != nil {
			t.Error(err)
		}
	})
}

// An unanswered renewal is forgotten once a later one is confirmed.
func TestUnansweredRenewalIsForgottenAfterTheNext(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s, off := cut(b)
		c := b.over(s, fencelock.Options{TTL: 30 * time.Second})
		lease := mustAcquire(t, c, "x", fencelock.NoRenew())
		off.Store(true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantErr(t, lease.Extend(ctx, 30*time.Second), context.DeadlineExceeded)
		off.Store(false)
		if err := lease.Extend(t.Context(), time.Hour); err != nil {
			t.Fatal(err)
		}
		if left := time.Until(lease.Deadline()); left < 59*time.Minute {
			t.Errorf("extended by an hour, %v left", left)
		}
	})
}

// An Extend with an ended context changes nothing, now and later.
func TestExtendWithEndedContextHasNoEffect(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		var renewals atomic.Int32
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			renewals.Add(1)
			return s.Driver.Renew(ctx, grants)
		}
		lease := mustAcquire(t, b.over(s, fencelock.Options{TTL: time.Minute}), "x")
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		wantErr(t, lease.Extend(ended, time.Second), context.Canceled)
		if left := time.Until(lease.Deadline()); left < 59*time.Second {
			t.Errorf("%v left of a minute", left)
		}
		time.Sleep(time.Minute)
		if n := renewals.Load(); n > 5 {
			t.Errorf("%d renewals in a minute of a one minute lease", n)
		}
	})
}

// An Extend to less lasts only for the shorter time, even if it is answered with an older proof.
func TestExtendToLessIsNotOutlivedByAnOlderProof(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		first := backend.GoClock().Now()
		s.renew = func(_ context.Context, grants []backend.Grant) []backend.Renewal {
			return []backend.Renewal{{SentAt: first, TTL: grants[0].TTL}}
		}
		lease := mustAcquire(t, b.over(s, fencelock.Options{TTL: 10 * time.Second}), "x")
		if err := lease.Extend(t.Context(), time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		wantErr(t, lease.Err(), fencelock.ErrLost)
	})
}

// A driver that returns no result fails the attempt and not the program, and the lease continues.
func TestAnEmptyRenewalIsAFault(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		empty := true
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			if empty {
				empty = false
				return nil
			}
			return s.Driver.Renew(ctx, grants)
		}
		lease := mustAcquire(t, b.over(s, fencelock.Options{TTL: 10 * time.Second}), "x")
		if err := lease.Extend(t.Context(), time.Minute); err != nil {
			t.Error(err)
		}
	})
}

// Clients that began at the same instant do not keep renewing together.
func TestAFleetSpreadsItsRenewals(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		at := map[time.Time]int{}
		var mu sync.Mutex
		for i := range 100 {
			s := &scripted{Driver: b.store.Driver()}
			s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
				mu.Lock()
				at[time.Now().Truncate(100*time.Millisecond)]++
				mu.Unlock()
				return s.Driver.Renew(ctx, grants)
			}
			mustAcquire(t, b.over(s, fencelock.Options{TTL: 30 * time.Second}), fmt.Sprint("lock-", i))
		}
		time.Sleep(10 * time.Minute)
		mu.Lock()
		clear(at)
		mu.Unlock()
		time.Sleep(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		for _, n := range at {
			if n > 50 {
				t.Errorf("%d of 100 clients renew within 100ms", n)
			}
		}
	})
}

// The service's answer for one hold reaches its holder within seconds of the renewal, although the answer for another
// hold is missing and the TTL is an hour.
func TestANotYoursDoesNotWaitForANeighbour(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			r.Lost = nil // no push
			return s.Driver.Acquire(ctx, r)
		}
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := s.Driver.Renew(ctx, grants)
			for i, g := range grants {
				if g.Name == "hangs" {
					<-ctx.Done() // and the whole call with it
					out[i] = backend.Renewal{Err: backend.ErrUnknown}
				}
			}
			return out
		}
		c := b.over(s, fencelock.Options{TTL: time.Hour})
		began := time.Now()
		lease := mustAcquire(t, c, "gone")
		mustAcquire(t, c, "hangs", fencelock.TTL(time.Hour))
		b.store.Evict("gone")
		<-lease.Context().Done()
		if took := time.Since(began); took > 20*time.Minute+6*time.Second {
			t.Errorf("notified after %v, want 5s after the renewal at the latest", took)
		}
	})
}

// The stated bound: if n leases end at one instant while the service refuses every renewal, all holders are notified
// before the service can grant the first of their names to another client.
func TestLosersAreNotifiedWithinTheMargin(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	for _, n := range []int{1, 1_000, 10_000, 100_000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			if n > 10_000 {
				testtier.Only(t)
			} else {
				t.Parallel()
			}
			if race.Enabled {
				n = max(1, n/10) // the race detector makes each ten times slower
			}
			var worst time.Duration
			excused, err := stallmeter.Fairly(50*time.Millisecond, func() error {
				if worst = lossesAtOnce(t, n, 8*time.Second); worst >= 0 {
					return fmt.Errorf("of %d holders the last was notified %v after its TTL had ended in the service",
						n, worst)
				}
				return nil
			})
			t.Logf("%d losses at once: the last was notified %v before its TTL ended in the service", n, -worst)
			stallmeter.Report(t, "losses at once", excused, err)
		})
	}
}

// lossesAtOnce makes n leases that end at one instant, and returns the time from that instant to the last notification.
// If less than a quarter of lead remains before all of them are acquired, it retries with twice that time.
func lossesAtOnce(t *testing.T, n int, lead time.Duration) time.Duration {
	d := memory.New(nil)
	s := &scripted{Driver: d, renew: func(_ context.Context, grants []backend.Grant) []backend.Renewal {
		out := make([]backend.Renewal, len(grants))
		for i := range out {
			out[i].Err = backend.ErrUnavailable
		}
		return out
	}}
	c, err := fencelock.ForCorrectness(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	end := time.Now().Add(lead)
	var told atomic.Int64
	var all sync.WaitGroup
	all.Add(n)
	for i := range n {
		ttl := time.Until(end)
		if ttl < lead/4 {
			closed(t, c)
			return lossesAtOnce(t, n, 2*lead)
		}
		lease := mustAcquire(t, c, fmt.Sprint("lock-", i), fencelock.TTL(ttl))
		context.AfterFunc(lease.Context(), func() {
			defer all.Done()
			for at := int64(time.Since(end)); ; {
				last := told.Load()
				if last != 0 && last >= at || told.CompareAndSwap(last, at) {
					return
				}
			}
		})
	}
	all.Wait()
	closed(t, c)
	return time.Duration(told.Load())
}

// closed closes a client with many leases.
func closed(t *testing.T, c interface{ Close(context.Context) error }) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		t.Error(err)
	}
}

// Whatever the number of leases, a call of the driver renews a thousand at most.
func TestRenewalsComeInChunks(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		var most, renewed atomic.Int64
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			renewed.Add(int64(len(grants)))
			most.Store(max(most.Load(), int64(len(grants))))
			return s.Driver.Renew(ctx, grants)
		}
		c := b.over(s, fencelock.Options{TTL: 30 * time.Second})
		const n = 5_000
		for i := range n {
			mustAcquire(t, c, fmt.Sprint("lock-", i))
		}
		time.Sleep(time.Minute)
		if most.Load() > 1000 || renewed.Load() < n {
			t.Errorf("%d renewals, up to %d in a call", renewed.Load(), most.Load())
		}
	})
}

// While a hundred thousand leases are renewed, Err of one of them takes at most a millisecond, except for the few
// calls that the scheduler interrupts.
func TestErrIsNotHeldUpByARenewalRound(t *testing.T) {
	testtier.Only(t)
	const n = 100_000
	d := &counted{}
	c := opened(t, d, fencelock.Options{TTL: 3 * time.Second})
	defer c.Close(t.Context())
	var lease *fencelock.Lease
	for i := range n {
		lease = mustAcquire(t, c, fmt.Sprint("lock-", i))
	}
	excused, err := stallmeter.Fairly(time.Millisecond, func() error {
		before := d.renewed.Load()
		for d.renewed.Load() == before {
			time.Sleep(time.Millisecond)
		}
		began, calls, late := time.Now(), 0, 0
		for d.renewed.Load() < before+n/2 {
			at := time.Now()
			if err := lease.Err(); err != nil {
				return stallmeter.Conclusive(err)
			}
			calls++
			if time.Since(at) > time.Millisecond {
				late++
			}
		}
		t.Logf("%d renewals in %v; %d of %d calls of Err took more than 1ms", n/2, time.Since(began), late, calls)
		if late > calls/1000 {
			return fmt.Errorf("%d of %d calls of Err took more than 1ms beside a renewal round", late, calls)
		}
		return nil
	})
	stallmeter.Report(t, "Err beside a round", excused, err)
}

// counted counts renewed grants.
type counted struct {
	instant
	renewed atomic.Int64
}

func (d *counted) IssuesFencingTokens() backend.Driver { return d }

func (d *counted) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	defer d.renewed.Add(int64(len(grants)))
	return d.instant.Renew(ctx, grants)
}

// bounded is a driver of a service that extends no hold beyond an instant.
func (b *bed) bounded(last backend.Instant) (d *scripted, finals *atomic.Int32) {
	d, finals = &scripted{Driver: b.store.Driver()}, new(atomic.Int32)
	d.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
		out := d.Driver.Renew(ctx, grants)
		for i := range out {
			if left := last.Sub(out[i].SentAt); out[i].Err == nil && left < out[i].TTL {
				out[i].TTL, out[i].Last = left, true
				finals.Add(1)
			}
		}
		return out
	}
	return d, finals
}

// A lease with a last deadline in its renewal is not renewed again and is lost, with that reason, before the deadline.
// The name is then released.
func TestMaximumHoldEndsALeaseBeforeTheRivalHolds(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		clock := backend.GoClock()
		last := clock.Now().Add(20 * time.Second)
		d, finals := b.bounded(last)
		a := b.over(d, fencelock.Options{TTL: 6 * time.Second})
		rival, _ := b.client(fencelock.Options{})
		lease := mustAcquire(t, a, "x")
		var toldAt backend.Instant
		told := make(chan struct{})
		go func() {
			<-lease.Context().Done()
			toldAt = clock.Now()
			close(told)
		}()
		mustAcquire(t, rival, "x")
		rivalAt := clock.Now()
		<-told
		if toldAt >= last || toldAt < last.Add(-time.Second) || rivalAt < last || rivalAt > last.Add(time.Second) {
			t.Errorf("notified %v and the rival granted %v after the last deadline", toldAt.Sub(last), rivalAt.Sub(last))
		}
		lost := (*fencelock.LostError)(nil)
		if !errors.As(context.Cause(lease.Context()), &lost) || lost.Reason != fencelock.ReasonMaxHold {
			t.Errorf("the cause is %v", context.Cause(lease.Context()))
		}
		if n := finals.Load(); n != 1 {
			t.Errorf("renewed %d times after the last deadline was named, want 0", n-1)
		}
	})
}

// An Extend neither moves the last deadline nor fails; a shorter length is renewed until the last deadline.
func TestExtendKeepsToTheMaximumHold(t *testing.T) {
	for what, length := range map[string]time.Duration{"longer": time.Minute, "shorter": time.Second} {
		t.Run(what, func(t *testing.T) {
			simulate(t, func(t *testing.T, b *bed) {
				clock := backend.GoClock()
				last := clock.Now().Add(20 * time.Second)
				d, finals := b.bounded(last)
				lease := mustAcquire(t, b.over(d, fencelock.Options{TTL: 6 * time.Second}), "x")
				for finals.Load() == 0 {
					time.Sleep(100 * time.Millisecond)
				}
				if err := lease.Extend(t.Context(), length); err != nil {
					t.Fatal(err)
				}
				<-lease.Context().Done()
				lost := (*fencelock.LostError)(nil)
				if now := clock.Now(); now >= last || now < last.Add(-time.Second) ||
					!errors.As(context.Cause(lease.Context()), &lost) || lost.Reason != fencelock.ReasonMaxHold {
					t.Errorf("%v after the last deadline: %v", now.Sub(last), context.Cause(lease.Context()))
				}
			})
		})
	}
}
