package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/fencing"
)

// lone is the in-process driver without AcquireAll, so that the core takes the names one by one.
type lone struct{ *memory.Driver }

func (d lone) Describe() backend.Description {
	s := d.Driver.Describe()
	s.Capabilities &^= backend.CapMultiAcquire | backend.CapDeadlock
	return s
}

// eachWay runs f with a driver that acquires several names in one step, and with a driver that does not.
func eachWay(t *testing.T, f func(t *testing.T, b *bed, client func() *fencelock.Client)) {
	for what, driver := range map[string]func(*memory.Driver) backend.FencingDriver{
		"in one step": func(d *memory.Driver) backend.FencingDriver { return d },
		"one by one":  func(d *memory.Driver) backend.FencingDriver { return lone{d} },
	} {
		t.Run(what, func(t *testing.T) {
			simulate(t, func(t *testing.T, b *bed) {
				b.t = t
				f(t, b, func() *fencelock.Client { return b.over(driver(b.store.Driver()), fencelock.Options{}) })
			})
		})
	}
}

func TestAcquireAllIsAllOrNone(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed, client func() *fencelock.Client) {
		c, rival := client(), client()
		names := []string{"c", "a", "b"}
		all, err := c.AcquireAll(t.Context(), names)
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range all {
			if l.Name() != names[i] || !l.Token().Exclusive() || l.Err() != nil {
				t.Errorf("lease %d is of %q with token %v: %v", i, l.Name(), l.Token(), l.Err())
			}
		}
		_, err = rival.TryAcquireAll(t.Context(), []string{"x", "b"})
		wantErr(t, err, fencelock.ErrHeld)
		release(t, mustAcquire(t, rival, "x"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = rival.AcquireAll(ctx, []string{"x", "b"})
		wantErr(t, err, context.DeadlineExceeded)
		_, err = rival.AcquireAll(t.Context(), []string{"x", "b"}, fencelock.WaitAtMost(time.Second))
		wantErr(t, err, fencelock.ErrHeld)
		time.Sleep(time.Second) // retries the release that failed with the ended context
		release(t, mustAcquire(t, rival, "x"))
		time.Sleep(10 * fencelock.DefaultTTL)
		if err := all.Err(); err != nil {
			t.Errorf("after ten TTLs: %v", err)
		}
		if err := all.Release(t.Context()); err != nil {
			t.Error(err)
		}
		wantErr(t, all.Release(t.Context()), fencelock.ErrNotHeld)
		if n := b.store.Names(); n != 0 {
			t.Errorf("%d names are left", n)
		}
	})
}

func TestAcquireAllWaitsForTheLastOfItsNames(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed, client func() *fencelock.Client) {
		c, other := client(), client()
		held := mustAcquire(t, other, "b")
		got := make(chan fencelock.Leases)
		go func() {
			all, err := c.AcquireAll(t.Context(), []string{"a", "b"})
			if err != nil {
				t.Error(err)
			}
			got <- all
		}()
		time.Sleep(10 * fencelock.DefaultTTL)
		select {
		case <-got:
			t.Fatal("acquired beside a holder")
		default:
		}
		release(t, held)
		all := <-got
		ctx := all.Context()
		b.store.Evict("a")
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), fencelock.ErrLost) || !errors.Is(all.Err(), fencelock.ErrLost) {
			t.Errorf("after the loss of one: %v, %v", context.Cause(ctx), all.Err())
		}
		wantErr(t, all.Release(t.Context()), fencelock.ErrLost)
	})
}

