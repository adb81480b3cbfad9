package memory

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// New returns a driver with its own store, reached by Driver.Store. Drivers that contend need a common store: make
// it with NewStore.
func New(o *Options) *Driver { return NewStore(o).Driver() }

// Driver is one client of a Store. It implements backend.FencingDriver, Inspector, Lister, Watcher, ForceReleaser,
// MultiAcquirer and Pinger. Store.Driver makes one; the zero value is not usable. All methods are safe for concurrent
// use.
//
// It has no goroutines and timers except for its calls, so a driver that is never closed costs memory only.
type Driver struct {
	*engine.Driver
	client *client
}

// Store returns the server that the driver talks to.
func (d *Driver) Store() *Store { return d.client.store }

// Network returns the network between the driver and its store, in order to break it.
func (d *Driver) Network() *Network { return &d.client.net }

// IssuesFencingTokens makes the promise of backend.FencingDriver: the store's one counter only grows, within a token
// space. After Store.Wipe it restarts in another token space, and drivers from before are refused.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// The bounds of a TTL. maxTTL is also that of the machine's own two sessions, which never expire by time.
const (
	minTTL = 100 * time.Millisecond
	maxTTL = 365 * 24 * time.Hour
)

// client is the binding of the engine: each step is a function that the store runs at one moment, sent through the
// client's network.
//
// The function may run long after its caller has left, so it writes only to variables of its exchange, which the
// caller reads only after the answer has come.
type client struct {
	store *Store
	net   Network
	// space is the token space of the store when the client was made. If it differs from the store's, the store was
	// wiped. The client never takes over the new one, since it may hold locks of the old.
	space string
	push  func(engine.Push)
}

// Driver returns one more client of the store. The caller closes it.
//
// An unclosed driver costs memory for as long as the store lives. It is bound to the store as it is now: after
// Wipe it is refused, and another one has to be made.
func (s *Store) Driver() *Driver {
	s.mu.Lock()
	c := &client{store: s, space: s.space}
	s.mu.Unlock()
	c.net.conn = make(chan struct{})
	d := &Driver{Driver: engine.New(c), client: c}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients = append(s.clients, c) // after engine.New, so that it can be notified
	return d
}

func (c *client) Describe() backend.Description {
	return backend.Description{
		Name: "memory",
		Capabilities: backend.CapFencing | backend.CapFair | backend.CapMinHold | backend.CapMetadata |
			backend.CapPushLoss | backend.CapInspect | backend.CapList | backend.CapWatch | backend.CapWatchReplay |
			backend.CapForceRelease | backend.CapShared | backend.CapPermits | backend.CapMultiAcquire |
			backend.CapHierarchy | backend.CapDeadlock,
		MinTTL: minTTL, MaxTTL: maxTTL, TTLGranularity: time.Nanosecond,
		TokenSpace: c.space, Clock: c.store.clock, Exclusion: backend.ExclusionInProcess,
		Shows: backend.Shows{
			Look:       backend.StateFields{Since: true, ExpiresIn: true, Limit: true, Waiters: true, Queue: true, QueueSince: true},
			List:       backend.StateFields{Since: true, ExpiresIn: true, Limit: true, Waiters: true},
			RetryAfter: true, ChangeTime: true, ChangeAuthor: true,
		},
	}
}

// Classify is not asked: every error of a step is classified already.
func (c *client) Classify(error) engine.Class { return engine.Unknown }

// Chance returns the random numbers by which the engine spreads repetitions.
func (c *client) Chance() float64 { return c.store.chance() }

// Prompt is engine.Prompt's.
func (c *client) Prompt() {}

// Listen has the client notified through its network, which may delay or lose that as any reply.
func (c *client) Listen(notify func(engine.Push)) {
	c.push = func(p engine.Push) { c.net.send(replies, func() { notify(p) }) }
	c.net.broken = func() { notify(engine.Push{What: engine.PushGap}) }
}

func (c *client) Ping(ctx context.Context) error {
	return c.call(ctx, func(backend.Instant) error { return nil })
}

