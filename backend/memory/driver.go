package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
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
	rs := []backend.Request{r}
	grants, err := d.acquire(ctx, rs, kit.Validate(d.Describe(), r))
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

// acquire takes requests unless they are invalid.
func (d *Driver) acquire(ctx context.Context, rs []backend.Request, invalid error) ([]backend.Grant, error) {
	if err := cmp.Or(d.alive(ctx), invalid); err != nil {
		return nil, err
	}
	grants, sent, err := d.ask(ctx, rs)
	if err != nil {
		return nil, err
	}
	out := make([]backend.Grant, len(rs))
	for i := range rs {
		a := &grants[i]
		out[i] = rs[i].Grant()
		out[i].Token, out[i].Incarnation, out[i].TTL, out[i].SentAt, out[i].Queued = a.token, a.incarnation, a.ttl, sent, a.queued
		if a.minHold > 0 {
			out[i].MinHoldUntil = sent.Add(a.minHold)
		}
	}
	return out, nil
}

// ask returns what was granted, and the instant from which it counts.
func (d *Driver) ask(ctx context.Context, rs []backend.Request) ([]granted, backend.Instant, error) {
	// The short way: one look without a place in the queue, which is all that an open name takes.
	var a answer
	sent, ok := d.direct(func(sent backend.Instant) (v verdict) {
		a, v = d.store.acquire(d, rs, sent, nil)
		return v
	})
	if ok && (a.err == nil || !rs[0].Wait || !errors.Is(a.err, backend.ErrHeld)) {
		return a.grants, sent, a.err
	}
	return d.acquireOver(ctx, rs)
}

// alive refuses calls that must not reach the store.
func (d *Driver) alive(ctx context.Context) error {
	if d.gate.Closed() {
		return backend.ErrClosed
	}
	return ctx.Err()
}

// delivery is an answer, with the instant before the request that it answers was sent.
type delivery struct {
	answer
	sent backend.Instant
}

// acquireOver asks over the network, again and again with the same request ids where an answer may be lost.
func (d *Driver) acquireOver(ctx context.Context, rs []backend.Request) ([]granted, backend.Instant, error) {
	if err := d.gate.Enter(); err != nil {
		return nil, 0, err
	}
	defer d.gate.Leave()
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
		case <-d.gate.Closing().Done():
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
			a, v := d.store.acquire(d, rs, 0, push)
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
		remove := func(backend.Instant) (v verdict) {
			for i := range rs {
				g := rs[i].Grant()
				v, _ = d.store.release(d, &g)
			}
			return v
		}
		if _, ok := d.direct(remove); ok {
			return err
		}
		d.net.request(func() {
			d.store.handle(func() bool { return remove(0) != notServing }, func() {})
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
	case <-d.gate.Closing().Done():
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

// Renew prolongs any number of grants in one message, and answers for each of them, in order. A hold that is gone is a
// backend.NotHeldError with the reason, as long as the store remembers it, and is never made again.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	if len(grants) == 0 {
		return out
	}
	// A message may be delivered after the caller gave up and used its slice for something else.
	late, errs := slices.Clone(grants), make([]error, len(grants))
	sent, err := d.call(ctx, func(backend.Instant) verdict { return d.store.renew(d, late, errs) })
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

// Release gives a hold back if it still is the one that was granted. With a grant that Request.Grant made it removes
// whatever that request has, its hold or its place in the queue. What is not held is backend.ErrNotHeld.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	var answer error
	_, err := d.call(ctx, func(backend.Instant) (v verdict) {
		v, answer = d.store.release(d, &g)
		return v
	})
	if err == nil {
		err = answer
	}
	return callError("release", g.Name, err)
}

// Ping makes sure that the store answers.
func (d *Driver) Ping(ctx context.Context) error {
	return callError("ping", "", d.look(ctx, func(backend.Instant) {}))
}

// look runs read at one moment of the store. What it writes may be read only if the error is nil.
func (d *Driver) look(ctx context.Context, read func(now backend.Instant)) error {
	_, err := d.call(ctx, func(sent backend.Instant) verdict { return d.store.serve(sent, read) })
	return err
}

// call runs op at the store, the short way or as a message, and returns the instant before. What op writes may be read
// only if the error is nil.
func (d *Driver) call(ctx context.Context, op func(sent backend.Instant) verdict) (backend.Instant, error) {
	if err := d.alive(ctx); err != nil {
		return 0, err
	}
	if sent, ok := d.direct(op); ok {
		return sent, nil
	}
	return d.exchange(ctx, op)
}

// direct runs op at once if nothing is wrong with the network and the server. It returns the instant before.
func (d *Driver) direct(op func(sent backend.Instant) verdict) (backend.Instant, bool) {
	if d.net.troubled.Load() {
		return 0, false
	}
	d.net.seen[0].Add(1)
	sent := d.store.clock.Now()
	if op(sent) == notServing {
		return 0, false
	}
	d.net.seen[1].Add(1)
	return sent, true
}

// exchange sends op to the store as a message and waits for the reply. It returns the instant before.
func (d *Driver) exchange(ctx context.Context, op func(sent backend.Instant) verdict) (backend.Instant, error) {
	done := make(chan error, 1)
	reply := func(err error) { d.net.reply(func() { done <- err }) }
	sent := d.store.clock.Now()
	conn, ok := d.net.request(func() {
		d.store.handle(func() bool {
			if op(0) == notServing {
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
	case <-d.gate.Closing().Done():
		return 0, backend.ErrClosed
	}
}

// pushLost tells a holder of this driver that its hold is gone.
func (d *Driver) pushLost(lost func(backend.Reason), reason backend.Reason) {
	d.net.reply(func() {
		if !d.gate.Closed() {
			lost(reason)
		}
	})
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

func callError(call, name string, err error) error {
	if err == nil {
		return nil
	}
	return &backend.CallError{Driver: "memory", Call: call, Name: name, Err: err}
}
