package fencelock

// What a caller holds. A Lease is a handle on a hold (hold.go): the hold is one entry in the service, and several
// leases may stand for it. What is here decides nothing about time; it reads what hold and heart have decided, and asks
// them to renew (Extend) or to end (Release).

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Lease is one hold of one lock. It ends by Release or by loss, and is dead then: never re-used, never revived. It is
// safe for concurrent use. The zero Lease and a nil one are leases that were never held.
//
//	held ──► ended: released, or lost
//
// It is lost when its deadline passes without a renewal that the service confirmed, or when the service says that the
// lock is not held any more. A renewal that fails is no loss: it is tried again until the deadline. A lease that is
// never released is held until the client is closed or the process ends.
//
//	             held             released           lost
//	Err          nil              ErrNotHeld         *LostError
//	Context      lives            Canceled           ended, with the *LostError as cause
//	Release      gives it back    ErrNotHeld         ErrLost, at once
//	Extend       asks for it      ErrNotHeld         ErrLost
//	Token        the same in all
type Lease struct {
	// of is nil in the zero Lease, and never changes.
	of *hold
	// line is the work that the lease was taken under. letGo empties it.
	line line

	// over is set when this lease was released or replaced, though the hold may go on.
	over atomic.Pointer[error]
	// left: Release was called. newLine reads it without a lock.
	left atomic.Bool

	// The following fields are protected by of.mu.

	// ctx ends with the lease; it and cancel are nil until somebody asks for it.
	ctx    context.Context
	cancel context.CancelCauseFunc
	// joint is kept here for Leases.Context.
	joint *joint
}

// zero reports whether nothing was ever held.
func (l *Lease) zero() bool { return l == nil || l.of == nil }

// Name returns the name that was acquired, without the client's namespace. Empty for a lease that was never held.
func (l *Lease) Name() string {
	if l.zero() {
		return ""
	}
	return l.of.name
}

// Token returns the fencing token of this hold: pass it with every write. In the efficiency tier it is zero, which
// every guard refuses. It stays the same for the life of the lease, and after: a write that is sent late must be
// refused by its own token. There is no way to ask for the current token of a name, since it would hand a stale holder
// its successor's.
func (l *Lease) Token() fencing.Token {
	if l.zero() {
		return 0
	}
	return l.of.token()
}

// TokenSpace names the cluster that issued the token, for guards that trust one cluster only. Empty in the efficiency
// tier. Claim carries it.
func (l *Lease) TokenSpace() string {
	if l.zero() || l.of.client.tier != Correctness {
		return ""
	}
	return l.of.client.driver.Describe().TokenSpace
}

// Claim returns what a guard checks before a write to resource: the token, and the space that it belongs to. The
// resource is often named like the lock, and need not be: one lock may protect several resources.
func (l *Lease) Claim(resource string) fencing.Claim {
	return fencing.Claim{Resource: resource, Token: l.Token(), Space: l.TokenSpace()}
}

// Owner returns the owner text that others see while the lock is held; it is the same for all leases of a client.
func (l *Lease) Owner() string {
	if l.zero() {
		return ""
	}
	return l.of.client.set.Owner
}

// HoldID names the hold in logs and events, and to those who look at the lock (Holder.HoldID). Nothing can be done with
// it. It is the same for every hold that is taken with the same RequestID, and random otherwise.
func (l *Lease) HoldID() string {
	if l.zero() {
		return ""
	}
	return l.of.grant.HoldID
}

// Grant returns what the driver granted, for the driver's escape hatches (etcd's OwnerCmp for example). In the
// efficiency tier its token is zero. It holds the secret key of the hold, which is enough to release it: do not log it
// whole.
func (l *Lease) Grant() backend.Grant {
	if l.zero() {
		return backend.Grant{}
	}
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	g := l.of.grant
	g.Token = l.of.token()
	return g
}

// Context returns a context that ends with the lease. On a loss, context.Cause is a *LostError, and the context ends
// before somebody else can hold the lock. After a release the cause is context.Canceled. It carries the values of the
// context given to Acquire, but not its end. It is made once, and costs no goroutine.
//
// Work that runs under the lease should use it, or a context made from it. An acquire with such a context is known to
// happen under the lease: see Reentrant, ErrDeadlock and Options.Order.
//
//	rows, err := db.QueryContext(lease.Context(), query)
//	if err != nil && lease.Err() != nil {
//		return lease.Err() // the query was stopped because the lock is lost
//	}
func (l *Lease) Context() context.Context {
	if l.zero() {
		ended, cancel := context.WithCancelCause(context.Background())
		cancel(ErrNotHeld)
		return ended
	}
	h := l.of
	h.mu.Lock()
	defer h.mu.Unlock()
	if l.ctx == nil {
		l.ctx, l.cancel = l.line.under(l)
		lost := (*LostError)(nil)
		switch err := l.overOrCause(); {
		case errors.As(err, &lost):
			l.cancel(lost)
		case err != nil:
			l.cancel(nil)
		}
	}
	return l.ctx
}

