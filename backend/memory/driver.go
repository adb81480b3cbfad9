package memory

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Options are the settings of New. The zero value, or nil, means defaults.
type Options struct {
	// Clock of the store and the driver. See StoreOptions.Clock.
	Clock backend.Clock
}

// New returns a driver with a store of its own, reached by Driver.Store.
func New(o *Options) *Driver {
	var so StoreOptions
	if o != nil {
		so.Clock = o.Clock
	}
	return NewStore(&so).Driver()
}

// Driver is one client of a Store. It implements backend.FencingDriver, Inspector, Lister, Watcher, ForceReleaser,
// MultiAcquirer and Pinger.
type Driver struct {
	store *Store
	net   Network
	space string // the store's, as the driver found it

	done    chan struct{} // closed by Close
	waiting sync.WaitGroup

	mu     sync.Mutex // protects the following field
	closed bool
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

// Describe implements backend.Driver.
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

// Acquire implements backend.Driver.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if err := d.admit(ctx, &r); err != nil {
		return backend.Grant{}, callError("acquire", r.Name, err)
	}
	rs := []backend.Request{r}
	var room [1]granted
	grants, sent, err := d.acquire(ctx, rs, room[:0])
	if err != nil {
		return backend.Grant{}, callError("acquire", r.Name, err)
	}
	return grantOf(&rs[0], &grants[0], sent), nil
}

// AcquireAll implements backend.MultiAcquirer, for any set of distinct names. It waits in the queues of all of them at
// once.
func (d *Driver) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	rs = slices.Clone(rs) // the store keeps those that wait
	for i := range rs {
		if err := d.admit(ctx, &rs[i]); err != nil {
			return nil, callError("acquire", rs[i].Name, err)
		}
	}
	if len(rs) == 0 {
		return nil, callError("acquire", "", &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "set of names", Value: "of none", Why: "it is empty",
		})
	}
	grants, sent, err := d.acquire(ctx, rs, nil)
	if err != nil {
		return nil, callError("acquire", rs[0].Name, err)
	}
	out := make([]backend.Grant, len(rs))
	for i := range rs {
		out[i] = grantOf(&rs[i], &grants[i], sent)
	}
	return out, nil
}

// acquire returns what was granted, and the instant from which it counts.
func (d *Driver) acquire(ctx context.Context, rs []backend.Request, room []granted) ([]granted, backend.Instant, error) {
	if !d.net.troubled.Load() {
		// The short way: one look without a place in the queue, which is all that an open name takes.
		d.net.seen[0].Add(1)
		sent := d.store.clock.Now()
		if a, v := d.store.acquire(d, rs, sent, room, nil); v == answered {
			d.net.seen[1].Add(1)
			if a.err == nil || !rs[0].Wait || !errors.Is(a.err, backend.ErrHeld) {
				return a.grants, sent, a.err
			}
		}
	}
	return d.acquireOver(ctx, rs)
}

func (d *Driver) admit(ctx context.Context, r *backend.Request) error {
	if err := d.alive(ctx); err != nil {
		return err
	}
	invalid := func(what, value, why string) error {
		return &backend.InvalidError{Kind: backend.ErrInvalidOption, What: what, Value: value, Why: why}
	}
	switch {
	case r.Kind > backend.KindPermits:
		return fmt.Errorf("%v: %w", r.Kind, backend.ErrUnsupported)
	case r.Kind != backend.KindPermits && (r.Permits != 0 || r.Limit != 0):
		return invalid("permits", fmt.Sprintf("%d of %d", r.Permits, r.Limit), "the kind of hold is "+r.Kind.String())
	case r.Kind == backend.KindPermits && (r.Permits < 1 || r.Limit < r.Permits):
		return invalid("permits", fmt.Sprintf("%d of %d", r.Permits, r.Limit), "want at least one, and no more than there are")
	case r.Kind == backend.KindPermits && r.Hierarchical:
		return fmt.Errorf("permits of a hierarchical name: %w", backend.ErrUnsupported)
	}
	if r.TTL < minTTL || r.TTL > maxTTL {
		return d.Describe().ValidateTTL(r.TTL)
	}
	if r.MinHold < 0 || r.MinHold > maxTTL {
		return invalid("minimum hold", r.MinHold.String(), fmt.Sprintf("want between 0 and %v", maxTTL))
	}
	return nil
}

// alive refuses calls that must not reach the store.
func (d *Driver) alive(ctx context.Context) error {
	select {
	case <-d.done:
		return backend.ErrClosed
	default:
		return ctx.Err()
	}
}

