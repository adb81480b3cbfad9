package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/fencing"
)

const requestID = "0f8fad5b-d9cb-469f-a165-70867728950e"

func TestARepeatThroughTheSameClientIsTheSameHold(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{TTL: 10 * time.Second})
		first := mustAcquire(t, c, "x", fencelock.RequestID(requestID))
		ctx := first.Context()
		second, err := c.TryAcquire(t.Context(), "x", fencelock.RequestID(requestID))
		if err != nil {
			t.Fatal(err)
		}
		if second.Token() != first.Token() || second.HoldID() != first.HoldID() {
			t.Errorf("the repeat has token %v and id %s, want %v and %s",
				second.Token(), second.HoldID(), first.Token(), first.HoldID())
		}
		lost := (*fencelock.LostError)(nil)
		if !errors.As(first.Err(), &lost) || lost.Reason != fencelock.ReasonReplaced ||
			!errors.Is(context.Cause(ctx), fencelock.ErrLost) {
			t.Errorf("the earlier lease: %v, its context: %v", first.Err(), context.Cause(ctx))
		}
		wantErr(t, first.Release(t.Context()), fencelock.ErrLost) // affects no hold
		time.Sleep(time.Minute)
		if err := second.Err(); err != nil {
			t.Errorf("the later lease after the earlier one's release: %v", err)
		}
		_, err = c.TryAcquire(t.Context(), "x", fencelock.RequestID(requestID), fencelock.Shared())
		wantErr(t, err, fencelock.ErrLimitMismatch)
		release(t, second)
		third := mustAcquire(t, c, "x", fencelock.RequestID(requestID))
		if third.Token() <= second.Token() {
			t.Errorf("a new hold has token %v after %v", third.Token(), second.Token())
		}
		release(t, third)
	})
}

func TestARepeatThroughAnotherClientIsAContender(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		other, _ := b.client(fencelock.Options{})
		first := mustAcquire(t, c, "x", fencelock.RequestID(requestID))
		_, err := other.TryAcquire(t.Context(), "x", fencelock.RequestID(requestID))
		held := (*fencelock.HeldError)(nil)
		if !errors.As(err, &held) || !held.SameRequest {
			t.Errorf("another client's repeat: %v, want ErrHeld with SameRequest", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = other.Acquire(ctx, "x", fencelock.RequestID(requestID))
		if !errors.As(err, &held) || !held.SameRequest || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("waiting for it: %v", err)
		}
		_, err = other.TryAcquire(t.Context(), "x")
		if !errors.As(err, &held) || held.SameRequest {
			t.Errorf("a stranger: %v", err)
		}
		if state, err := other.Look(t.Context(), "x"); err != nil || state.Holders[0].HoldID != first.HoldID() ||
			strings.Contains(fmt.Sprint(state), requestID) {
			t.Errorf("what others see: %+v, %v", state, err)
		}
		release(t, first)
		release(t, mustAcquire(t, other, "x", fencelock.RequestID(requestID)))
	})
}

func TestConcurrentCallsWithOneRequestID(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		other, _ := b.client(fencelock.Options{})
		held := mustAcquire(t, other, "x")
		got := make(chan *fencelock.Lease, 2)
		for range 2 {
			go func() { got <- mustAcquire(t, c, "x", fencelock.RequestID(requestID)) }()
		}
		synctest.Wait()
		_, err := c.TryAcquire(t.Context(), "x", fencelock.RequestID(requestID))
		same := (*fencelock.HeldError)(nil)
		if !errors.As(err, &same) || !same.SameRequest {
			t.Errorf("beside a call in flight: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = c.Acquire(ctx, "x", fencelock.RequestID(requestID))
		wantErr(t, err, context.DeadlineExceeded)
		release(t, held)
		one, two := <-got, <-got
		if one.Token() != two.Token() || (one.Err() == nil) == (two.Err() == nil) {
			t.Errorf("tokens %v and %v, errors %v and %v; want one hold, and one lease of it",
				one.Token(), two.Token(), one.Err(), two.Err())
		}
	})
}

