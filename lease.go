package fencelock

// Lease, the caller's handle on a hold (hold.go). The hold is one entry in the service, and several leases may stand
// for it. This file makes no decision about time; it reads the decisions of hold and heart, and asks them to renew
// (Extend) or to end (Release).

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/cleanup"
)

// Lease is one hold of one lock. It ends by Release or by loss, and is dead then: never re-used, never revived. It is
// safe for concurrent use. The zero Lease and a nil one are leases that were never held.
//
//	held ──► ended: released, or lost
//
// It is lost when its deadline passes without a renewal that the service confirmed, or when the service says that the
// lock is no longer held. A failed renewal is no loss: it is retried until the deadline. A lease that is
// never released is held until the client is closed or the process ends.
//
//	             held             released           lost
//	Err          nil              ErrNotHeld         *LostError
//	Context      lives            Canceled           ended, with the *LostError as cause
//	Release      releases it      ErrNotHeld         ErrLost, at once
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

	// renew: the lease is renewed automatically; inSet: it is in line already, with the others of its AcquireAll. Both
	// never change.
	renew, inSet bool

	// The following fields are protected by of.mu.

	// ctx is the result of Context; nil until the first call. cancels end it and others with the lease.
	ctx     context.Context
	cancels []context.CancelCauseFunc
	// joint is kept here for Leases.Context.
	joint *joint
}

// zero reports whether the lease never held a lock.
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

// Nonce returns 128 random bits that name this hold in public: it differs from the nonce of every other hold, even of
// a hold with the same token. Zero if the driver draws no nonces. Claim carries it.
func (l *Lease) Nonce() fencing.Nonce {
	if l.zero() {
		return fencing.Nonce{}
	}
	return l.of.grant.Nonce
}

// Generation returns the generation of the lock service that issued the token, see fencing.Generation. Claim carries
// it.
func (l *Lease) Generation() fencing.Generation {
	if l.zero() {
		return fencing.Generation{}
	}
	return l.of.grant.Generation
}

// Claim returns the claim that a guard checks before a write to resource: the token with its space and generation,
// and the hold's nonce. The resource often has the lock's name, but need not: one lock may protect several resources.
func (l *Lease) Claim(resource string) fencing.Claim {
	return fencing.Claim{
		Resource: resource, Token: l.Token(), Space: l.TokenSpace(), Generation: l.Generation(), Nonce: l.Nonce(),
	}
}

// Owner returns the owner text that others see while the lock is held; it is the same for all leases of a client.
func (l *Lease) Owner() string {
	if l.zero() {
		return ""
	}
	return l.of.client.set.Owner
}

// HoldID names the hold in logs and events, and in the results of Look (Holder.HoldID). It gives no power over the
// hold. It is the same for every hold that is acquired with the same RequestID, and random otherwise.
func (l *Lease) HoldID() string {
	if l.zero() {
		return ""
	}
	return l.of.grant.HoldID
}

// Grant returns the driver's grant, for the driver's escape hatches (etcd's OwnerCmp for example). In the efficiency
// tier its token is zero. It holds the secret key of the hold, which is enough to release it: do not log it whole.
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
// before another client can hold the lock. After a release the cause is context.Canceled. It carries the values of the
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
		ctx, cancel := l.line.with(l).open()
		l.ctx = ctx
		if err := l.overOrCause(); err != nil {
			cancel(endCause(err))
		} else {
			l.cancels = append(l.cancels, cancel)
		}
	}
	return l.ctx
}

// endsWith has cancel called when the lease ends, before anything else can happen after the end; now if it has ended.
func (l *Lease) endsWith(cancel context.CancelCauseFunc) {
	if l.zero() {
		cancel(ErrNotHeld)
		return
	}
	h := l.of
	h.mu.Lock()
	err := l.overOrCause()
	if err == nil {
		l.cancels = append(l.cancels, cancel)
	}
	h.mu.Unlock()
	if err != nil {
		cancel(endCause(err))
	}
}

