package check

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/fencing"
)

// world is one lock service and its clients in simulated time, all of them broken in the same way.
type world struct {
	t       *testing.T
	store   *memory.Store
	r       *Recorder
	ttl     time.Duration
	clients []*client

	work sync.WaitGroup // goroutines started with world.go

	mu      sync.Mutex // protects the following fields, which are for faults of the service
	last    fencing.Token
	holders map[string]string
	keys    map[string]string // of holds, by what is shown of them
	heard   chan struct{}
}

// client is a client that records its calls.
type client struct {
	*Locker
	broken *broken
	core   *fencelock.Client
}

func (c *client) link() *memory.Network { return c.broken.Network() }

// broken is the in-process driver with some methods replaced.
type broken struct {
	*memory.Driver
	world *world

	acquire func(context.Context, backend.Request) (backend.Grant, error)
	renew   func(context.Context, []backend.Grant) []backend.Renewal
	release func(context.Context, backend.Grant) error
	holder  func(context.Context, string) (backend.State, error)
}

func (b *broken) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	b.world.mu.Lock()
	b.world.keys[r.HoldID] = r.RequestID
	b.world.mu.Unlock()
	if b.acquire != nil {
		return b.acquire(ctx, r)
	}
	return b.Driver.Acquire(ctx, r)
}

func (b *broken) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	if b.renew != nil {
		return b.renew(ctx, grants)
	}
	return b.Driver.Renew(ctx, grants)
}

func (b *broken) Release(ctx context.Context, g backend.Grant) error {
	if b.release != nil {
		return b.release(ctx, g)
	}
	return b.Driver.Release(ctx, g)
}

func (b *broken) Look(ctx context.Context, name string) (backend.State, error) {
	if b.holder != nil {
		return b.holder(ctx, name)
	}
	return b.Driver.Look(ctx, name)
}

// latency is the delay of every message.
const latency = time.Millisecond

// simulate plays with n clients of a service that is broken in the given way, nil for a correct service, and returns
// the history.
func simulate(t *testing.T, n int, apply func(*broken), play func(*world)) History {
	t.Helper()
	var h History
	synctest.Test(t, func(t *testing.T) {
		clock := backend.GoClock()
		w := &world{
			t: t, store: memory.NewStore(&memory.Options{Clock: clock}), ttl: 2 * time.Second,
			r: NewRecorder(Options{Clock: clock}), holders: map[string]string{},
			keys: map[string]string{}, heard: make(chan struct{}),
		}
		for i := range n {
			b := &broken{Driver: w.store.Driver(), world: w}
			b.Network().Delay(memory.Both, latency)
			if apply != nil {
				apply(b)
			}
			core, err := fencelock.ForCorrectness(b, &fencelock.Options{TTL: w.ttl})
			if err != nil {
				t.Fatal(err)
			}
			w.clients = append(w.clients, &client{Locker: w.r.Wrap(fmt.Sprint("c", i), core), broken: b, core: core})
		}
		play(w)
		w.work.Wait()
		h = w.r.History() // before Close, which ends remaining holds
		for _, c := range w.clients {
			w.heal(c)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			_ = c.core.Close(ctx)
			_ = c.broken.Close(ctx)
			cancel()
		}
	})
	return h
}

// heal ends the faults of a client's link.
func (w *world) heal(c *client) {
	c.link().Pass()
	c.link().Delay(memory.Both, latency)
}

// acquire waits for name, for at most d. Then some time passes, since events at the same instant are concurrent.
func (c *client) acquire(name string, d time.Duration, opts ...fencelock.AcquireOption) (*Held, error) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	h, err := c.Acquire(ctx, name, opts...)
	time.Sleep(latency)
	return h, err
}

// must is acquire, but an error ends the play.
func (c *client) must(w *world, name string, opts ...fencelock.AcquireOption) *Held {
	h, err := c.acquire(name, time.Minute, opts...)
	if err != nil {
		panic(err) // under synctest, where FailNow would leave other goroutines running
	}
	return h
}

func release(h *Held, d time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return h.Release(ctx)
}

// force ends the hold of name by force.
func (w *world) force(name string) {
	call := w.r.Begin(context.Background(), "admin", OpForce, name)
	w.store.Evict(name)
	call.Return(OK, nil)
}

