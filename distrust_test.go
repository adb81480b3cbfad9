package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// claims are changes to a grant or a renewal that the contract forbids.
var claims = map[string]func(sent *backend.Instant, ttl *time.Duration){
	"sent in the future":      func(sent *backend.Instant, _ *time.Duration) { *sent = sent.Add(time.Hour) },
	"a TTL that nobody asked": func(_ *backend.Instant, ttl *time.Duration) { *ttl += 365 * 24 * time.Hour },
}

// An impossible grant of a driver is refused: the acquire fails, names the driver and leaves no hold.
func TestOverstatedGrantIsRefused(t *testing.T) {
	for what, overstate := range claims {
		t.Run(what, func(t *testing.T) {
			simulate(t, func(t *testing.T, b *bed) {
				s := &scripted{Driver: b.store.Driver()}
				c := b.over(s, fencelock.Options{})
				s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
					g, err := s.Driver.Acquire(ctx, r)
					overstate(&g.SentAt, &g.TTL)
					return g, err
				}
				_, err := c.Acquire(t.Context(), "x")
				wantContract(t, err)
				if n := b.store.Names(); n != 0 {
					t.Errorf("%d names are in use", n)
				}
			})
		})
	}
}

// A renewal that claims too much is a fault of the driver: the lease ends at the proved deadline.
func TestOverstatedRenewalIsIgnored(t *testing.T) {
	for what, overstate := range claims {
		t.Run(what, func(t *testing.T) {
			simulate(t, func(t *testing.T, b *bed) {
				s := &scripted{Driver: b.store.Driver()}
				c := b.over(s, fencelock.Options{})
				s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
					out := s.Driver.Renew(ctx, grants)
					for i := range out {
						overstate(&out[i].SentAt, &out[i].TTL)
					}
					return out
				}
				lease := mustAcquire(t, c, "x")
				if time.Sleep(fencelock.DefaultTTL); lease.Err() == nil {
					t.Errorf("held for another %v after a TTL in which nothing was proved", time.Until(lease.Deadline()))
				}
				wantContract(t, lease.Err())
			})
		})
	}
}

// wantContract fails unless err is a *ContractError that names the driver.
func wantContract(t *testing.T, err error) {
	t.Helper()
	if broken := (*fencelock.ContractError)(nil); !errors.As(err, &broken) || broken.Driver != "memory" {
		t.Errorf("got error %v, want a *ContractError of driver memory", err)
	}
}

// A loss without a reason counts as a loss, before the grant and after it.
func TestALossWithoutAReasonIsALoss(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		c := b.over(s, fencelock.Options{})
		var lost func(backend.Loss)
		before := true
		s.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			lost = r.Lost
			g, err := s.Driver.Acquire(ctx, r)
			if before {
				lost(backend.Loss{})
			}
			return g, err
		}
		_, err := c.TryAcquire(t.Context(), "x")
		wantErr(t, err, fencelock.ErrLost)
		wantContract(t, err)
		before = false
		lease := mustAcquire(t, c, "x")
		lost(backend.Loss{})
		wantErr(t, lease.Err(), fencelock.ErrLost)
		wantContract(t, lease.Err())
		_ = s.Driver.Release(t.Context(), lease.Grant())
	})
}

// An observer that ends its goroutine, as t.FailNow does, ends neither the program nor the events.
func TestAnObserverMayEndItsGoroutine(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		seen, shed := 0, 0
		c, _ := b.client(fencelock.Options{Observer: fencelock.ObserverFunc(
			func(_ context.Context, e fencelock.Event) {
				if e.Type == fencelock.EventShed {
					shed += e.Count
				} else {
					seen++
				}
				runtime.Goexit()
			},
		)})
		for range 100 {
			release(t, mustAcquire(t, c, "x"))
		}
		if delivered(); seen != 200 || shed != 200 {
			t.Errorf("%d of 200 events were delivered, and %d counted as dropped", seen, shed)
		}
	})
}

// An option copies its metadata, and the bound applies to all options of one acquire together.
func TestMetadataIsCopiedAndBounded(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		c, _ := b.client(fencelock.Options{})
		m := map[string]string{"a": "1"}
		opt := fencelock.Metadata(m)
		m["b"] = "2"
		lease := mustAcquire(t, c, "x", opt, fencelock.Metadata(map[string]string{"c": "3"}))
		state, err := c.Look(t.Context(), "x")
		if err != nil || fmt.Sprint(state.Holders[0].Metadata) != "map[a:1 c:3]" {
			t.Errorf("metadata %v, %v", state.Holders, err)
		}
		release(t, lease)
		half := func(key string) fencelock.AcquireOption {
			return fencelock.Metadata(map[string]string{key: strings.Repeat("v", fencelock.MaxMetadataBytes/2)})
		}
		_, err = c.Acquire(t.Context(), "x", half("a"), half("b"))
		wantErr(t, err, fencelock.ErrInvalidOption)
	})
}

