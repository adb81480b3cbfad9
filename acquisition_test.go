package fencelock_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// ways returns a driver that takes a set in one step, and one without AcquireAll.
var ways = map[string]func(*scripted) backend.FencingDriver{
	"in one step": func(s *scripted) backend.FencingDriver { return s },
	"one by one":  func(s *scripted) backend.FencingDriver { return loneScripted{s} },
}

// balance fails the test unless every reported acquire, election and wait has its end.
func (r *recorder) balance(t *testing.T) {
	t.Helper()
	delivered()
	n := func(types ...fencelock.EventType) (n int) {
		for _, typ := range types {
			n += len(r.of(typ))
		}
		return n
	}
	if begun, ended := n(fencelock.EventAcquired), n(fencelock.EventReleased, fencelock.EventLost); begun != ended {
		t.Errorf("%d leases were reported as acquired, and %d as released or lost", begun, ended)
	}
	if begun, ended := n(fencelock.EventElected), n(fencelock.EventDeposed); begun != ended {
		t.Errorf("%d elected, %d deposed", begun, ended)
	}
	waits := map[string]int{}
	for _, e := range r.of(fencelock.EventWaiting) {
		waits[e.HoldID]++
	}
	for _, typ := range []fencelock.EventType{
		fencelock.EventAcquired, fencelock.EventContended, fencelock.EventFailed,
	} {
		for _, e := range r.of(typ) {
			delete(waits, e.HoldID)
		}
	}
	if len(waits) > 0 {
		t.Errorf("%d waits were reported and not their end: %v", len(waits), waits)
	}
}

// ended runs f, which may return, panic or end its goroutine.
func ended(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = recover() }()
		f()
	}()
	<-done
}

// If a resource refuses the claim of one name, the whole set is released without its minimum, however Seal ends.
func TestUnsealedSetIsReleased(t *testing.T) {
	refused := errors.New("refused")
	endings := map[string]func() error{
		"an error": func() error { return refused },
		"a panic":  func() error { panic(refused) },
		"Goexit":   func() error { runtime.Goexit(); return nil },
	}
	for way, driver := range ways {
		for how, end := range endings {
			t.Run(way+", "+how, func(t *testing.T) {
				simulate(t, func(t *testing.T, b *bed) {
					var seen recorder
					c := b.over(driver(&scripted{Driver: b.store.Driver()}), fencelock.Options{Observer: &seen})
					rival, _ := b.client(fencelock.Options{})
					var err error
					ended(func() {
						_, err = c.AcquireAll(context.Background(), []string{"a", "b"},
							fencelock.HoldAtLeast(10*time.Minute),
							fencelock.Seal(func(_ context.Context, claim fencing.Claim) error {
								if claim.Resource == "b" {
									return end()
								}
								return nil
							}))
					})
					if how == "an error" {
						wantErr(t, err, refused)
					}
					synctest.Wait()
					for _, name := range []string{"a", "b"} {
						lease, err := rival.TryAcquire(t.Context(), name)
						if err != nil {
							t.Errorf("afterwards %q is closed: %v", name, err)
							continue
						}
						release(t, lease)
					}
					seen.balance(t)
					if n := len(seen.of(fencelock.EventFailed)); n != 2 {
						t.Errorf("%d of two names were reported as failed", n)
					}
				})
			})
		}
	}
}

// Holds that a driver granted, or may have granted, before it panicked are released.
func TestDriverPanicIsCleanedUp(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		s := &scripted{Driver: b.store.Driver()}
		c := b.over(loneScripted{s}, fencelock.Options{Observer: &seen})
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := s.Driver.Acquire(ctx, r)
			if r.Name == "b" {
				time.Sleep(time.Second)
				panic("driver")
			}
			return g, err
		}
		ended(func() { _, _ = c.AcquireAll(context.Background(), []string{"a", "b"}) })
		ended(func() { _, _ = c.Acquire(context.Background(), "b") })
		time.Sleep(time.Second)
		if n := b.store.Names(); n != 0 {
			t.Errorf("%d names are in use", n)
		}
		seen.balance(t)
		if n := len(seen.of(fencelock.EventFailed)); n != 3 {
			t.Errorf("%d failures were reported, want one for each of three names", n)
		}
	})
}

// describing calls hook in the n-th Describe.
type describing struct {
	*scripted
	n    atomic.Int64
	hook func()
}

func (d *describing) IssuesFencingTokens() backend.Driver { return d }
func (d *describing) Unwrap() backend.Driver              { return d.scripted }
func (d *describing) Describe() backend.Description {
	if d.n.Add(-1) == 0 {
		d.hook()
	}
	return d.Driver.Describe()
}

func (d *describing) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	return d.Driver.AcquireAll(ctx, rs)
}

