package memory

// The driver: one client of a store. Each call is a function that the store runs at one moment of its own (call), sent
// through the driver's network; what the function writes is the answer.
//
// Such a function may run long after its caller has gone, when the network was slow. So it writes to variables of its
// own attempt only, and the caller reads them only after it has received from done.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/bell"
)

// New returns a driver with a store of its own, reached by Driver.Store. Drivers that are to contend need one store
// together: make that with NewStore.
func New(o *Options) *Driver { return NewStore(o).Driver() }

// Driver is one client of a Store. It implements backend.FencingDriver, Inspector, Lister, Watcher, ForceReleaser,
// MultiAcquirer and Pinger. Store.Driver makes one; the zero value is not usable. All methods are safe for concurrent
// use.
//
// It has no goroutine and no timer but those of its calls, so one that is never closed costs memory only. Nothing in it
// changes after it was made but the network and the gate, which have mutexes of their own.
type Driver struct {
	store *Store
	net   Network
	// space is the token space that the store had when the driver was made. If it differs from the store's, the store
	// was wiped: see Store.forgot. The driver never takes over the new one, since it may hold locks of the old.
	space string
	// gate counts the acquires in, which Close waits for because they stand in queues. Other calls leave nothing
	// behind; they only end with it.
	gate *kit.Gate
}

// The bounds of a TTL. maxTTL is also what the machine's own two sessions are opened with; the store measures no time
// by it.
const (
	minTTL = 100 * time.Millisecond
	maxTTL = 365 * 24 * time.Hour
)

// Store returns the server that the driver talks to.
func (d *Driver) Store() *Store { return d.store }

// Network returns what lies between the driver and its store, in order to break it.
func (d *Driver) Network() *Network { return &d.net }

// IssuesFencingTokens promises what backend.FencingDriver says: the store's one counter only grows, within a token
// space. That it begins anew after Store.Wipe is no exception, because the token space is another one then, and the
// driver is refused from there on.
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

// Acquire takes a lock, with a token that is higher than all that the store ever issued in this token space. With Wait
// the request stands in the name's queue until it is granted or ctx ends. The same RequestID again, from whichever
// driver, gets the same hold.
//
// An answer that is lost is asked for again, by the same request id. The errors:
//
//	backend.ErrHeld           somebody holds it, and the request does not wait
//	DeadlockError             waiting would close a cycle
//	ErrLimitMismatch          the name is in use with another kind, limit or hierarchy
//	ErrInvalidOption, …       the request makes no sense; nothing was sent
//	ErrUnavailable            the server is down; nothing was done
//	ErrUnknown                something may have been taken that is not given back
//	ErrHistoryLost            Store.Wipe was called
//	ErrClosed, or ctx's       a waiter has left the queue, unless ErrUnknown is there too
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	grants, err := d.acquire(ctx, []backend.Request{r})
	if err != nil {
		return backend.Grant{}, callError("acquire", r.Name, err)
	}
	return grants[0], nil
}

// AcquireAll takes any set of distinct names in one step, or none. It waits in the queues of all of them at once, so
// sets that overlap cannot deadlock each other. All requests have the same TTL, Wait and Under. Errors are those of
// Acquire; they name the first name of the set.
//
//	grants, err := d.AcquireAll(ctx, []backend.Request{from, to}) // both accounts, or neither
func (d *Driver) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	grants, err := d.acquire(ctx, slices.Clone(rs)) // the store keeps them
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
//
// Each answer of the store has one outcome here:
//
//	granted                     return the grants, valid from the instant before this request
//	refused                     return the error: it is final
//	waits                       rest, and ask again
//	none came                   ask again at once: the store knows the request by its id
//	down, at the first time     ErrUnavailable
//	down, later, with Wait      rest, and ask again: it may have had a place
//	down, later, without        giveUp, which makes it ErrUnknown: an earlier request may have been granted
//	ctx ended, or Close         giveUp
//
// The store keeps a waiter's place for one TTL from each request. The waiter rests for a third of that at most, so that
// an answer may take as long as the rest before the place is gone.
func (d *Driver) acquire(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	if err := cmp.Or(d.alive(ctx), kit.ValidateSet(d.Describe(), rs)); err != nil {
		return nil, err
	}
	if err := d.gate.Enter(); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	var (
		again bell.Bell
		ring  func()
	)
	wait, pause := rs[0].Wait, min(rs[0].TTL/3, time.Second)
	if wait {
		again, ring = d.bell()
	}
	// It becomes true with the first request that left and may have done something, and stays so: an answer that was
	// lost may have been a grant.
	ambiguous := false
	for first := true; ; first = false {
		// A message may be delivered late: it has variables of its own.
		var grants []backend.Grant
		var refused error
		sent, err := d.call(ctx, func(now backend.Instant) error {
			grants, refused = d.store.acquire(now, d, rs, ring)
			return nil
		})
		switch {
		case err == nil && refused != nil:
			return nil, refused
		case err == nil && grants != nil:
			for i := range grants {
				grants[i].SentAt = sent
			}
			return grants, nil
		case errors.Is(err, backend.ErrUnknown):
			ambiguous = true
		case err == nil:
			ambiguous = true
			d.rest(ctx, again, pause)
		case wait && !first && errors.Is(err, backend.ErrUnavailable):
			d.rest(ctx, again, pause)
		default:
			return nil, d.giveUp(rs, err, ambiguous)
		}
	}
}

