package memory_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func request(name string, ttl time.Duration) backend.Request {
	return backend.Request{Name: name, Owner: "test", RequestID: backend.NewRequestID(), TTL: ttl}
}

func waiting(r backend.Request) backend.Request {
	r.Wait = true
	return r
}

func acquire(t *testing.T, d *memory.Driver, r backend.Request) backend.Grant {
	t.Helper()
	g, err := d.Acquire(t.Context(), r)
	if err != nil {
		t.Fatalf("Acquire(%q) = %v", r.Name, err)
	}
	return g
}

// simulated runs f with simulated time on a fresh store.
func simulated(t *testing.T, f func(t *testing.T, s *memory.Store)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f(t, memory.NewStore(&memory.Options{Clock: backend.GoClock()}))
	})
}

// closing closes the drivers at the end of the test: an exchange over a broken network outlives its call until then.
func closing(t *testing.T, drivers ...*memory.Driver) {
	t.Cleanup(func() {
		for _, d := range drivers {
			if err := d.Close(context.Background()); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestHoldEndsExactlyAtItsTTL(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		first := acquire(t, a, request("x", time.Second))
		time.Sleep(time.Second - time.Nanosecond)
		if _, err := b.Acquire(t.Context(), request("x", time.Second)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("one nanosecond before the end: %v, want ErrHeld", err)
		}
		time.Sleep(time.Nanosecond)
		second := acquire(t, b, request("x", time.Second))
		if second.Token <= first.Token {
			t.Errorf("token %v after %v, want a greater one", second.Token, first.Token)
		}
		err := a.Release(t.Context(), first)
		var gone *backend.NotHeldError
		if !errors.As(err, &gone) || gone.Reason != backend.ReasonExpired {
			t.Errorf("release after the end = %v, want NotHeldError with reason expired", err)
		}
	})
}

func TestRenewalCountsFromItsReceipt(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		g := acquire(t, a, request("x", time.Second))
		time.Sleep(900 * time.Millisecond)
		other := g
		other.RequestID = backend.NewRequestID()
		renewals := a.Renew(t.Context(), []backend.Grant{other, g})
		if !errors.Is(renewals[0].Err, backend.ErrNotHeld) || renewals[1].Err != nil {
			t.Fatalf("Renew = %v, want ErrNotHeld and success", renewals)
		}
		if got := renewals[1].SentAt.Sub(g.SentAt); got != 900*time.Millisecond {
			t.Errorf("SentAt of the renewal is %v after that of the grant, want 900ms", got)
		}
		time.Sleep(time.Second - time.Nanosecond)
		if _, err := b.Acquire(t.Context(), request("x", time.Second)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("within the renewed TTL: %v, want ErrHeld", err)
		}
	})
}

func TestWaitersAreServedByArrival(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		holder := s.Driver()
		g := acquire(t, holder, request("x", time.Minute))
		const n = 20
		order := make(chan int, n)
		for i := range n {
			go func() {
				d := s.Driver()
				got, err := d.Acquire(context.Background(), waiting(request("x", time.Minute)))
				if err != nil {
					t.Errorf("waiter %d: %v", i, err)
				}
				order <- i
				time.Sleep(time.Second)
				if err := d.Release(context.Background(), got); err != nil {
					t.Errorf("waiter %d: release: %v", i, err)
				}
			}()
			synctest.Wait()
		}
		time.Sleep(10 * time.Second)
		if renewals := holder.Renew(t.Context(), []backend.Grant{g}); renewals[0].Err != nil {
			t.Fatal(renewals[0].Err)
		}
		if err := holder.Release(t.Context(), g); err != nil {
			t.Fatal(err)
		}
		for want := range n {
			if got := <-order; got != want {
				t.Fatalf("grant %d went to waiter %d", want, got)
			}
		}
		synctest.Wait()
		time.Sleep(2 * time.Second)
		if left := s.Names(); left != 0 {
			t.Errorf("%d names left", left)
		}
	})
}