// A late cleanup of the first attempt does not release the second attempt's hold.
func TestALateReleaseMeetsOnlyItsOwnAttempt(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		c := b.over(s, fencelock.Options{})
		var delayed []backend.Grant
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			_, _ = s.Driver.Acquire(ctx, r)
			return backend.Grant{}, backend.ErrUnknown // the answer is lost
		}
		s.release = func(ctx context.Context, g backend.Grant) error {
			delayed = append(delayed, g)
			if len(delayed) > 1 {
				return s.Driver.Release(ctx, g)
			}
			return backend.ErrUnknown // sent, and delayed
		}
		_, err := c.Acquire(t.Context(), "x", fencelock.RequestID(requestID))
		wantErr(t, err, fencelock.ErrUnknown)
		s.acquire = nil
		second := mustAcquire(t, c, "x", fencelock.RequestID(requestID))
		s.release = nil
		_ = s.Driver.Release(t.Context(), delayed[0]) // here it arrives
		if _, err := c.TryAcquire(t.Context(), "x"); !errors.Is(err, fencelock.ErrHeld) {
			t.Errorf("after the late release of the first attempt: %v, want the second's hold to stand", err)
		}
		release(t, second)
	})
}

// A service that grants a token that is not greater than one it has granted before has lost its history.
func TestAServiceThatForgotIsNoticed(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		c := b.over(s, fencelock.Options{})
		other := mustAcquire(t, c, "other")
		for range 5 {
			release(t, mustAcquire(t, c, "x"))
		}
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := s.Driver.Acquire(ctx, r)
			g.Token = 2
			return g, err
		}
		_, err := c.Acquire(t.Context(), "x")
		sign := (*fencelock.HistoryError)(nil)
		if !errors.As(err, &sign) || sign.Now != "2" {
			t.Errorf("a smaller token: %v, want ErrHistoryLost with both", err)
		}
		lost := (*fencelock.LostError)(nil)
		if !errors.As(other.Err(), &lost) || lost.Reason != fencelock.ReasonHistoryLost {
			t.Errorf("a hold of before: %v", other.Err())
		}
		s.acquire = nil
		_, err = c.Acquire(t.Context(), "elsewhere")
		wantErr(t, err, fencelock.ErrHistoryLost)
		if b.store.Names() > 1 {
			t.Error("the refused grant was not released")
		}
	})
}

// A grant that arrives after a later one is no sign of that: it has ended, and the call retries.
func TestOvertakenGrantIsRetried(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		c := b.over(s, fencelock.Options{TTL: time.Minute})
		slow := true
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := s.Driver.Acquire(ctx, r)
			if slow {
				slow = false
				b.store.Evict("x")
				time.Sleep(5 * time.Second) // meanwhile another call of this client acquires and releases it
			}
			g.SentAt = backend.GoClock().Now()
			return g, err
		}
		got := make(chan *fencelock.Lease)
		go func() { got <- mustAcquire(t, c, "x") }()
		time.Sleep(time.Second)
		between := mustAcquire(t, c, "x")
		release(t, between)
		if l := <-got; l.Token() <= between.Token() || l.Err() != nil {
			t.Errorf("token %v after %v: %v", l.Token(), between.Token(), l.Err())
		}
	})
}

// After three grants that have expired on arrival, the acquire fails, with an error that explains the reason.
func TestExpiredGrantsFailTheAcquire(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		var calls atomic.Int32
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			calls.Add(1)
			g, err := s.Driver.Acquire(ctx, r)
			g.SentAt = 0
			return g, err
		}
		c := b.over(s, fencelock.Options{})
		_, err := c.Acquire(t.Context(), "x")
		if err == nil || calls.Load() != 3 || b.store.Names() != 0 {
			t.Fatalf("%v after %d calls, %d names in use", err, calls.Load(), b.store.Names())
		}
		for _, part := range []string{"SentAt 0", "TTL 30s", "clock reads"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%v does not contain %s", err, part)
			}
		}
	})
}