func grantOf(r *backend.Request, a *granted, sent backend.Instant) backend.Grant {
	g := r.Grant()
	g.Token, g.Incarnation, g.TTL, g.SentAt, g.Queued = a.token, a.incarnation, a.ttl, sent, a.queued
	if a.minHold > 0 {
		g.MinHoldUntil = sent.Add(a.minHold)
	}
	return g
}

// delivery is an answer, with the instant before the request that it answers was sent.
type delivery struct {
	answer
	sent backend.Instant
}

// acquireOver asks over the network, again and again with the same request ids where an answer may be lost.
func (d *Driver) acquireOver(ctx context.Context, rs []backend.Request) ([]granted, backend.Instant, error) {
	if !d.enter() {
		return nil, 0, backend.ErrClosed
	}
	defer d.waiting.Done()
	wait, ttl := rs[0].Wait, rs[0].TTL
	box := make(chan delivery, 8)
	ambiguous := false        // a request left and its answer did not come
	var proof backend.Instant // since when a grant that came late is asked for again
	for first := true; ; first = false {
		conn, sent := d.sendAcquire(rs, box)
		if !sent && (first || !wait) {
			return nil, 0, d.giveUp(rs, backend.ErrUnavailable, ambiguous)
		}
		var poll <-chan time.Time
		if wait {
			// The push may get lost, and the place in the queue ends unless it is asked for.
			poll = time.After(d.store.jitter(rs[0].Name, min(ttl/3, time.Second)))
		}
		var end error
		select {
		case x := <-box:
			switch {
			case x.gone:
			case errors.Is(x.err, backend.ErrUnavailable) && wait && !first:
				end = d.pause(ctx, poll)
			case errors.Is(x.err, backend.ErrUnavailable):
				return nil, 0, d.giveUp(rs, x.err, ambiguous)
			case x.err != nil:
				return nil, 0, x.err
			case wait && d.store.clock.Now().Sub(x.sent) > ttl/10 && (proof == 0 || x.sent < proof):
				// Pushed long after it was asked for: ask again, for the whole validity and as proof that the hold
				// is still there. Once: what takes as long again is the network.
				if proof == 0 {
					proof = d.store.clock.Now()
				}
			default:
				return x.grants, x.sent, nil
			}
		case <-conn:
			ambiguous = true
		case <-poll:
			ambiguous = true
		case <-ctx.Done():
		case <-d.done:
		}
		if end == nil {
			end = d.alive(ctx)
		}
		if end != nil {
			return nil, 0, d.giveUp(rs, end, true)
		}
	}
}

// sendAcquire sends rs once. The answers arrive in box, which never blocks the store: an answer that finds it full
// takes the place of the oldest, which proves the least.
func (d *Driver) sendAcquire(rs []backend.Request, box chan delivery) (<-chan struct{}, bool) {
	sent := d.store.clock.Now()
	post := func(a answer) {
		d.net.reply(func() {
			for {
				select {
				case box <- delivery{a, sent}:
					return
				default:
				}
				select {
				case <-box:
				default:
				}
			}
		})
	}
	push := post
	if !rs[0].Wait {
		push = nil
	}
	return d.net.request(func() {
		d.store.handle(func() bool {
			a, v := d.store.acquire(d, rs, 0, nil, push)
			if v == answered {
				post(a)
			}
			return v != notServing
		}, func() { post(answer{err: backend.ErrUnavailable}) })
	})
}

// giveUp ends an acquire with err. A waiter takes itself out of the queue, and gives back what it was granted
// meanwhile; what cannot be confirmed is unknown.
func (d *Driver) giveUp(rs []backend.Request, err error, ambiguous bool) error {
	if !ambiguous {
		return err
	}
	if rs[0].Wait {
		remove := func() (v verdict) {
			for i := range rs {
				g := rs[i].Grant()
				v, _ = d.store.release(d, &g)
			}
			return v
		}
		if !d.net.troubled.Load() {
			if remove() == answered {
				return err
			}
		}
		d.net.request(func() {
			d.store.handle(func() bool {
				return remove() != notServing
			}, func() {})
		})
	}
	if errors.Is(err, backend.ErrUnavailable) {
		// Only the last attempt left nothing behind, so this cause stays out of the chain.
		return fmt.Errorf("%w: %v", backend.ErrUnknown, err)
	}
	return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
}

// pause waits for poll, so that a server that is down is not asked in a tight loop.
func (d *Driver) pause(ctx context.Context, poll <-chan time.Time) error {
	select {
	case <-poll:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-d.done:
		return backend.ErrClosed
	}
}

// jitter spreads d by a quarter to both sides.
func (s *Store) jitter(name string, d time.Duration) time.Duration {
	if s.steady {
		h := fnv.New64a()
		h.Write([]byte(name))
		return d*3/4 + time.Duration(h.Sum64()%uint64(d/2+1))
	}
	return d*3/4 + rand.N(d/2+1)
}

