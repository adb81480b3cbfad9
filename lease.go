package fencelock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Lease is one hold of one lock. It ends by Release or by loss, and is dead then: never re-used, never revived. It is
// safe for concurrent use.
//
//	held ──► suspect (a renewal failed, deadline ahead) ──► lost
//	  ▲──────────┘ renewed                                   ▲
//	  ├──► released                                          │
//	  └───────────── deadline, or "not yours" from the service
type Lease struct {
	client *Client
	name   string
	renew  bool
	values context.Context // the acquire's: the lease's context carries its values
	call   call            // the acquire, while it is in flight

	// The following fields are protected by client.heart.mu, after heart.add.

	ctx    context.Context // ends with the lease; nil until somebody asks for it
	cancel context.CancelCauseFunc

	grant    backend.Grant
	since    backend.Instant // when it was acquired, for observers
	deadline backend.Instant // local and conservative: the hold is not believed beyond
	nextAt   backend.Instant // when heart looks at it next: a renewal is due, or the deadline
	index    int             // in heart's heap; -1 if not there
	state    leaseState
	lost     *LostError      // set in state lost, or before heart.add by an early push
	renewing chan struct{}   // not nil while a renewal is in flight; closed when it ends
	leastTTL time.Duration   // the shortest TTL of a renewal whose outcome is unknown; 0: none. See heart.settle
	uncut    backend.Instant // the deadline before an Extend to less that is under way; 0: none is

	again again  // what Reentrant makes of it
	agent string // the line of work: backend.Request.Agent
}

type leaseState uint8

const (
	stateNew leaseState = iota
	stateHeld
	stateSuspect
	stateReleased
	stateLost
)

// hold returns the lease that stands for the hold itself: l, or the one that l was taken under with Reentrant.
func (l *Lease) hold() *Lease {
	if l.again.of != nil {
		return l.again.of
	}
	return l
}

func newLease(ctx context.Context, c *Client, name string, renew bool) *Lease {
	return &Lease{client: c, name: name, renew: renew, values: ctx, index: -1}
}

// Name returns the name that was acquired, without the client's namespace.
func (l *Lease) Name() string { return l.name }

// Token returns the fencing token of this hold: pass it with every write. In the efficiency tier it is zero, which every
// guard refuses. It stays the same for the life of the lease, and after.
func (l *Lease) Token() fencing.Token {
	if l.client.tier != Correctness {
		return 0
	}
	return l.hold().grant.Token
}

// TokenSpace names the cluster that issued the token, for guards that trust one cluster only. Empty in the efficiency
// tier.
func (l *Lease) TokenSpace() string {
	if l.client.tier != Correctness {
		return ""
	}
	return l.client.driver.Describe().TokenSpace
}

// Owner returns the owner text that others see while the lock is held.
func (l *Lease) Owner() string { return l.client.set.Owner }

// RequestID returns the identity of this hold: what was given with the option RequestID, or a random one.
func (l *Lease) RequestID() string { return l.hold().grant.RequestID }

// Grant returns what the driver granted, for the driver's escape hatches (etcd's OwnerCmp for example). In the efficiency
// tier its token is zero.
func (l *Lease) Grant() backend.Grant {
	h := &l.client.heart
	h.mu.Lock()
	defer h.mu.Unlock()
	g := l.hold().grant
	g.Token = l.Token()
	return g
}

// Context returns a context that ends with the lease. On a loss, context.Cause is a *LostError, and the context ends
// before somebody else can hold the lock. It carries the values of the context given to Acquire, but not its end. An
// acquire with this context, or one made from it, is known to happen under the lease: see Reentrant, ErrDeadlock and
// Options.Order.
func (l *Lease) Context() context.Context {
	h := &l.client.heart
	h.mu.Lock()
	defer h.mu.Unlock()
	if l.ctx == nil {
		under := context.WithValue(context.WithoutCancel(l.values), leaseKey{}, l)
		l.ctx, l.cancel = context.WithCancelCause(under)
		if hold := l.hold(); hold.state == stateLost {
			l.cancel(hold.lost)
		} else if l.errLocked() != nil {
			l.cancel(nil)
		}
	}
	return l.ctx
}

// Deadline returns the time until which the lease may be believed without another renewal. It moves with each renewal
// and lies before the end of the service's own TTL by the safety margin.
func (l *Lease) Deadline() time.Time {
	h := &l.client.heart
	h.mu.Lock()
	left := l.hold().deadline.Sub(l.client.set.Clock.Now())
	h.mu.Unlock()
	return time.Now().Add(left)
}

// Err returns nil while the lease is held, a *LostError after loss, and ErrNotHeld after release. It reads the clock
// itself, so it is exact even if timers were late: the last thing to ask before an act that cannot be fenced.
func (l *Lease) Err() error {
	h := &l.client.heart
	h.mu.Lock()
	lost := h.expire(l.hold())
	err := l.errLocked()
	h.mu.Unlock()
	if lost {
		h.announceLoss(l.hold())
	}
	return err
}

// errLocked says whether l is dead. The caller holds heart.mu.
func (l *Lease) errLocked() error {
	if l.again.left {
		return ErrNotHeld
	}
	return l.hold().endedLocked()
}

// endedLocked says whether a hold is over. The caller holds heart.mu.
func (l *Lease) endedLocked() error {
	switch l.state {
	case stateReleased:
		return ErrNotHeld
	case stateLost:
		return l.lost
	}
	return nil
}

