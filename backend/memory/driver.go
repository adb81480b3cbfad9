package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Options are the settings of New. The zero value, or nil, means defaults.
type Options struct {
	// Clock of the store and the driver. See StoreOptions.Clock.
	Clock backend.Clock
}

// New returns a driver with a store of its own, reached by Driver.Store.
func New(o *Options) *Driver { return NewStore((*StoreOptions)(o)).Driver() }

// Driver is one client of a Store. It implements backend.FencingDriver, Inspector, Lister, Watcher, ForceReleaser,
// MultiAcquirer and Pinger.
type Driver struct {
	store *Store
	net   Network
	space string // the store's, as the driver found it
	gate  *kit.Gate
}

const (
	minTTL = 100 * time.Millisecond
	maxTTL = 365 * 24 * time.Hour
)

// Store returns the server that the driver talks to.
func (d *Driver) Store() *Store { return d.store }

// Network returns what lies between the driver and its store, in order to break it.
func (d *Driver) Network() *Network { return &d.net }

// IssuesFencingTokens promises what backend.FencingDriver says: the store's one counter only grows, within a token
// space.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// Describe tells what the driver can do. The bounds of TTLs are 100 ms and a year, in steps of a nanosecond.
func (d *Driver) Describe() backend.Description {
	return backend.Description{
		Name: "memory",
		Capabilities: backend.CapFencing | backend.CapFair | backend.CapMinHold | backend.CapMetadata |
			backend.CapPushLoss | backend.CapInspect | backend.CapList | backend.CapWatch | backend.CapWatchReplay |
			backend.CapForceRelease | backend.CapShared | backend.CapPermits | backend.CapMultiAcquire |
			backend.CapHierarchy | backend.CapDeadlock,
		MinTTL: minTTL, MaxTTL: maxTTL, TTLGranularity: time.Nanosecond,
		TokenSpace: d.space, Clock: d.store.clock, Exclusion: backend.ExclusionInProcess,
	}
}

// Acquire takes a lock, with a token that is higher than all that the store ever issued. With Wait the request stands
// in the name's queue until it is granted or ctx ends. The same RequestID again, from whichever driver, gets the same
// hold. Errors wrap backend.ErrHeld, ErrUnavailable (nothing was sent), ErrUnknown (no answer came), DeadlockError,
// ErrHistoryLost (after Store.Wipe), or ctx's error.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	grants, err := d.acquire(ctx, []backend.Request{r}, kit.Validate(d.Describe(), r))
	if err != nil {
		return backend.Grant{}, callError("acquire", r.Name, err)
	}
	return grants[0], nil
}

// AcquireAll takes any set of distinct names in one step, or none. It waits in the queues of all of them at once.
func (d *Driver) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	rs = slices.Clone(rs) // the store keeps those that wait
	grants, err := d.acquire(ctx, rs, kit.ValidateSet(d.Describe(), rs))
	if err != nil {
		name := ""
		if len(rs) > 0 {
			name = rs[0].Name
		}
		return nil, callError("acquire", name, err)
	}
	return grants, nil
}

// acquire asks for rs until it has a final answer. It asks again, with the same request ids, when the store has rung
// for a waiter, when an answer was lost, and now and then, since the bell may get lost too. So a grant always counts
// from a request of just now, however long the wait was.
func (d *Driver) acquire(ctx context.Context, rs []backend.Request, invalid error) ([]backend.Grant, error) {
	if err := cmp.Or(d.alive(ctx), invalid); err != nil {
		return nil, err
	}
	if err := d.gate.Enter(); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	var (
		bell  chan struct{}
		ring  func()
		limit time.Duration // an answer that takes longer is asked for again, before the place in the queue ends
	)
	wait, ttl := rs[0].Wait, rs[0].TTL
	if wait {
		bell, ring = d.bell()
		limit = ttl * 2 / 3
	}
	ambiguous := false // a request left that may have done something
	for first := true; ; first = false {
		conn := d.net.connection()
		// A message may be delivered late: it has variables of its own.
		var grants []backend.Grant
		var refused error
		sent, err := d.call(ctx, limit, func(now backend.Instant) {
			grants, refused = d.store.acquire(now, d, rs, ring)
		})
		switch {
		case err == nil && refused != nil:
			return nil, refused
		case err == nil && grants != nil:
			for i := range grants {
				grants[i].SentAt = sent
			}
			return grants, nil
		}
		lost := errors.Is(err, backend.ErrUnknown)
		ambiguous = ambiguous || lost || err == nil
		end := d.alive(ctx)
		switch {
		case end != nil || lost:
		case err != nil && (first || !wait):
			end = err
		default: // it waits, or the server is down
			end = d.rest(ctx, conn, bell, min(ttl/3, time.Second))
		}
		if end != nil {
			return nil, d.giveUp(rs, end, ambiguous)
		}
	}
}