// endCause is the cause with which contexts end: a loss, or nil for a release, as for any cancelled context.
func endCause(err error) error {
	if lost := (*LostError)(nil); errors.As(err, &lost) {
		return lost
	}
	return nil
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

// Err returns nil while the lease is held, a *LostError after loss, and ErrNotHeld after release. It reads the clock,
// so it is exact even if timers are late: call it last before an action that cannot be fenced. It locks no mutex
// while the lease is held, so it is cheap in a loop.
//
// Nil says that the lease was held at that moment; it does not cover the next one. The process may be paused
// between Err and a write: only a guard closes that gap.
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

// releaseGrace bounds a release in the foreground after its context has ended: long enough for a healthy service,
// short enough for a program about to exit. With it Release returns within a second of the end of its
// context, even on a busy machine.
const releaseGrace = 500 * time.Millisecond

// Release releases the lock; of several leases of one hold (Reentrant), the last one does. The lease is dead in every
// case, and its context has ended.
//
// The context may have ended already: the release is sent all the same, and Release returns at most a second after the
// end of ctx, even without a network. So this is the idiom:
//
//	defer lease.Release(ctx)
//
// It returns
//
//   - nil if the service confirmed the release, or if another lease of the hold continues;
//   - ErrLost, immediately, if the lease was lost before, or if the service has granted the lock to another client:
//     a *LostError with the reason is in the chain;
//   - ErrNotHeld if it was released before;
//   - any other error, usually ErrUnknown, if the outcome is unknown. The release continues in the background until it
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

// release is Release without the name in the error. It ends the hold here first, and releases it in the service
// afterwards: no method may report "held" once the request to release has been sent.
func (l *Lease) release(ctx context.Context) error {
	h, c := l.of, l.of.client
	now := c.set.Clock.Now()
	l.left.Store(true)
	h.mu.Lock()
	tell := h.expire(now)
	err := l.overOrCause()
	if err != nil {
		if lost := (*LostError)(nil); errors.As(err, &lost) && lost.byTime() && l.over.Load() == nil {
			// The service may still keep our entry. The holder has just released it, so clean it up.
			h.clean(cleanup.Granted, 0)
		}
		l.letGo()
		h.mu.Unlock()
		c.heart.announce(&tell, now)
		return err
	}
	l.over.Store(&errNotHeld)
	if len(h.leases) > 1 {
		h.leave(l)
		cancels := l.cancels
		l.letGo()
		h.mu.Unlock()
		for _, cancel := range cancels {
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

// letGo clears the references to outer leases, so that a released lease that its caller keeps does not keep them
// alive. The caller holds of.mu.
func (l *Lease) letGo() {
	l.line.leases, l.ctx, l.cancels, l.joint = nil, nil, nil, nil
}

// errNotHeld is ErrNotHeld, where a pointer is needed.
var errNotHeld = ErrNotHeld

// finish releases a hold in the service after Release has ended it, and notifies the observer. "Not held" from the
// service means that it had ended the hold before: to the caller that is a loss, found by the release.
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
		h.tell(&Event{Type: EventReleased, Held: began.Sub(h.since), Took: c.observedNow().Sub(began), Err: err})
	}
	return err
}

// giveBack releases in the service: while ctx lives, then for a moment longer, and then in the background. The second
// try may find that the service carried out the first one but its answer was lost; that is success.
//
//	ctx lives      one call, for as long as ctx and the TTL allow
//	ctx has ended  one call of releaseGrace at most
//	no answer the cleaner goes on, and the caller gets ErrUnknown, or the driver's error
func (h *hold) giveBack(ctx context.Context) error {
	err := h.tryGiveBack(ctx, max(h.grant.TTL, time.Second))
	if err == nil || errors.Is(err, ErrNotHeld) {
		return err
	}
	if ctx.Err() != nil {
		// The caller has stopped waiting; a healthy service answers all the same, and the name opens at once.
		again := h.tryGiveBack(context.WithoutCancel(ctx), releaseGrace)
		if again == nil || errors.Is(again, ErrNotHeld) {
			return nil // this try or the first one released it
		}
		err = fmt.Errorf("%w, the release goes on in the background: %w: %w", ErrUnknown, endOf(ctx), again)
	}
	h.mu.Lock()
	h.clean(cleanup.Granted, 0)
	h.mu.Unlock()
	return err
}

// tryGiveBack makes one call, bounded by atMost and by Close. If ctx has ended it sends no request.
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
	// ttl is the length to ask for.
	ttl time.Duration
	// done gets one answer, and has room for it.
	done chan error
}

// Extend sets the lease length to d from now on: for callers who renew by hand (NoRenew), and for work that takes
// longer than planned.
//
//	for batch := range batches {
//		if err := lease.Extend(ctx, time.Minute); err != nil { // progress keeps the lock
//			return err
//		}
//		write(batch)
//	}
//
// To lengthen the lease, Extend asks the service and waits for its confirmation; it retries failed attempts, and the
// old deadline stays until one succeeds. A shorter length takes effect immediately, and later renewals ask for it;
// the service may keep the name for the old length if the process dies before that, since renewals never shorten.
//
// ErrInvalidTTL, before anything is sent, if d is outside the driver's range. ErrLost or ErrNotHeld if the lease has
// ended. If ctx ends first, its error is returned with the last attempt's, or with ErrUnknown; the length does not
// change, and the service may keep the name for d. A failed Extend does not shorten the lease. Some drivers grant
// another length than d, and a policy of the bundled server may bound it: see Deadline. Extend changes the hold, and so all of its leases.
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
		return err // no request was sent, and the lease is unchanged
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
	// Shorter: this needs no request. A renewal in flight may still prove the old length; prove cuts it.
	if until := now.Add(h.validity(ttl)); until < h.believedUntil() {
		h.ttl, h.last = ttl, false // the next renewal says whether the shorter length is the last one
		h.believe(until, now.Add(ttl))
		h.answer(func(*extension) bool { return true }, nil) // of longer ones that came before: this one came later
		if at, early := h.renewalDue(now, c.spread()); !h.renewing {
			c.heart.schedule(h, at, early, now)
		} else {
			c.heart.schedule(h, until, 0, now)
		}
		h.mu.Unlock()
		return nil
	}
	// Longer: heart asks for it immediately, or when the renewal in flight has been answered.
	x := &extension{ttl: ttl, done: make(chan error, 1)}
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

// abandon withdraws an Extend after its context ended, unless its answer has come meanwhile. Renewals then ask for
// the length in force.
func (h *hold) abandon(ctx context.Context, x *extension) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case err := <-x.done:
		return err
	default:
	}
	h.extends = slices.DeleteFunc(h.extends, func(other *extension) bool { return other == x })
	ended := endOf(ctx)
	if h.lastErr == nil {
		return fmt.Errorf("%w: %w", ErrUnknown, ended)
	}
	return fmt.Errorf("%w: %w", h.lastErr, ended)
}