// lateGrace is how long a call goes on with a context that has already ended: long enough for a healthy service, short
// enough to count as "at once".
const lateGrace = 40 * time.Millisecond

// Release gives the lock back; of several leases of one hold (Reentrant), the last one does. It returns nil if the service
// confirmed; ErrLost at once if the lease was lost before or the service has given the lock to somebody else; ErrNotHeld
// if it was released before. On any other error the release goes on in the background, detached from ctx, until the
// outcome is known: a cancelled request never leaves its lock behind. The lease is dead in every case.
func (l *Lease) Release(ctx context.Context) error {
	err := l.release(ctx)
	if err != nil {
		return callError("release", l.name, err)
	}
	return nil
}

func (l *Lease) release(ctx context.Context) error {
	h := &l.client.heart
	h.mu.Lock()
	hold := l.hold()
	lost := h.expire(hold)
	err := l.errLocked()
	last := err == nil && l.leave()
	if last {
		hold.state = stateReleased
		h.drop(hold)
	}
	cancel := l.cancel
	h.mu.Unlock()
	if lost {
		h.announceLoss(hold)
	}
	if err != nil {
		if lostError := (*LostError)(nil); l == hold && errors.As(err, &lostError) && lostError.Reason == ReasonExpired {
			// The service may still keep our entry. Nobody needs it any more: the holder has just said so.
			l.client.cleaner.add(l.grant, granted)
		}
		return err
	}
	if cancel != nil {
		cancel(nil)
	}
	if !last {
		return nil
	}
	return hold.end(ctx)
}

// end gives the hold back and tells the observer.
func (l *Lease) end(ctx context.Context) error {
	c := l.client
	held := c.observedNow().Sub(l.since)

	err := l.giveBack(ctx)
	if notHeld := (*backend.NotHeldError)(nil); errors.Is(err, ErrNotHeld) {
		lostError := &LostError{Name: l.name, Token: l.Token(), Reason: ReasonEvicted, Err: err}
		if errors.As(err, &notHeld) && notHeld.Reason != "" {
			lostError.Reason = notHeld.Reason
		}
		err = lostError
	}
	if c.set.Observer != nil {
		c.set.Observer.Observe(Event{
			Type: EventReleased, Name: l.name, Owner: c.set.Owner, Token: l.Token(), Held: held, Err: err,
		})
	}
	return err
}

// giveBack releases in the service: with ctx while it lives, and in the background for what that leaves open.
func (l *Lease) giveBack(ctx context.Context) error {
	c := l.client
	if ctx.Err() == nil {
		bounded, cancel := context.WithTimeout(ctx, max(l.grant.TTL, time.Second))
		defer cancel()
		err := c.driver.Release(bounded, l.grant)
		if err == nil || errors.Is(err, ErrNotHeld) {
			return err
		}
		c.cleaner.add(l.grant, granted)
		return err
	}
	job := c.cleaner.add(l.grant, granted)
	grace := time.NewTimer(lateGrace)
	defer grace.Stop()
	select {
	case <-job.done:
		return job.err
	case <-grace.C:
		return fmt.Errorf("%w, the release goes on in the background: %w", ErrUnknown, ctx.Err())
	}
}

// Extend sets the lease length to d from now on, and renews at once: for callers who renew by hand (NoRenew), and for
// work that turns out longer. On error the old deadline stands, or an earlier one if a shorter length may have been taken
// over; ErrLost or ErrNotHeld if the lease is dead. Some drivers grant another length than d: see Deadline.
func (l *Lease) Extend(ctx context.Context, d time.Duration) error {
	c := l.client
	if err := c.set.validateTTL(c.driver.Describe(), d); err != nil {
		return callError("extend", l.name, err)
	}
	if err := l.beginRenewal(ctx); err != nil {
		return callError("extend", l.name, err)
	}
	l = l.hold()
	g, began, left := c.heart.beginExtend(l, d+c.set.LockDelay)
	bounded, cancel := context.WithTimeout(ctx, left) // beyond the deadline there is nothing to extend
	defer cancel()
	err := c.heart.settle(l, began, g.TTL, c.driver.Renew(bounded, []backend.Grant{g})[0])
	if err != nil {
		return callError("extend", l.name, err)
	}
	return nil
}

// beginRenewal waits until no other renewal of the lease is in flight and claims that place. Two renewals with different
// TTLs at once could end in either order.
func (l *Lease) beginRenewal(ctx context.Context) error {
	h, hold := &l.client.heart, l.hold()
	for {
		h.mu.Lock()
		lost := h.expire(hold)
		err := l.errLocked()
		other := hold.renewing
		if err == nil && other == nil {
			hold.renewing = make(chan struct{})
		}
		h.mu.Unlock()
		if lost {
			h.announceLoss(hold)
		}
		if err != nil || other == nil {
			return err
		}
		select {
		case <-other: // each attempt is bounded
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// pushedLoss is what the driver calls when it learns of the loss by itself.
func (l *Lease) pushedLoss(reason Reason) {
	h := &l.client.heart
	h.mu.Lock()
	if l.state == stateNew { // the grant is still on its way to us
		l.lost = &LostError{Name: l.name, Reason: reason}
		h.mu.Unlock()
		return
	}
	lost := h.lose(l, reason, nil)
	h.mu.Unlock()
	if lost {
		h.announceLoss(l)
	}
}