// Renew implements backend.Driver, in one message for any number of grants.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	if len(grants) == 0 {
		return out
	}
	errs := make([]error, len(grants))
	err := d.alive(ctx)
	var sent backend.Instant
	if err == nil {
		var ok bool
		if sent, ok = d.direct(func() verdict { return d.store.renew(d, grants, errs) }); !ok {
			// A message may be delivered after the caller gave up and used its slice for something else.
			late := slices.Clone(grants)
			sent, err = d.exchange(ctx, func() verdict { return d.store.renew(d, late, errs) })
		}
	}
	for i := range grants {
		each := err
		if each == nil {
			each = errs[i]
		}
		if each != nil {
			out[i].Err = callError("renew", grants[i].Name, each)
			continue
		}
		out[i] = backend.Renewal{SentAt: sent, TTL: grants[i].TTL}
	}
	return out
}

// Release implements backend.Driver.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	if err := d.alive(ctx); err != nil {
		return callError("release", g.Name, err)
	}
	if !d.net.troubled.Load() {
		d.net.seen[0].Add(1)
		if v, err := d.store.release(d, &g); v == answered {
			d.net.seen[1].Add(1)
			return callError("release", g.Name, err)
		}
	}
	return callError("release", g.Name, d.releaseOver(ctx, g))
}

func (d *Driver) releaseOver(ctx context.Context, g backend.Grant) error {
	var answer error
	if _, err := d.exchange(ctx, func() (v verdict) {
		v, answer = d.store.release(d, &g)
		return v
	}); err != nil {
		return err
	}
	return answer
}

// Ping implements backend.Pinger.
func (d *Driver) Ping(ctx context.Context) error {
	return callError("ping", "", d.call(ctx, func() verdict { return d.store.look(func(backend.Instant) {}) }))
}

// call runs op at the store, the short way or as a message. What op writes may be read only if the error is nil.
func (d *Driver) call(ctx context.Context, op func() verdict) error {
	if err := d.alive(ctx); err != nil {
		return err
	}
	if _, ok := d.direct(op); ok {
		return nil
	}
	_, err := d.exchange(ctx, op)
	return err
}

// direct runs op at once if nothing is wrong with the network and the server. It returns the instant before.
func (d *Driver) direct(op func() verdict) (backend.Instant, bool) {
	if d.net.troubled.Load() {
		return 0, false
	}
	d.net.seen[0].Add(1)
	sent := d.store.clock.Now()
	if op() == notServing {
		return 0, false
	}
	d.net.seen[1].Add(1)
	return sent, true
}

// exchange sends op to the store as a message and waits for the reply. It returns the instant before.
func (d *Driver) exchange(ctx context.Context, op func() verdict) (backend.Instant, error) {
	done := make(chan error, 1)
	reply := func(err error) { d.net.reply(func() { done <- err }) }
	sent := d.store.clock.Now()
	conn, ok := d.net.request(func() {
		d.store.handle(func() bool {
			if op() == notServing {
				return false
			}
			reply(nil)
			return true
		}, func() { reply(backend.ErrUnavailable) })
	})
	if !ok {
		return 0, backend.ErrUnavailable
	}
	select {
	case err := <-done:
		return sent, err
	case <-conn:
		return 0, fmt.Errorf("%w: connection reset", backend.ErrUnknown)
	case <-ctx.Done():
		return 0, fmt.Errorf("%w: %w", backend.ErrUnknown, ctx.Err())
	case <-d.done:
		return 0, backend.ErrClosed
	}
}

// pushLost tells a holder of this driver that its hold is gone.
func (d *Driver) pushLost(lost func(backend.Reason), reason backend.Reason) {
	d.net.reply(func() {
		select {
		case <-d.done:
		default:
			lost(reason)
		}
	})
}

// enter counts a call that may wait, unless the driver is closed.
func (d *Driver) enter() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		d.waiting.Add(1)
	}
	return !d.closed
}

// Close implements backend.Driver. It returns once every waiter is out of its queue.
func (d *Driver) Close(context.Context) error {
	d.mu.Lock()
	if !d.closed {
		d.closed = true
		close(d.done)
	}
	d.mu.Unlock()
	d.waiting.Wait()
	d.store.mu.Lock()
	delete(d.store.drivers, d)
	d.store.mu.Unlock()
	return nil
}

func callError(call, name string, err error) error {
	if err == nil {
		return nil
	}
	return &backend.CallError{Driver: "memory", Call: call, Name: name, Err: err}
}