// A network on which an answer takes more than a tenth of the TTL is slow, and no reason to ask indefinitely.
func TestWaitOverASlowNetworkIsGranted(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		d := s.Driver()
		d.Network().Delay(memory.Replies, time.Second)
		g := acquire(t, d, waiting(request("x", 2*time.Second)))
		if age := backend.GoClock().Now().Sub(g.SentAt); age >= 2*time.Second {
			t.Errorf("SentAt is %v old when Acquire returns", age)
		}
		d.Network().Pass()
		if err := d.Release(t.Context(), g); err != nil {
			t.Error(err)
		}
	})
}

func TestGrantAfterALongWaitHasItsWholeValidity(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		g := acquire(t, a, request("x", time.Minute))
		time.AfterFunc(30*time.Second, func() { _ = a.Release(context.Background(), g) })
		got := acquire(t, b, waiting(request("x", 3*time.Second)))
		if age := backend.GoClock().Now().Sub(got.SentAt); age > 300*time.Millisecond {
			t.Errorf("SentAt is %v old when Acquire returns, want at most a tenth of the TTL", age)
		}
	})
}

func TestDeadWaiterLeavesTheQueue(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		holder, dead, alive := s.Driver(), s.Driver(), s.Driver()
		closing(t, dead)
		g := acquire(t, holder, request("x", time.Minute))
		ctx, cancel := context.WithCancel(t.Context())
		deadErr := make(chan error)
		go func() {
			_, err := dead.Acquire(ctx, waiting(request("x", 2*time.Second)))
			deadErr <- err
		}()
		synctest.Wait()
		dead.Network().Drop(memory.Both)
		time.Sleep(3 * time.Second)
		got := make(chan backend.Grant)
		go func() { got <- acquire(t, alive, waiting(request("x", time.Second))) }()
		synctest.Wait()
		if err := holder.Release(t.Context(), g); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case <-got:
		default:
			t.Error("the name went to a waiter that had not been heard of for longer than its TTL")
			<-got
		}
		cancel()
		if err := <-deadErr; !errors.Is(err, context.Canceled) || !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("cancelled waiter behind a dead link = %v, want Canceled and ErrUnknown", err)
		}
	})
}

func TestMinimumHoldOutlivesReleaseAndDeath(t *testing.T) {
	for _, dies := range []bool{false, true} {
		simulated(t, func(t *testing.T, s *memory.Store) {
			a, b := s.Driver(), s.Driver()
			r := request("x", time.Second)
			r.MinHold = 5 * time.Second
			g := acquire(t, a, r)
			if got := g.MinHoldUntil.Sub(g.SentAt); got != 5*time.Second {
				t.Errorf("MinHoldUntil is %v after SentAt, want 5s", got)
			}
			if !dies {
				if err := a.Release(t.Context(), g); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(4 * time.Second)
			if _, err := b.Acquire(t.Context(), request("x", time.Second)); !errors.Is(err, backend.ErrHeld) {
				t.Errorf("dies=%v: within the minimum: %v, want ErrHeld", dies, err)
			}
			info, err := b.Look(t.Context(), "x")
			if err != nil || info.Held {
				t.Errorf("dies=%v: Holder = %+v, %v; want not held", dies, info, err)
			}
			start := time.Now()
			acquire(t, b, waiting(request("x", time.Second)))
			if got := time.Since(start); got != time.Second {
				t.Errorf("dies=%v: opened after another %v, want 1s", dies, got)
			}
		})
	}
}

func TestImpossibleDurationsAreRefused(t *testing.T) {
	d := memory.New(nil)
	for _, ttl := range []time.Duration{-1, 0, time.Millisecond, 1<<63 - 1} {
		if _, err := d.Acquire(t.Context(), request("x", ttl)); !errors.Is(err, backend.ErrInvalidTTL) {
			t.Errorf("TTL %v: %v, want ErrInvalidTTL", ttl, err)
		}
	}
	for _, least := range []time.Duration{-1, 1<<63 - 1} {
		r := request("x", time.Second)
		r.MinHold = least
		if _, err := d.Acquire(t.Context(), r); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("minimum hold %v: %v, want ErrInvalidOption", least, err)
		}
	}
	if left := d.Store().Names(); left != 0 {
		t.Errorf("%d names left by refused requests", left)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := d.Close(ctx); err != nil {
		t.Errorf("Close after refused requests = %v", err)
	}
}

func TestAbandonedRequestKeepsNoMinimum(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		r := request("x", time.Second)
		r.MinHold = time.Hour
		acquire(t, a, r)
		if err := a.Release(t.Context(), r.Grant()); err != nil {
			t.Fatal(err)
		}
		acquire(t, b, request("x", time.Second))
	})
}