// A grant that comes too late, even after its TTL, is released without the requested minimum.
func TestLateGrantDoesNotCloseTheName(t *testing.T) {
	for _, late := range []time.Duration{990 * time.Millisecond, time.Minute} {
		simulate(t, func(t *testing.T, b *bed) {
			s := &scripted{Driver: b.store.Driver()}
			c := b.over(s, fencelock.Options{TTL: time.Second})
			s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				g, err := s.Driver.Acquire(ctx, r)
				time.Sleep(late)
				return g, err
			}
			_, err := c.TryAcquire(t.Context(), "cron", fencelock.HoldAtLeast(10*time.Minute))
			wantErr(t, err, fencelock.ErrLost)
			s.acquire = nil
			began := time.Now()
			release(t, mustAcquire(t, c, "cron"))
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("a grant that came after %v: nobody ran, and the name was closed for %v", late, took)
			}
		})
	}
}

// A driver may detect the exclusion of its service only with the first grant: an unfit one is refused, and the grant
// released.
func TestUnfitExclusionIsRefusedAtTheGrant(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		for _, accept := range []bool{false, true} {
			s := &late{scripted: scripted{Driver: b.store.Driver()}}
			c := b.over(s, fencelock.Options{AcceptAsyncReplica: accept})
			_, one := c.Acquire(t.Context(), "x")
			_, all := c.AcquireAll(t.Context(), []string{"y", "z"})
			for _, err := range []error{one, all} {
				if lacks := (*fencelock.CapabilityError)(nil); errors.As(err, &lacks) == accept ||
					!accept && !errors.Is(err, fencelock.ErrTier) {
					t.Errorf("AcceptAsyncReplica %v: %v", accept, err)
				}
			}
			if !accept && b.store.Names() != 0 {
				t.Error("the refused grant was not released")
			}
		}
	})
}

// late reports its exclusion only after the first grant.
type late struct {
	scripted
	asked atomic.Bool
}

func (d *late) IssuesFencingTokens() backend.Driver { return d }

func (d *late) Describe() backend.Description {
	own := d.Driver.Describe()
	if d.asked.Load() {
		own.Exclusion = backend.ExclusionAsyncReplica
	}
	return own
}

func (d *late) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	d.asked.Store(true)
	return d.scripted.Acquire(ctx, r)
}

func TestSealShowsTheClaimFirst(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		var shown fencing.Claim
		show := func(_ context.Context, claim fencing.Claim) error { shown = claim; return nil }
		err := c.Do(t.Context(), "x", func(_ context.Context, l *fencelock.Lease) error {
			if shown != l.Claim("x") {
				t.Errorf("shown %+v before the run, want %+v", shown, l.Claim("x"))
			}
			return nil
		}, fencelock.Seal(show))
		if err != nil {
			t.Error(err)
		}
		refused := errors.New("refused")
		refuse := fencelock.Seal(func(context.Context, fencing.Claim) error { return refused })
		_, err = c.Acquire(t.Context(), "x", refuse, fencelock.HoldAtLeast(time.Hour))
		wantErr(t, err, refused)
		_, err = c.AcquireAll(t.Context(), []string{"y", "z"}, refuse)
		wantErr(t, err, refused)
		if n := b.store.Names(); n != 0 {
			t.Errorf("%d names are in use after a refusal", n)
		}
		_, err = c.Acquire(t.Context(), "x", fencelock.Seal(nil))
		wantErr(t, err, fencelock.ErrInvalidOption)
	})
}

