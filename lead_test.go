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
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/fencing"
)

// A hundred candidates, whose leader is cut off fifty times and comes back as a candidate: no two candidates lead
// concurrently, terms only grow, and there is always a next leader.
func TestElectionUnderKills(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		const candidates, kills = 100, 50
		ctx, stop := context.WithCancel(t.Context())
		var leading atomic.Int32
		var mu sync.Mutex
		var last fencing.Token
		terms := make(chan *memory.Driver, candidates)
		var all sync.WaitGroup
		for range candidates {
			c, driver := b.client(fencelock.Options{TTL: 10 * time.Second})
			all.Go(func() {
				err := c.Lead(ctx, "scheduler", func(ctx context.Context, lease *fencelock.Lease) error {
					if leading.Add(1) > 1 {
						t.Error("two leaders believe in themselves")
					}
					mu.Lock()
					if lease.Token() <= last {
						t.Errorf("term %v after %v", lease.Token(), last)
					}
					last = lease.Token()
					mu.Unlock()
					terms <- driver
					<-ctx.Done()
					leading.Add(-1)
					return ctx.Err()
				})
				wantErr(t, err, context.Canceled)
			})
		}
		var cut *memory.Driver
		for range kills {
			leader := <-terms
			leader.Network().Refuse()
			if cut != nil {
				cut.Network().Pass() // the previous leader is a candidate again
			}
			cut = leader
		}
		<-terms
		cut.Network().Pass()
		stop()
		all.Wait()
		if leading.Load() != 0 {
			t.Errorf("%d still lead", leading.Load())
		}
	})
}

func TestLeadReturnsTheErrorOfItsFunction(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		failed := errors.New("no disk")
		err := c.Lead(t.Context(), "x", func(context.Context, *fencelock.Lease) error { return failed })
		wantErr(t, err, failed)
		if err := c.Lead(t.Context(), "x", func(context.Context, *fencelock.Lease) error { return nil }); err != nil {
			t.Errorf("a leader that ends its work: %v", err)
		}
		wantErr(t, c.Lead(t.Context(), "x", nil), fencelock.ErrInvalidOption)
		wantErr(t, c.Lead(t.Context(), "", func(context.Context, *fencelock.Lease) error { return nil }),
			fencelock.ErrInvalidName)
		if b.store.Names() != 0 {
			t.Error("a lock is left")
		}
	})
}

// The end of a candidate's context is one error, whether it has not begun to wait, waits or leads.
func TestLeadReturnsTheEndOfItsContext(t *testing.T) {
	why := errors.New("shutdown")
	for when, lead := range map[string]func(*bed, *fencelock.Client, context.CancelCauseFunc){
		"before": func(_ *bed, _ *fencelock.Client, cancel context.CancelCauseFunc) { cancel(why) },
		"waiting": func(b *bed, c *fencelock.Client, cancel context.CancelCauseFunc) {
			if _, err := c.Acquire(b.t.Context(), "x"); err != nil {
				b.t.Fatal(err)
			}
			time.AfterFunc(time.Second, func() { cancel(why) })
		},
		"leading": func(_ *bed, _ *fencelock.Client, cancel context.CancelCauseFunc) {
			time.AfterFunc(time.Second, func() { cancel(why) })
		},
	} {
		simulate(t, func(t *testing.T, b *bed) {
			c, _ := b.client(fencelock.Options{})
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			lead(b, c, cancel)
			err := c.Lead(ctx, "x", func(ctx context.Context, _ *fencelock.Lease) error {
				<-ctx.Done()
				return ctx.Err()
			})
			wantErr(t, err, context.Canceled)
			wantErr(t, err, why)
			if want := `fencelock: lead "x": context canceled: shutdown`; err.Error() != want {
				t.Errorf("%s: %q, want %q", when, err, want)
			}
		})
	}
}

func TestResignLetsOthersLead(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		var all sync.WaitGroup
		var terms []string
		var mu sync.Mutex
		for _, name := range []string{"a", "b", "c"} {
			c, _ := b.client(fencelock.Options{Owner: name})
			all.Go(func() {
				_ = c.Lead(ctx, "x", func(ctx context.Context, lease *fencelock.Lease) error {
					mu.Lock()
					terms = append(terms, lease.Owner())
					n := len(terms)
					mu.Unlock()
					time.Sleep(time.Second) // the others are candidates by now
					if n == 9 {
						stop()
					}
					return fencelock.ErrResign
				})
			})
			synctest.Wait()
		}
		all.Wait()
		if got := fmt.Sprint(terms); got != "[a b c a b c a b c]" {
			t.Errorf("leaders in turn: %s", got)
		}
	})
}

// A candidate continues after an outage of the service.
func TestLeadSurvivesAnOutage(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{TTL: time.Second})
		b.store.Stop()
		go func() {
			time.Sleep(time.Minute)
			b.store.Start()
		}()
		began := time.Now()
		terms := 0
		err := c.Lead(t.Context(), "x", func(ctx context.Context, _ *fencelock.Lease) error {
			if terms++; terms == 2 {
				return nil
			}
			b.store.Stop()
			<-ctx.Done()
			b.store.Start()
			return ctx.Err()
		})
		if err != nil || terms != 2 || time.Since(began) > 70*time.Second {
			t.Errorf("Lead = %v after %v with %d terms", err, time.Since(began), terms)
		}
	})
}

func TestLeadersYieldsEachLeader(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		watcher, _ := b.client(fencelock.Options{})
		_, err := watcher.Leader(t.Context(), "x")
		wantErr(t, err, fencelock.ErrNotHeld)
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		seen := make(chan string)
		go func() {
			defer close(seen)
			for leader, err := range watcher.Leaders(ctx, "x") {
				if err != nil {
					return
				}
				seen <- leader.Owner
			}
		}()
		next := func(want string) {
			t.Helper()
			if got := <-seen; got != want {
				t.Errorf("leader %q, want %q", got, want)
			}
		}
		next("")
		for _, owner := range []string{"a", "b"} {
			c, _ := b.client(fencelock.Options{Owner: owner})
			lease := mustAcquire(t, c, "x")
			next(owner)
			if l, err := watcher.Leader(t.Context(), "x"); err != nil || l.Token != lease.Token() {
				t.Errorf("Leader = %+v, %v", l, err)
			}
			release(t, lease)
			next("")
		}
		stop()
		for range seen {
			t.Error("notified after the end")
		}
	})
}