func TestLossIsPushed(t *testing.T) {
	for reason, take := range map[backend.Reason]func(*memory.Store, *memory.Driver) error{
		backend.ReasonEvicted: func(s *memory.Store, _ *memory.Driver) error { s.Evict("x"); return nil },
		backend.ReasonForceReleased: func(_ *memory.Store, d *memory.Driver) error {
			return d.ForceRelease(context.Background(), backend.ForceRequest{Name: "x", Reason: "test"})
		},
		backend.ReasonExpired: func(*memory.Store, *memory.Driver) error { time.Sleep(time.Second); return nil },
	} {
		simulated(t, func(t *testing.T, s *memory.Store) {
			a, b := s.Driver(), s.Driver()
			var told atomic.Value
			r := request("x", time.Second)
			// A callback that looks at the store must not block it.
			r.Lost = func(loss backend.Loss) { told.Store(loss.Reason); s.Names() }
			g := acquire(t, a, r)
			if err := take(s, b); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if told.Load() != reason {
				t.Errorf("Lost was called with %v, want %v", told.Load(), reason)
			}
			var gone *backend.NotHeldError
			if err := a.Renew(t.Context(), []backend.Grant{g})[0].Err; !errors.As(err, &gone) || gone.Reason != reason {
				t.Errorf("Renew = %v, want NotHeldError with reason %v", err, reason)
			}
		})
	}
}

func TestLateRequestIsDeliveredInOrder(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		closing(t, a)
		a.Network().Hold(memory.Requests)
		r := request("x", time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := a.Acquire(ctx, r)
		if !errors.Is(err, backend.ErrUnknown) || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Acquire behind a held link = %v, want ErrUnknown and DeadlineExceeded", err)
		}
		acquire(t, b, request("other", time.Minute))
		a.Network().Pass()
		if _, err := b.Acquire(t.Context(), request("x", time.Second)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("after the late delivery: %v, want ErrHeld", err)
		}
		time.Sleep(time.Second)
		acquire(t, b, request("x", time.Second))
	})
}

// A waiter that left behind a dead link does not know what arrives late. The core releases its request, and the release
// arrives last.
func TestLateWaiterIsFollowedByItsRelease(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a := s.Driver()
		closing(t, a)
		a.Network().Hold(memory.Requests)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r := waiting(request("x", time.Minute))
		if _, err := a.Acquire(ctx, r); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, backend.ErrUnknown) {
			t.Fatalf("Acquire behind a held link = %v, want DeadlineExceeded and ErrUnknown", err)
		}
		released := make(chan error, 1)
		go func() { released <- a.Release(context.Background(), r.Grant()) }()
		synctest.Wait()
		a.Network().Pass()
		if err := <-released; err != nil {
			t.Errorf("release after the late delivery = %v", err)
		}
		if left := s.Names(); left != 0 {
			t.Errorf("%d names left after the late delivery", left)
		}
	})
}

func TestLostReplyIsResolvedByAskingAgain(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a := s.Driver()
		a.Network().Drop(memory.Replies)
		time.AfterFunc(time.Second, a.Network().Pass)
		g := acquire(t, a, request("x", time.Minute))
		if g.Token != 2 {
			t.Errorf("token %v, want 2, the store's first: the same hold", g.Token)
		}
	})
}

func TestDelayedMessagesKeepTheirOrder(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a := s.Driver()
		a.Network().Delay(memory.Both, 100*time.Millisecond)
		start := time.Now()
		g := acquire(t, a, request("x", time.Second))
		if got := time.Since(start); got != 200*time.Millisecond {
			t.Errorf("answered after %v, want 200ms", got)
		}
		if age := backend.GoClock().Now().Sub(g.SentAt); age != 200*time.Millisecond {
			t.Errorf("SentAt is %v old, want 200ms", age)
		}
		if err := a.Release(t.Context(), g); err != nil {
			t.Error(err)
		}
		a.Network().Pass()
		acquire(t, a, request("x", time.Second))
	})
}