// ask inspects name and records the answer.
func (w *world) ask(c *client, name string) {
	call := w.r.Begin(context.Background(), c.client, OpAsk, name)
	info, err := c.broken.Look(context.Background(), name)
	if err != nil {
		call.Return(Unknown, err)
		return
	}
	var seen []fencing.Token
	for _, h := range info.Holders {
		seen = append(seen, h.Token)
	}
	call.Saw(seen)
}

func now() backend.Instant { return backend.GoClock().Now() }

// getThenSet checks and acquires in two steps.
func getThenSet(b *broken) {
	w := b.world
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		for ctx.Err() == nil {
			w.mu.Lock()
			holder := w.holders[r.Name]
			w.mu.Unlock()
			if holder == "" {
				g := r.Grant()
				g.SentAt = now()
				time.Sleep(latency)
				w.mu.Lock()
				w.holders[r.Name] = r.RequestID
				w.last++
				g.Token = w.last
				w.mu.Unlock()
				return g, nil
			}
			if !r.Wait {
				return backend.Grant{}, &backend.HeldError{Name: r.Name}
			}
			time.Sleep(10 * latency)
		}
		return backend.Grant{}, ctx.Err()
	}
	b.renew = func(_ context.Context, grants []backend.Grant) []backend.Renewal {
		return confirmed(grants)
	}
	b.release = func(_ context.Context, g backend.Grant) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.holders[g.Name] != g.RequestID {
			return backend.ErrNotHeld
		}
		delete(w.holders, g.Name)
		return nil
	}
}

// confirmed returns renewals without asking the service.
func confirmed(grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	for i, g := range grants {
		out[i] = backend.Renewal{SentAt: now(), TTL: g.TTL}
	}
	return out
}

// madeUp returns a grant that is unknown to the service.
func (w *world) madeUp(r backend.Request) backend.Grant {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last++
	g := r.Grant()
	g.SentAt, g.Token = now(), 1000+w.last
	return g
}

// byName releases a name, whichever client holds it.
func (b *broken) byName(ctx context.Context, g backend.Grant) error {
	info, err := b.Driver.Look(ctx, g.Name)
	if err != nil || !info.Held {
		return b.Driver.Release(ctx, g)
	}
	b.world.mu.Lock()
	key := b.world.keys[info.Holders[0].HoldID]
	b.world.mu.Unlock()
	return b.Driver.Release(ctx, backend.Request{Name: g.Name, RequestID: key}.Grant())
}

// pushOnly makes waiters rely on one broadcast, which is lost if the link is broken.
func pushOnly(b *broken) {
	w := b.world
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		wait := r.Wait
		r.Wait = false
		for {
			w.mu.Lock()
			heard := w.heard
			w.mu.Unlock()
			g, err := b.Driver.Acquire(ctx, r)
			if !wait || !errors.Is(err, backend.ErrHeld) {
				return g, err
			}
			for delivered := false; !delivered; {
				select {
				case <-heard:
					probe, cancel := context.WithTimeout(ctx, 10*latency)
					delivered = b.Ping(probe) == nil // the message comes over the same link
					cancel()
					w.mu.Lock()
					heard = w.heard
					w.mu.Unlock()
				case <-ctx.Done():
					return g, &backend.CallError{Driver: "memory", Call: "acquire", Name: r.Name, Err: ctx.Err()}
				}
			}
		}
	}
	b.release = func(ctx context.Context, g backend.Grant) error {
		err := b.Driver.Release(ctx, g)
		w.mu.Lock()
		defer w.mu.Unlock()
		close(w.heard)
		w.heard = make(chan struct{})
		return err
	}
}

// renumber replaces each token by number of it; calls to the store use the original token, from the incarnation.
func (b *broken) renumber(number func(real fencing.Token) fencing.Token) {
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		g, err := b.Driver.Acquire(ctx, r)
		if err == nil {
			g.Token = number(g.Token)
		}
		return g, err
	}
	b.restore()
}

func (b *broken) restore() {
	original := func(g backend.Grant) backend.Grant {
		if token, err := fencing.ParseToken(g.Incarnation); err == nil {
			g.Token = token
		}
		return g
	}
	b.release = func(ctx context.Context, g backend.Grant) error { return b.Driver.Release(ctx, original(g)) }
	b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
		restored := make([]backend.Grant, len(grants))
		for i, g := range grants {
			restored[i] = original(g)
		}
		return b.Driver.Renew(ctx, restored)
	}
}

func (b *broken) IssuesFencingTokens() backend.Driver { return b }
