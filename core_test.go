package fencelock_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// bed is one store and clients of it, in a bubble of simulated time.
type bed struct {
	t     *testing.T
	store *memory.Store
}

// simulate runs f with simulated time. It fails if a goroutine outlives the clients.
func simulate(t *testing.T, f func(t *testing.T, b *bed)) {
	synctest.Test(t, func(t *testing.T) {
		f(t, &bed{t: t, store: memory.NewStore(&memory.Options{Clock: backend.GoClock()})})
	})
}

// client returns another independent client and its driver.
func (b *bed) client(o fencelock.Options) (*fencelock.Client, *memory.Driver) {
	b.t.Helper()
	d := b.store.Driver()
	return b.over(d, o), d
}

// over returns a client of the correctness tier over driver, which is closed at the end of the test.
func (b *bed) over(driver backend.FencingDriver, o fencelock.Options) *fencelock.Client {
	b.t.Helper()
	c, err := fencelock.ForCorrectness(driver, &o)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			b.t.Errorf("close: %v", err)
		}
	})
	return c
}

func mustAcquire(t *testing.T, c *fencelock.Client, name string, opts ...fencelock.AcquireOption) *fencelock.Lease {
	t.Helper()
	l, err := c.Acquire(t.Context(), name, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// wantErr fails the test unless err matches every target.
func wantErr(t *testing.T, err error, targets ...error) {
	t.Helper()
	for _, target := range targets {
		if !errors.Is(err, target) {
			t.Errorf("got error %v, want it to match %v", err, target)
		}
	}
}

// recorder records the events of an observer.
type recorder struct {
	mu     sync.Mutex
	events []fencelock.Event
}

func (r *recorder) Observe(_ context.Context, e fencelock.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

// of returns the events of one type.
func (r *recorder) of(typ fencelock.EventType) []fencelock.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	var some []fencelock.Event
	for _, e := range r.events {
		if e.Type == typ {
			some = append(some, e)
		}
	}
	return some
}

// delivered waits, in simulated time, until observers have all events so far: events are delivered in batches, after a
// moment.
func delivered() {
	time.Sleep(10 * time.Millisecond)
	synctest.Wait()
}

// scripted is a driver whose answers a test can replace.
type scripted struct {
	*memory.Driver
	acquire func(ctx context.Context, r backend.Request) (backend.Grant, error)
	renew   func(ctx context.Context, grants []backend.Grant) []backend.Renewal
	release func(ctx context.Context, g backend.Grant) error
	// describe runs before each description. The core asks for descriptions while it holds locks.
	describe func()
}

func (s *scripted) Describe() backend.Description {
	if s.describe != nil {
		s.describe()
	}
	return s.Driver.Describe()
}

func (s *scripted) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if s.acquire != nil {
		return s.acquire(ctx, r)
	}
	return s.Driver.Acquire(ctx, r)
}

func (s *scripted) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	if s.renew != nil {
		return s.renew(ctx, grants)
	}
	return s.Driver.Renew(ctx, grants)
}

func (s *scripted) Release(ctx context.Context, g backend.Grant) error {
	if s.release != nil {
		return s.release(ctx, g)
	}
	return s.Driver.Release(ctx, g)
}

func (s *scripted) IssuesFencingTokens() backend.Driver { return s }