// What is on its way arrives in its time, whatever is sent behind it and sooner.
func TestLaterMessagesHurryNone(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		g := acquire(t, a, request("x", time.Minute))
		start := time.Now()
		done := make(chan struct{}, 2)
		a.Network().Delay(memory.Requests, 10*time.Second)
		go func() { _ = a.Release(context.Background(), g); done <- struct{}{} }()
		synctest.Wait()
		a.Network().Delay(memory.Requests, time.Second)
		go func() { _ = a.Ping(context.Background()); done <- struct{}{} }()
		acquire(t, b, waiting(request("x", time.Minute)))
		if got := time.Since(start); got != 10*time.Second {
			t.Errorf("a release that takes 10s arrived after %v", got)
		}
		<-done
		<-done
	})
}

func TestPausedServerAnswersLater(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		closing(t, a)
		g := acquire(t, a, request("x", time.Second))
		s.Pause()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := a.Release(ctx, g); !errors.Is(err, backend.ErrUnknown) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Release at a paused server = %v, want ErrUnknown and DeadlineExceeded", err)
		}
		got := make(chan backend.Grant)
		go func() { got <- acquire(t, b, waiting(request("x", time.Second))) }()
		synctest.Wait()
		s.Resume()
		<-got
	})
}

func TestRestartKeepsHoldsAndCounter(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		g := acquire(t, a, request("x", time.Minute))
		got := make(chan backend.Grant)
		go func() { got <- acquire(t, b, waiting(request("x", time.Minute))) }()
		synctest.Wait()
		s.Stop()
		if _, err := a.Acquire(t.Context(), request("y", time.Minute)); !errors.Is(err, backend.ErrUnavailable) {
			t.Errorf("Acquire at a stopped server = %v, want ErrUnavailable", err)
		}
		time.Sleep(10 * time.Second)
		s.Start()
		if err := a.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
			t.Errorf("Renew after the restart = %v", err)
		}
		time.Sleep(10 * time.Second) // the waiter has come back by now
		if err := a.Release(t.Context(), g); err != nil {
			t.Error(err)
		}
		if next := <-got; next.Token <= g.Token {
			t.Errorf("token %v after %v, want a greater one", next.Token, g.Token)
		}
	})
}

func TestCloseEndsWaiters(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		a, b := s.Driver(), s.Driver()
		g := acquire(t, a, request("x", time.Minute))
		failed := make(chan error, 1)
		go func() {
			_, err := b.Acquire(context.Background(), waiting(request("x", time.Minute)))
			failed <- err
		}()
		synctest.Wait()
		if err := b.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-failed; !errors.Is(err, backend.ErrClosed) {
			t.Errorf("waiter of a closed driver = %v, want ErrClosed", err)
		}
		if _, err := b.Acquire(t.Context(), request("x", time.Minute)); !errors.Is(err, backend.ErrClosed) {
			t.Errorf("Acquire after Close = %v, want ErrClosed", err)
		}
		if err := a.Release(t.Context(), g); err != nil {
			t.Fatal(err)
		}
		if left := s.Names(); left != 0 {
			t.Errorf("%d names left", left)
		}
	})
}

// A request that is in flight when the driver closes may arrive later. Its caller gets ErrUnknown, and what it took ends
// with its TTL.
func TestCloseBehindAHeldLink(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		d := s.Driver()
		d.Network().Hold(memory.Requests)
		failed := make(chan error, 1)
		go func() {
			_, err := d.Acquire(context.Background(), waiting(request("x", time.Minute)))
			failed <- err
		}()
		synctest.Wait()
		if err := d.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-failed; !errors.Is(err, backend.ErrClosed) || !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("Acquire of a driver that was closed = %v, want ErrClosed and ErrUnknown", err)
		}
		d.Network().Pass()
		time.Sleep(time.Minute)
		if left := s.Names(); left != 0 {
			t.Errorf("%d names left one TTL after the late delivery", left)
		}
	})
}