// StopEarly must leave enough of a lease for renewals that do not flood the service; the error of a wrong TTL names
// the TTL.
func TestStopEarlyLeavesATenth(t *testing.T) {
	for early, want := range map[time.Duration]error{
		26 * time.Second: nil, 27 * time.Second: fencelock.ErrInvalidTTL, 30 * time.Second: fencelock.ErrInvalidTTL,
	} {
		_, err := fencelock.ForEfficiency(memory.New(nil), &fencelock.Options{StopEarly: early})
		if !errors.Is(err, want) {
			t.Errorf("StopEarly of %v of 30s: %v, want %v", early, err, want)
		}
	}
	_, err := fencelock.ForEfficiency(memory.New(nil), &fencelock.Options{TTL: -5 * time.Second, LockDelay: 30 * time.Second})
	wantErr(t, err, fencelock.ErrInvalidTTL)
	if err != nil && strings.Contains(err.Error(), "StopEarly") {
		t.Errorf("a negative TTL: %v", err)
	}
}

// An Extend that the service cannot answer does not affect the lease, during its wait and afterwards. Two calls of
// Extend get their own answers.
func TestFailedExtendKeepsTheLease(t *testing.T) {
	for what, answer := range map[string]func(context.Context) error{
		"an error":  func(context.Context) error { return errors.New("unclassified") },
		"no answer": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	} {
		t.Run(what, func(t *testing.T) {
			simulate(t, func(t *testing.T, b *bed) {
				s := &scripted{Driver: b.store.Driver()}
				c := b.over(s, fencelock.Options{})
				s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
					if grants[0].TTL > time.Minute {
						return []backend.Renewal{{Err: answer(ctx)}}
					}
					return s.Driver.Renew(ctx, grants)
				}
				lease := mustAcquire(t, c, "x")
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
				defer cancel()
				wantErr(t, lease.Extend(ctx, time.Hour), context.DeadlineExceeded)
				if err := lease.Err(); err != nil {
					t.Errorf("while an Extend waited: %v", err)
				}
				time.Sleep(5 * time.Minute)
				if err := lease.Err(); err != nil {
					t.Errorf("five minutes after an Extend that failed: %v", err)
				}
				release(t, lease)
			})
		})
	}
}

func TestEachExtendGetsItsOwnAnswer(t *testing.T) {
	simulate(t, func(t *testing.T, b *bed) {
		s := &scripted{Driver: b.store.Driver()}
		c := b.over(s, fencelock.Options{})
		s.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			time.Sleep(time.Second)
			if grants[0].TTL > 2*time.Minute {
				return []backend.Renewal{{Err: backend.ErrInvalidTTL}}
			}
			return s.Driver.Renew(ctx, grants)
		}
		lease := mustAcquire(t, c, "x")
		short := make(chan error, 1)
		go func() { short <- lease.Extend(t.Context(), 2*time.Minute) }()
		synctest.Wait()
		wantErr(t, lease.Extend(t.Context(), time.Hour), fencelock.ErrInvalidTTL)
		if err := <-short; err != nil {
			t.Errorf("the one that the service confirmed: %v", err)
		}
		if left := time.Until(lease.Deadline()); left < 90*time.Second || left > 2*time.Minute {
			t.Errorf("%v are left, want about two minutes", left)
		}
		release(t, lease)
	})
}

// The memory of a set of names is linear in the names, and that of nested contexts is linear in their number.
func TestSetsAndChainsCostLinearMemory(t *testing.T) {
	c := opened(t, &instant{}, fencelock.Options{TTL: time.Hour})
	defer c.Close(t.Context())
	const n = 10_000
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprint("name-", i)
	}
	var all fencelock.Leases
	each := grown(func() {
		var err error
		if all, err = c.AcquireAll(t.Context(), names); err != nil {
			t.Fatal(err)
		}
		all.Context()
	}) / n
	t.Logf("a set of %d names keeps %d bytes for each", n, each)
	if each > 1200 {
		t.Error("that is too much")
	}
	joint := grown(func() {
		for range 1000 { // alternate two sets with the same last lease
			fencelock.Leases{all[0], all[n-1]}.Context()
			fencelock.Leases{all[1], all[n-1]}.Context()
		}
	})
	if joint > 100_000 {
		t.Errorf("2,000 questions for two contexts keep %d bytes", joint)
	}
	if err := all.Release(t.Context()); err != nil {
		t.Error(err)
	}
	// Lock coupling with a time-out for each step.
	var last *fencelock.Lease
	chain := grown(func() {
		ctx := t.Context()
		for i := range n {
			bounded, cancel := context.WithTimeout(ctx, time.Hour)
			next, err := c.Acquire(bounded, fmt.Sprint("step-", i%2))
			cancel()
			if err != nil {
				t.Fatal(err)
			}
			if last != nil {
				release(t, last)
			}
			last, ctx = next, next.Context()
		}
	}) / n
	if chain > 100 {
		t.Errorf("%d bytes are kept for each of %d steps with one lease held", chain, n)
	}
	release(t, last)
}