// A lease of a set that is lost at any moment of its acquire is reported as lost if it was reported as acquired.
func TestALossWhileASetBeginsIsReported(t *testing.T) {
	for at := 1; at <= 40; at++ {
		simulate(t, func(t *testing.T, b *bed) {
			var seen recorder
			d := &describing{scripted: &scripted{Driver: b.store.Driver()}}
			c := b.over(d, fencelock.Options{Observer: &seen})
			d.hook = func() {
				done := make(chan struct{})
				go func() { b.store.Evict("a"); close(done) }()
				for range 100 { // the core may hold a mutex for which the loss has to wait
					runtime.Gosched()
				}
				select {
				case <-done:
				default:
				}
			}
			d.n.Store(int64(at))
			if leases, err := c.TryAcquireAll(t.Context(), []string{"a", "b"}); err == nil {
				_ = leases.Release(t.Context())
			}
			if seen.balance(t); t.Failed() {
				t.Fatalf("with the loss in the %d. call of Describe", at)
			}
		})
	}
}

// A leader whose function panics or ends its goroutine is reported as deposed, and no longer leads.
func TestEveryElectionIsDeposed(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		var seen recorder
		c := b.over(b.store.Driver(), fencelock.Options{Observer: &seen})
		for _, end := range []func(){func() { panic("leader") }, runtime.Goexit} {
			ended(func() {
				_ = c.Lead(context.Background(), "x", func(context.Context, *fencelock.Lease) error { end(); return nil })
			})
		}
		if n := b.store.Names(); n != 0 {
			t.Errorf("%d names are in use", n)
		}
		seen.balance(t)
		if n := len(seen.of(fencelock.EventDeposed)); n != 2 {
			t.Errorf("%d of two leaders were deposed", n)
		}
	})
}

// Each name of a set that waits has its wait reported, and the end of it.
func TestEveryWaitHasAnEnd(t *testing.T) {
	for way, driver := range ways {
		t.Run(way, func(t *testing.T) {
			simulate(t, func(t *testing.T, b *bed) {
				var seen recorder
				c := b.over(driver(&scripted{Driver: b.store.Driver()}), fencelock.Options{Observer: &seen})
				rival, _ := b.client(fencelock.Options{})
				held := mustAcquire(t, rival, "b")
				_, err := c.AcquireAll(t.Context(), []string{"a", "b"}, fencelock.WaitAtMost(time.Second))
				wantErr(t, err, fencelock.ErrHeld)
				_, err = c.Acquire(t.Context(), "b", fencelock.WaitAtMost(time.Second), fencelock.RequestID(requestID))
				wantErr(t, err, fencelock.ErrHeld)
				if n := len(seen.of(fencelock.EventWaiting)); n != 3 {
					t.Errorf("%d waits were reported, want 3", n)
				}
				seen.balance(t)
				release(t, held)
			})
		})
	}
}

// A context that ends with a lease has ended as soon as the lease has.
func TestTheContextOfASetEndsWithItsLease(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		err := c.DoAll(t.Context(), []string{"a", "b"}, func(ctx context.Context, leases fencelock.Leases) error {
			joint := leases.Context()
			b.store.Evict("a")
			if leases.Err() == nil || joint.Err() == nil || ctx.Err() == nil {
				t.Errorf("after the loss of one: %v, context of the set %v, of the function %v",
					leases.Err(), joint.Err(), ctx.Err())
			}
			return nil
		})
		wantErr(t, err, fencelock.ErrLost)
	})
}

// A set that keeps losing a name while it waits for another one retries with pauses.
func TestLostSetIsRetriedWithPauses(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		c := b.over(loneScripted{s}, fencelock.Options{})
		rival, _ := b.client(fencelock.Options{})
		held := mustAcquire(t, rival, "b")
		asked := 0
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := s.Driver.Acquire(ctx, r)
			if r.Name == "a" {
				asked++
				time.AfterFunc(time.Millisecond, func() { b.store.Evict("a") })
			}
			return g, err
		}
		_, err := c.AcquireAll(t.Context(), []string{"a", "b"}, fencelock.WaitAtMost(time.Minute))
		wantErr(t, err, fencelock.ErrHeld)
		if asked < 10 || asked > 100 {
			t.Errorf("asked %d times in a minute for a name that is lost a millisecond after each grant", asked)
		}
		time.Sleep(time.Second)
		release(t, held)
	})
}

// The Close of another client in the cause of the caller's context does not hide the reason why the acquire ended.
func TestTheCauseOfTheCallerIsKept(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		rival, _ := b.client(fencelock.Options{})
		held := mustAcquire(t, rival, "x")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(fencelock.ErrClosed) })
		_, err := c.Acquire(ctx, "x")
		wantErr(t, err, context.Canceled, fencelock.ErrClosed, fencelock.ErrHeld)
		release(t, held)
	})
}

// The error of a wait that the caller's context ends has one prefix: that of the client.
func TestEndedWaitHasOnePrefix(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{Owner: "holder"})
		if _, err := c.Acquire(t.Context(), "x"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Acquire(ctx, "x")
		wantErr(t, err, context.DeadlineExceeded)
		wantErr(t, err, fencelock.ErrHeld)
		if want := `fencelock: acquire "x": context deadline exceeded: lock is held by holder, `; !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q, want it to begin with %q", err, want)
		}
	})
}