func TestDoAllRunsUnderAllOfThem(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed, client func() *fencelock.Client) {
		c := client()
		err := c.DoAll(t.Context(), []string{"a", "b"}, func(ctx context.Context, leases fencelock.Leases) error {
			for _, l := range leases {
				again, err := c.Acquire(ctx, l.Name(), fencelock.Reentrant())
				if err != nil {
					return err
				}
				if again.Token() != l.Token() {
					return fmt.Errorf("%q has token %v again, after %v", l.Name(), again.Token(), l.Token())
				}
				if err := again.Release(ctx); err != nil {
					return err
				}
			}
			want := fencing.Set{leases[0].Claim("a"), leases[1].Claim("b")}
			if claims := leases.Claims(); !slices.Equal(claims, want) || !claims[0].Token.Exclusive() {
				return fmt.Errorf("the claims are %v, want %v", claims, want)
			}
			b.store.Evict("a")
			<-ctx.Done()
			return context.Cause(ctx)
		})
		wantErr(t, err, fencelock.ErrLost)
		if n := b.store.Names(); n != 0 {
			t.Errorf("%d names are left", n)
		}
	})
}

// Whatever the order of the names, contenders for overlapping sets neither deadlock nor overlap.
func TestAcquireAllNeverDeadlocksAmongItself(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed, client func() *fencelock.Client) {
		names := []string{"a", "b", "c", "d", "e"}
		var mu sync.Mutex
		held := map[string]int{}
		count := func(some []string, n int) {
			mu.Lock()
			defer mu.Unlock()
			for _, name := range some {
				if held[name] += n; held[name] > 1 {
					t.Errorf("%q is held twice", name)
				}
			}
		}
		var all sync.WaitGroup
		for range 8 {
			c := client()
			all.Go(func() {
				for range 20 {
					some := append([]string(nil), names...)
					rand.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
					some = some[:2+rand.IntN(3)]
					err := c.DoAll(t.Context(), some, func(context.Context, fencelock.Leases) error {
						count(some, 1)
						time.Sleep(time.Millisecond)
						count(some, -1)
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
	})
}

func TestBadSetsOfNames(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed, client func() *fencelock.Client) {
		c := client()
		for what, try := range map[string]func() error{
			"no name": func() error { _, err := c.AcquireAll(t.Context(), nil); return err },
			"twice":   func() error { _, err := c.AcquireAll(t.Context(), []string{"a", "b", "a"}); return err },
			"request id": func() error {
				_, err := c.AcquireAll(t.Context(), []string{"a", "b"}, fencelock.RequestID(backend.NewRequestID()))
				return err
			},
			"reentrant": func() error {
				_, err := c.AcquireAll(t.Context(), []string{"a", "b"}, fencelock.Reentrant())
				return err
			},
			"no function": func() error { return c.DoAll(t.Context(), []string{"a", "b"}, nil) },
		} {
			if err := try(); !errors.Is(err, fencelock.ErrInvalidOption) {
				t.Errorf("%s: %v, want ErrInvalidOption", what, err)
			}
		}
		_, err := c.AcquireAll(t.Context(), []string{"a", "b\x00"})
		wantErr(t, err, fencelock.ErrInvalidName)
		many := strings.Split(strings.Repeat("x", 10), "")
		for i := range many {
			many[i] = fmt.Sprint("n", i)
		}
		_, err = c.TryAcquireAll(t.Context(), append(many, "n0"))
		if err == nil || !strings.Contains(err.Error(), "n0, n1 and 9 more") {
			t.Errorf("the error %v does not name the call", err)
		}
	})
}

// A client that is closed or cut off while it waits for several names leaves no name closed.
func TestAcquireAllEndsWithItsClient(t *testing.T) {
	eachWay(t, func(t *testing.T, b *bed, client func() *fencelock.Client) {
		c, other := client(), client()
		held := mustAcquire(t, other, "b")
		done := make(chan error)
		go func() {
			_, err := c.AcquireAll(t.Context(), []string{"a", "b"})
			done <- err
		}()
		synctest.Wait()
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		wantErr(t, <-done, fencelock.ErrClosed)
		release(t, held)
		release(t, mustAcquire(t, other, "a"), mustAcquire(t, other, "b"))
	})
}

func (d lone) IssuesFencingTokens() backend.Driver { return d }