// Deadline returns the time until which the lease may be believed without another renewal. It moves with each renewal
// and lies before the end of the service's own TTL by the safety margin. It is for logs and for planning work; whether
// the lease is held is for Err to say, which compares the clock that counts.
func (l *Lease) Deadline() time.Time {
	if l.zero() {
		return time.Time{}
	}
	return time.Now().Add(l.of.believedUntil().Sub(l.of.client.set.Clock.Now()))
}

// Err returns nil while the lease is held, a *LostError after loss, and ErrNotHeld after release. It reads the clock
// itself, so it is exact even if timers were late: the last thing to ask before an act that cannot be fenced. It takes
// no lock while the lease is held, so it may be asked in a loop.
//
// Nil says that the lease was held at that moment, and nothing about the next one. Between Err and a write the process
// may be paused: only a guard closes that gap.
//
//	if err := lease.Err(); err != nil {
//		return err // a *LostError says why
//	}
//	press(button) // cannot be fenced
func (l *Lease) Err() error {
	if l.zero() {
		return ErrNotHeld
	}
	if over := l.over.Load(); over != nil {
		return *over
	}
	return l.of.ended()
}

// overOrCause says why the lease is dead, if it is known to be. It does not look at the clock.
func (l *Lease) overOrCause() error {
	if over := l.over.Load(); over != nil {
		return *over
	}
	return l.of.causeOrNil()
}

// releaseGrace is how long a release goes on in the foreground after its context has ended: long enough for a healthy
// service, short enough for a program that is being stopped. With it a Release returns within a second of the end of
// its context, also on a busy machine.
const releaseGrace = 500 * time.Millisecond

// Release gives the lock back; of several leases of one hold (Reentrant), the last one does. The lease is dead in every
// case, and its context has ended.
//
// The context may have ended already: the release is sent all the same, and Release returns at most a second after the
// end of ctx, whatever the network does. So this is the idiom:
//
//	defer lease.Release(ctx)
//
// It returns
//
//   - nil if the service confirmed, or another lease of the hold goes on;
//   - ErrLost, at once, if the lease was lost before, or if the service has given the lock to somebody else meanwhile:
//     a *LostError with the reason is in the chain;
//   - ErrNotHeld if it was released before;
//   - any other error, usually ErrUnknown, if the outcome is not known. The release goes on in the background until it
//     is, or until the service has ended the hold by its TTL.
func (l *Lease) Release(ctx context.Context) error {
	if l.zero() {
		return callError("release", "", ErrNotHeld)
	}
	if err := l.release(ctx); err != nil {
		return callError("release", l.of.name, err)
	}
	return nil
}

// release is Release without the name in the error. The hold is ended here first, and given back in the service
// afterwards: nobody may be told "held" once the request to release has left.
func (l *Lease) release(ctx context.Context) error {
	h, c := l.of, l.of.client
	now := c.set.Clock.Now()
	l.left.Store(true)
	h.mu.Lock()
	tell := h.expire(now)
	err := l.overOrCause()
	if err != nil {
		if lost := (*LostError)(nil); errors.As(err, &lost) && lost.Reason == ReasonExpired && l.over.Load() == nil {
			// The service may still keep our entry. Nobody needs it any more: the holder has just said so.
			h.clean(0)
		}
		l.letGo()
		h.mu.Unlock()
		c.heart.announce(&tell, now)
		return err
	}
	l.over.Store(&errNotHeld)
	if len(h.leases) > 1 {
		h.leave(l)
		cancel := l.cancel
		l.letGo()
		h.mu.Unlock()
		if cancel != nil {
			cancel(nil)
		}
		return nil
	}
	c.work.enter(&h.release)
	defer c.work.leave(&h.release)
	tell = h.end(ErrNotHeld)
	l.letGo()
	h.mu.Unlock()
	tell.cancel()
	return h.finish(ctx)
}

// letGo drops what a released lease would keep of those that it was taken under, since a caller may keep the lease. The
// caller holds of.mu.
func (l *Lease) letGo() {
	l.line.leases, l.ctx, l.cancel, l.joint = nil, nil, nil, nil
}

// errNotHeld is ErrNotHeld, where a pointer is needed.
var errNotHeld = ErrNotHeld

// finish gives a hold back that has ended by release, and tells the observer. "Not held" from the service means that it
// had ended the hold before: to the caller that is a loss, which the release found out.
func (h *hold) finish(ctx context.Context) error {
	c := h.client
	began := c.observedNow()
	err := h.giveBack(ctx)
	if notHeld := (*backend.NotHeldError)(nil); errors.Is(err, ErrNotHeld) {
		reason := ReasonEvicted
		if errors.As(err, &notHeld) && notHeld.Reason != "" {
			reason = notHeld.Reason
		}
		err = h.lostFor(reason, err)
	}
	if c.observed() {
		h.tell(Event{Type: EventReleased, Held: began.Sub(h.since), Took: c.observedNow().Sub(began), Err: err})
	}
	return err
}