// A lease that could not be sealed is released in the foreground, for as long as the caller's context allows.
func TestRefusedSealReleasesTheLock(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, d := b.client(fencelock.Options{})
		refused := errors.New("refused")
		_, err := c.Acquire(t.Context(), "x", fencelock.Seal(func(context.Context, fencing.Claim) error {
			d.Network().Delay(memory.Requests, time.Second) // and not longer than the time after which a request is retried
			return refused
		}))
		wantErr(t, err, refused)
		if n := b.store.Names(); n != 0 {
			t.Errorf("%d names are in use after a refusal", n)
		}
	})
}

// No method panics on a zero value or on a typed nil.
func TestZeroValuesAnswerErrors(t *testing.T) {
	ctx := t.Context()
	_, err := fencelock.ForCorrectness((*memory.Driver)(nil), nil)
	wantErr(t, err, fencelock.ErrInvalidOption)
	run := func(context.Context, *fencelock.Lease) error { return nil }
	for _, c := range []*fencelock.Client{nil, {}} {
		_, err := c.Acquire(ctx, "x")
		_, all := c.AcquireAll(ctx, []string{"x", "y"})
		_, look := c.Look(ctx, "x")
		for _, err := range []error{
			err, all, look, c.Do(ctx, "x", run), c.Lead(ctx, "x", run), c.ForceRelease(ctx, "x", "y"), c.Close(ctx),
		} {
			if !errors.Is(err, fencelock.ErrInvalidOption) || strings.Contains(err.Error(), "%!") {
				t.Errorf("the zero client: %v", err)
			}
		}
		_ = c.Describe()
	}
	for _, l := range []*fencelock.Lease{nil, {}} {
		wantErr(t, l.Err(), fencelock.ErrNotHeld)
		wantErr(t, l.Release(ctx), fencelock.ErrNotHeld)
		wantErr(t, l.Extend(ctx, time.Second), fencelock.ErrNotHeld)
		wantErr(t, context.Cause(l.Context()), fencelock.ErrNotHeld)
		if l.Token() != 0 || l.Name()+l.Owner()+l.HoldID()+l.TokenSpace() != "" || !l.Deadline().IsZero() ||
			l.Grant().Name != "" {
			t.Error("a lease that was never held tells of something")
		}
	}
	wantErr(t, fencelock.Leases{nil, {}}.Err(), fencelock.ErrNotHeld)
	wantErr(t, fencelock.Leases{nil, {}}.Context().Err(), context.Canceled)
}

// The observer gets all events of a lease, with the data for a span, a metric and a log line.
func TestObserverSeesAllEventsOfALease(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		type key struct{}
		var mu sync.Mutex
		var seen []fencelock.EventType
		other, _ := b.client(fencelock.Options{Owner: "the holder"})
		c, _ := b.client(fencelock.Options{TTL: 3 * time.Second, Observer: fencelock.ObserverFunc(
			func(ctx context.Context, e fencelock.Event) {
				mu.Lock()
				defer mu.Unlock()
				seen = append(seen, e.Type)
				if ctx.Value(key{}) != "span" || e.Driver != "memory" || e.Tier != fencelock.Correctness ||
					e.Name != "x" || e.HoldID == "" || e.Kind != fencelock.KindExclusive || e.Time.IsZero() {
					t.Errorf("event %+v lacks something", e)
				}
				if e.Type == fencelock.EventWaiting && (e.Holder == nil || e.Holder.Owner != "the holder") {
					t.Errorf("waits for %+v", e.Holder)
				}
			},
		)})
		held := mustAcquire(t, other, "x")
		go func() {
			time.Sleep(time.Second)
			release(t, held)
		}()
		err := c.Lead(context.WithValue(t.Context(), key{}, "span"), "x",
			func(context.Context, *fencelock.Lease) error {
				time.Sleep(1200 * time.Millisecond)
				return nil
			})
		if err != nil {
			t.Error(err)
		}
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if got := fmt.Sprint(seen); got != "[waiting acquired elected renewed released deposed]" {
			t.Errorf("observed %s", got)
		}
	})
}