func TestListShowsHeldNames(t *testing.T) {
	d := memory.New(nil)
	r := request("jobs/a", time.Minute)
	r.Metadata = map[string]string{"k": "v"}
	acquire(t, d, r)
	acquire(t, d, request("jobs/b", time.Minute))
	acquire(t, d, request("other", time.Minute))
	var names []string
	for info, err := range d.List(t.Context(), "jobs/") {
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, info.Name)
		if info.Name == "jobs/a" && info.Holders[0].Metadata["k"] != "v" {
			t.Errorf("metadata = %v", info.Holders[0].Metadata)
		}
	}
	if len(names) != 2 || names[0] != "jobs/a" || names[1] != "jobs/b" {
		t.Errorf("List = %v, want jobs/a and jobs/b", names)
	}
	if err := d.ForceRelease(t.Context(), backend.ForceRequest{Name: "nobody"}); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("ForceRelease of a free name = %v, want ErrNotHeld", err)
	}
}

func TestURLNamesAStore(t *testing.T) {
	open := func(url string) *memory.Driver {
		d, err := backend.Open(t.Context(), url)
		if err != nil {
			t.Fatalf("Open(%q) = %v", url, err)
		}
		return d.(*memory.Driver)
	}
	one, again, two := open("memory://one"), open("memory://one"), open("memory://two")
	if one.Store() != again.Store() {
		t.Error("the same name opens two stores")
	}
	if one.Store() == two.Store() {
		t.Error("different names open the same store")
	}
	if private, other := open("memory://"), open("memory://"); private.Store() == other.Store() {
		t.Error("no name opens the same store twice")
	}
	if _, err := backend.Open(t.Context(), "memory://one?x=y"); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("Open with settings = %v, want ErrInvalidOption", err)
	}
}

func TestContendersExcludeEachOther(t *testing.T) {
	s := memory.NewStore(nil)
	const workers, rounds = 16, 200
	var inside, overlaps atomic.Int32
	done := make(chan struct{})
	for range workers {
		go func() {
			defer func() { done <- struct{}{} }()
			d := s.Driver()
			for range rounds {
				g, err := d.Acquire(context.Background(), waiting(request("x", time.Minute)))
				if err != nil {
					t.Error(err)
					return
				}
				if inside.Add(1) != 1 {
					overlaps.Add(1)
				}
				inside.Add(-1)
				if err := d.Release(context.Background(), g); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	for range workers {
		<-done
	}
	if n := overlaps.Load(); n != 0 {
		t.Errorf("%d times two held the lock", n)
	}
	if left := s.Names(); left != 0 {
		t.Errorf("%d names left", left)
	}
}

func BenchmarkAcquireRelease(b *testing.B) {
	d := memory.New(nil)
	ctx := b.Context()
	r := request("x", 30*time.Second)
	b.ReportAllocs()
	for b.Loop() {
		g, err := d.Acquire(ctx, r)
		if err != nil {
			b.Fatal(err)
		}
		if err := d.Release(ctx, g); err != nil {
			b.Fatal(err)
		}
	}
}

// A set that waits may be asked for again in another order. If nobody hears that it was granted, each of its names is
// free again after the TTL.
func TestSetIsAskedForInAnotherOrder(t *testing.T) {
	simulated(t, func(t *testing.T, s *memory.Store) {
		holder, waiter := s.Driver(), s.Driver()
		closing(t, waiter)
		first := acquire(t, holder, request("y", time.Minute))
		set := []backend.Request{waiting(request("x", time.Minute)), waiting(request("y", time.Minute))}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range 2 {
			go func(set []backend.Request) { _, _ = waiter.AcquireAll(ctx, set) }(slices.Clone(set))
			synctest.Wait()
			slices.Reverse(set)
		}
		waiter.Network().Drop(memory.Both)
		if err := holder.Release(t.Context(), first); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		cancel()
		synctest.Wait()
		for _, name := range []string{"x", "y"} {
			acquire(t, holder, request(name, time.Second))
		}
	})
}