func (c *client) Enter(ctx context.Context, r engine.Entering) (p engine.Position, err error) {
	all, err := c.EnterSet(ctx, []engine.Entering{r})
	if err == nil {
		p = all[0]
	}
	return p, err
}

func (c *client) EnterSet(ctx context.Context, rs []engine.Entering) ([]engine.Position, error) {
	return ask(ctx, c, func(now backend.Instant) ([]engine.Position, error) {
		if err := c.store.refused(RefuseWrites); err != nil {
			return nil, err
		}
		requests := make([]backend.Request, len(rs))
		for i := range rs {
			requests[i] = rs[i].Request
		}
		return c.store.enter(now, c, requests)
	})
}

func (c *client) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	return ask(ctx, c, func(now backend.Instant) (engine.Left, error) {
		if err := c.store.refused(RefuseReleases); err != nil {
			return engine.Left{}, err
		}
		return c.store.leave(now, c, &l.Grant), nil
	})
}

func (c *client) Extend(ctx context.Context, _ engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	return ask(ctx, c, func(now backend.Instant) ([]engine.Outcome, error) {
		if err := c.store.refused(RefuseWrites); err != nil {
			return nil, err
		}
		out := make([]engine.Outcome, len(holds))
		for i := range holds {
			if h := c.store.find(c, &holds[i].Grant); h != nil {
				c.store.prolong(now, h, holds[i].TTL)
			} else {
				out[i] = engine.Outcome{Gone: true, Loss: c.store.loss(c, &holds[i].Grant)}
			}
		}
		return out, nil
	})
}

// Look returns the state of a name at one moment. Its revision is the one from which Watch follows without a gap.
func (c *client) Look(ctx context.Context, name string) (backend.State, error) {
	return ask(ctx, c, func(now backend.Instant) (backend.State, error) {
		info := c.store.machine.Look(name)
		return c.store.stateOf(now, &info), nil
	})
}

// Names returns all names in one page, sorted by their bytes, as of one moment.
func (c *client) Names(ctx context.Context, prefix, _ string) ([]backend.State, string, error) {
	states, err := ask(ctx, c, func(now backend.Instant) (states []backend.State, _ error) {
		names, _ := c.store.machine.List(prefix, "", math.MaxInt)
		for i := range names {
			states = append(states, c.store.stateOf(now, &names[i]))
		}
		return states, nil
	})
	return states, "", err
}

// Force also ends a minimum hold. Waiters are granted in the same step.
func (c *client) Force(ctx context.Context, r backend.ForceRequest) (int, error) {
	return ask(ctx, c, func(now backend.Instant) (int, error) {
		return c.store.forceRelease(now, &r, backend.ReasonForceReleased), nil
	})
}

// Close drops the client: its connection breaks no more, and its holds stay until they expire.
func (c *client) Close(context.Context) error {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	c.store.clients = slices.DeleteFunc(c.store.clients, func(other *client) bool { return other == c })
	return nil
}

// ask is call for a function with an answer.
func ask[T any](ctx context.Context, c *client, op func(backend.Instant) (T, error)) (T, error) {
	var answer, none T
	if err := c.call(ctx, func(now backend.Instant) (err error) {
		answer, err = op(now)
		return err
	}); err != nil {
		return none, err
	}
	return answer, nil
}

// call runs op at one moment of the store and returns its error. The variables that op writes may be read only if the
// error is nil.
//
//	the answer                  op's error, or backend.ErrUnavailable: no effect
//	the connection broke        ErrUnknown
//	the step has to return      engine.Unanswered: the request has left
func (c *client) call(ctx context.Context, op func(now backend.Instant) error) error {
	conn := c.net.connection()
	if conn == nil {
		return backend.ErrUnavailable
	}
	done := make(chan error, 1)
	reply := func(err error) { c.net.send(replies, func() { done <- err }) }
	c.net.send(requests, func() { c.store.handle(op, reply) })
	err, how := engine.Await(ctx, done, conn)
	switch how {
	case engine.Answered:
		return err
	case engine.Broken:
		return fmt.Errorf("%w: connection reset", backend.ErrUnknown)
	}
	return &engine.Unanswered{Landed: func(ctx context.Context) { _, _ = engine.Await(ctx, done, conn) }}
}