// giveUp ends an acquire with err. A waiter takes itself out of the queue, and gives back what it was granted
// meanwhile; what cannot be confirmed is unknown.
func (d *Driver) giveUp(rs []backend.Request, err error, ambiguous bool) error {
	if !ambiguous {
		return err
	}
	if rs[0].Wait {
		done, _ := d.send(func(now backend.Instant) {
			for i := range rs {
				_ = d.store.release(now, d, rs[i].Grant())
			}
		})
		select {
		case failed := <-done:
			if failed == nil {
				return err
			}
		default: // the message is under way
		}
	}
	if errors.Is(err, backend.ErrUnavailable) {
		// Only the last attempt left nothing behind, so this cause stays out of the chain.
		return fmt.Errorf("%w: %v", backend.ErrUnknown, err)
	}
	return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
}

// Renew prolongs any number of grants in one message, and answers for each of them, in order. A hold that is gone is a
// backend.NotHeldError with the reason, as long as the store remembers it, and is never made again.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	if len(grants) == 0 {
		return out
	}
	// A message may be delivered after the caller gave up and used its slice for something else.
	late, errs := slices.Clone(grants), make([]error, len(grants))
	sent, err := d.call(ctx, 0, func(now backend.Instant) {
		for i := range late {
			errs[i] = d.store.renew(now, d, late[i])
		}
	})
	for i := range grants {
		each := err
		if each == nil {
			each = errs[i]
		}
		if out[i].Err = callError("renew", grants[i].Name, each); each == nil {
			out[i] = backend.Renewal{SentAt: sent, TTL: grants[i].TTL}
		}
	}
	return out
}

// Release gives a hold back if it still is the one that was granted. With a grant that Request.Grant made it removes
// whatever that request has, its hold or its place in the queue. What is not held is backend.ErrNotHeld.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return callError("release", g.Name, d.try(ctx, func(now backend.Instant) error {
		return d.store.release(now, d, g)
	}))
}

// Ping makes sure that the store answers.
func (d *Driver) Ping(ctx context.Context) error {
	return callError("ping", "", d.try(ctx, func(backend.Instant) error { return nil }))
}

// Close ends waiters with backend.ErrClosed, and returns once every one of them is out of its queue, or when ctx ends.
// Holds stay until they expire. Close may be called again.
func (d *Driver) Close(ctx context.Context) error {
	d.gate.Close()
	err := d.gate.Wait(ctx)
	d.store.mu.Lock()
	d.store.drivers = slices.DeleteFunc(d.store.drivers, func(other *Driver) bool { return other == d })
	d.store.mu.Unlock()
	return err
}

// alive refuses calls that must not reach the store.
func (d *Driver) alive(ctx context.Context) error {
	if d.gate.Closed() {
		return backend.ErrClosed
	}
	return ctx.Err()
}

// try runs op at one moment of the store and returns its error. What op writes may be read only if that is nil.
func (d *Driver) try(ctx context.Context, op func(now backend.Instant) error) error {
	var failed error
	_, err := d.call(ctx, 0, func(now backend.Instant) { failed = op(now) })
	if err == nil {
		err = failed
	}
	return err
}

// call runs op at one moment of the store, and returns the instant before. What op writes may be read only if the error
// is nil. Unless it is 0, the limit is how long to wait for the answer.
func (d *Driver) call(ctx context.Context, limit time.Duration, op func(now backend.Instant)) (backend.Instant, error) {
	if err := d.alive(ctx); err != nil {
		return 0, err
	}
	sent := d.store.clock.Now()
	done, conn := d.send(op)
	select {
	case err := <-done: // as almost always
		return sent, err
	default:
	}
	var late <-chan time.Time
	if limit > 0 {
		late = time.After(limit)
	}
	select {
	case err := <-done:
		return sent, err
	case <-conn:
		return 0, fmt.Errorf("%w: connection reset", backend.ErrUnknown)
	case <-late:
		return 0, fmt.Errorf("%w: no answer in %v", backend.ErrUnknown, limit)
	case <-ctx.Done():
		return 0, fmt.Errorf("%w: %w", backend.ErrUnknown, ctx.Err())
	case <-d.gate.Closing().Done():
		return 0, backend.ErrClosed
	}
}

// send sends op to the store. The answer comes on done, or none will if the connection breaks.
func (d *Driver) send(op func(now backend.Instant)) (done chan error, conn <-chan struct{}) {
	done = make(chan error, 1)
	reply := func(err error) { d.net.send(replies, func() { done <- err }) }
	conn, connected := d.net.request(func() { d.store.handle(op, reply) })
	if !connected {
		done <- backend.ErrUnavailable
	}
	return done, conn
}

// bell returns a channel, and a function with which the store says through the network that there is something to ask.
func (d *Driver) bell() (chan struct{}, func()) {
	bell := make(chan struct{}, 1)
	return bell, func() {
		d.net.send(replies, func() {
			select {
			case bell <- struct{}{}:
			default:
			}
		})
	}
}

// rest waits until it is time to ask the store again: at the bell, when the connection has broken, and after a while.
func (d *Driver) rest(ctx context.Context, conn, bell <-chan struct{}, after time.Duration) error {
	select {
	case <-bell:
	case <-conn:
	case <-time.After(after):
	case <-ctx.Done():
		return ctx.Err()
	case <-d.gate.Closing().Done():
		return backend.ErrClosed
	}
	return nil
}

func callError(call, name string, err error) error {
	if err == nil {
		return nil
	}
	return &backend.CallError{Driver: "memory", Call: call, Name: name, Err: err}
}