// giveBack releases in the service: while ctx lives, then for a moment longer, and in the background for what that
// leaves open. The second try may find that the first one was carried out without an answer; that is success.
//
//	ctx lives      one call, for as long as ctx and the TTL allow
//	ctx has ended  one call of releaseGrace at most
//	no answer      the cleaner goes on, and the caller is told ErrUnknown, or what the driver said
func (h *hold) giveBack(ctx context.Context) error {
	err := h.tryGiveBack(ctx, max(h.grant.TTL, time.Second))
	if err == nil || errors.Is(err, ErrNotHeld) {
		return err
	}
	if ctx.Err() != nil {
		// The caller has stopped waiting; a healthy service answers all the same, and the name opens at once.
		again := h.tryGiveBack(context.WithoutCancel(ctx), releaseGrace)
		if again == nil || errors.Is(again, ErrNotHeld) {
			return nil // what the first try did, if not this one
		}
		err = fmt.Errorf("%w, the release goes on in the background: %w: %w", ErrUnknown, endOf(ctx), again)
	}
	h.mu.Lock()
	h.clean(0)
	h.mu.Unlock()
	return err
}

// tryGiveBack makes one call, bounded by atMost and by Close. A context that has ended sends nothing.
func (h *hold) tryGiveBack(ctx context.Context, atMost time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	h.client.work.bound(&h.release, cancel)
	return h.client.driver.Release(bounded, h.returned())
}

// extension is an Extend that waits.
type extension struct {
	// before is the length that the Extend changes, to go back to if the service refuses the new one.
	before time.Duration
	// done gets one answer, and has room for it.
	done chan error
}

// Extend sets the lease length to d from now on: for callers who renew by hand (NoRenew), and for work that turns out
// longer.
//
//	for batch := range batches {
//		if err := lease.Extend(ctx, time.Minute); err != nil { // progress keeps the lock
//			return err
//		}
//		write(batch)
//	}
//
// A longer length is asked of the service at once; Extend waits until the service has confirmed it, repeats attempts
// that fail, and keeps the old deadline until one succeeds. A shorter length takes effect here and now, and later
// renewals ask for it; the service may keep the name for the old length if the process dies before that, since renewals
// never shorten.
//
// ErrInvalidTTL, before anything is sent, if d is outside the driver's range. ErrLost or ErrNotHeld if the lease is
// dead. If ctx ends first, its error is returned with the last attempt's, or with ErrUnknown; a lease that renews
// itself goes on asking for d. Some drivers grant another length than d: see Deadline. Of several leases of one hold,
// Extend changes the hold.
func (l *Lease) Extend(ctx context.Context, d time.Duration) error {
	if l.zero() {
		return callError("extend", "", ErrNotHeld)
	}
	if err := l.extend(ctx, d); err != nil {
		return callError("extend", l.of.name, err)
	}
	return nil
}

// extend is Extend without the name in the error. It leaves the asking to heart, which owns all renewals: a grant never
// has two of them in flight.
func (l *Lease) extend(ctx context.Context, d time.Duration) error {
	h, c := l.of, l.of.client
	if err := c.set.validateTTL(c.driver.Describe(), d); err != nil {
		return err
	}
	if err := endOf(ctx); err != nil {
		return err // nothing was sent, and nothing changes
	}
	if err := l.Err(); err != nil {
		return err
	}
	now, ttl := c.set.Clock.Now(), d+c.set.LockDelay
	h.mu.Lock()
	if err := l.overOrCause(); err != nil {
		h.mu.Unlock()
		return err
	}
	// Shorter: nobody has to be asked for less. A renewal in flight may still prove the old length; prove cuts it.
	if until := now.Add(h.validity(ttl)); until < h.believedUntil() {
		h.ttl, h.grant.TTL = ttl, ttl
		h.believe(until, now.Add(ttl))
		if at, early := h.renewalDue(now, c.spread()); !h.renewing {
			c.heart.schedule(h, at, early, now)
		} else {
			c.heart.schedule(h, until, 0, now)
		}
		h.mu.Unlock()
		return nil
	}
	// Longer: heart asks for it at once, or again when the renewal in flight has been answered.
	x := &extension{before: h.ttl, done: make(chan error, 1)}
	h.ttl = ttl
	h.extends = append(h.extends, x)
	if !h.renewing {
		c.heart.schedule(h, now, 0, now)
	}
	h.mu.Unlock()
	select {
	case err := <-x.done:
		return err
	case <-ctx.Done():
		return h.abandon(ctx, x)
	}
}

// abandon takes back an Extend whose context ended, unless its answer has come meanwhile. The length that it asked for
// stays, as Extend says.
func (h *hold) abandon(ctx context.Context, x *extension) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case err := <-x.done:
		return err
	default:
	}
	for i, other := range h.extends {
		if other == x {
			h.extends = append(h.extends[:i], h.extends[i+1:]...)
			break
		}
	}
	ended := endOf(ctx)
	if h.lastErr == nil {
		return fmt.Errorf("%w: %w", ErrUnknown, ended)
	}
	return fmt.Errorf("%w: %w", h.lastErr, ended)
}