// giveUp ends an acquire with err. A waiter takes itself out of the queue, and gives back what it was granted
// meanwhile; what cannot be confirmed is unknown.
//
// The release is sent behind the requests, on the same network, so it cannot overtake them. It does not wait for its
// answer: the caller wants to go, and a network that is whole has run the release by the time send returns. A caller
// that does not wait gets no release, since it may ask for its hold again by the same ids, or release it; else the hold
// ends with its TTL.
func (d *Driver) giveUp(rs []backend.Request, err error, ambiguous bool) error {
	if !ambiguous {
		return err
	}
	if rs[0].Wait {
		done, _ := d.send(func(now backend.Instant) error {
			for i := range rs {
				g := rs[i].Grant()
				_ = d.store.release(now, d, &g)
			}
			return nil
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
//
// The new validity counts from Renewal.SentAt, which is just before the message was sent. A renewal never shortens: a
// grant with a smaller TTL than before leaves the hold as it is. Without an answer every grant has the same error,
// backend.ErrUnknown or ErrUnavailable, and the holds may live on or not.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	if len(grants) == 0 {
		return out
	}
	// A message may be delivered after the caller gave up and used its slice for something else.
	late, errs := slices.Clone(grants), make([]error, len(grants))
	sent, err := d.call(ctx, func(now backend.Instant) error {
		for i := range late {
			errs[i] = d.store.renew(now, d, &late[i])
		}
		return nil
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
//
// The name goes to its first waiter in the same step, unless a minimum hold keeps it closed. After backend.ErrUnknown
// it may be called again: the second time it is ErrNotHeld if the first was carried out.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return callError("release", g.Name, d.try(ctx, func(now backend.Instant) error {
		return d.store.release(now, d, &g)
	}))
}

// Ping makes sure that the store answers. It is backend.ErrUnavailable after Store.Stop and Network.Refuse, and waits
// until ctx ends while the server is paused or the network holds messages back. It says nothing about a wipe.
func (d *Driver) Ping(ctx context.Context) error {
	return callError("ping", "", d.try(ctx, func(backend.Instant) error { return nil }))
}

// Close ends waiters with backend.ErrClosed, and returns once every one of them is out of its queue, or when ctx ends.
// Holds stay until they expire. Close may be called again.
//
// The error is ctx's; then waiters may still be leaving. Other calls that are under way end with backend.ErrClosed, and
// so do watches. Losses are told no more.
func (d *Driver) Close(ctx context.Context) error {
	d.gate.Close()
	err := d.gate.Wait(ctx)
	d.store.mu.Lock()
	d.store.drivers = slices.DeleteFunc(d.store.drivers, func(other *Driver) bool { return other == d })
	d.store.mu.Unlock()
	return err
}

// alive refuses calls that must not reach the store: after Close, and with a context that has ended before the call.
func (d *Driver) alive(ctx context.Context) error {
	if d.gate.Closed() {
		return backend.ErrClosed
	}
	return ctx.Err()
}

// try is call for those who need no instant.
func (d *Driver) try(ctx context.Context, op func(now backend.Instant) error) error {
	_, err := d.call(ctx, op)
	return err
}

// call runs op at one moment of the store and returns its error, and the instant before it was sent. What op writes may
// be read only if the error is op's own, or nil. Nothing is sent again: only the caller knows what doing op twice would
// do.
//
// Done is looked at first and alone. On a network that is whole the answer is there when send returns, and a select
// over all channels could choose the end of ctx instead.
//
//	the answer                  op's error, or backend.ErrUnavailable: nothing was done
//	the connection broke        ErrUnknown
//	ctx ended, or Close         ErrUnknown, and ctx's error or ErrClosed; that alone if nothing was sent yet
func (d *Driver) call(ctx context.Context, op func(now backend.Instant) error) (backend.Instant, error) {
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
	select {
	case err := <-done:
		return sent, err
	case <-conn:
		return 0, fmt.Errorf("%w: connection reset", backend.ErrUnknown)
	case <-ctx.Done():
		return 0, fmt.Errorf("%w: %w", backend.ErrUnknown, ctx.Err())
	case <-d.gate.Closing().Done():
		return 0, fmt.Errorf("%w: %w", backend.ErrUnknown, backend.ErrClosed)
	}
}

// send sends op to the store. The answer comes on done, which has room for it and is never closed, so that it may come
// when nobody listens any more; none will come if the connection breaks, which closes conn. If there is no connection
// conn is nil, and done has the error already.
func (d *Driver) send(op func(now backend.Instant) error) (done chan error, conn <-chan struct{}) {
	done, conn = make(chan error, 1), d.net.connection()
	if conn == nil {
		done <- backend.ErrUnavailable
		return done, nil
	}
	reply := func(err error) { d.net.send(replies, func() { done <- err }) }
	d.net.send(requests, func() { d.store.handle(op, reply) })
	return done, conn
}

// bell returns a bell, and a function with which the store rings it through the network: there is something to ask. A
// ring travels as a reply does, and may be lost like one; rest has a bound for that.
func (d *Driver) bell() (bell.Bell, func()) {
	b := bell.New()
	return b, func() { d.net.send(replies, b.Ring) }
}

// rest waits until it is time to ask the store again: at the bell, when the connection has broken, after a while, and
// when the call is over, which the next question tells.
func (d *Driver) rest(ctx context.Context, again bell.Bell, after time.Duration) {
	select {
	case <-again:
	case <-d.net.connection():
	case <-time.After(after):
	case <-ctx.Done():
	case <-d.gate.Closing().Done():
	}
}

// callError is err with the call and the name of the contract; nil stays nil. name is empty where a call has none.
func callError(call, name string, err error) error {
	if err == nil {
		return nil
	}
	return &backend.CallError{Driver: "memory", Call: call, Name: name, Err: err}
}
