package fencelock

// The hold behind a lease: what the core believes of one entry in the service, from the grant to the end. Renewal and
// loss by time are heart's (renew.go); this file has the state itself, the one way in (start) and the one way out
// (end).
//
// Locks. hold.mu comes first; heart.mu, cleaner.mu, repeats.mu, work.mu and telling.mu may be taken under it, and none
// of them is held while a hold's is taken. Nothing that belongs to a caller runs under hold.mu: contexts are cancelled
// after it is released, because cancelling one runs whatever the caller has hung on it. Of the driver only Describe is
// called under a lock.

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// instant is a moment on the driver's clock.
type instant = backend.Instant

// hold is one hold in the service, and what the core believes of it. Usually one lease stands for it; with Reentrant
// there are several, and with RequestID a later one may replace an earlier one.
//
//	new ──start──► held ──end──► ended (cause: released, or lost and why)
//
// A new one is known to its acquire only; pushedLoss may meet it, and is remembered. A held one stands in heart's heap
// and is believed until its deadline, which only a proof moves, and only to later; the holder alone may shorten it
// (Extend). The end is final: whatever arrives later finds a cause and changes nothing. Whether renewals fail meanwhile
// is an event and no state, since nothing is decided by it.
//
// cause and deadline are atomic, so that Lease.Err takes no lock while the lease is held (TestErrTakesNoLock): a
// renewal round that holds locks must not delay the last question before a write.
type hold struct {
	// client, name, renew, values and repeat are set before the hold is shared, and never change. name is without the
	// namespace.
	client *Client
	name   string
	// renew: by itself, and not only for Extend. Unset by NoRenew.
	renew bool
	// values is the context of the acquire, for events: its values, and never its end.
	values context.Context
	// repeat is what the client finds the hold by; nil without RequestID.
	repeat *repeat

	// deadline is an instant, local and conservative: the hold is not believed beyond it. It is written under mu and
	// read without it.
	deadline atomic.Int64
	// cause is nil until the end, and is set once, under mu.
	cause atomic.Pointer[error]

	// mu protects the following fields but index. It is taken before heart.mu.
	mu sync.Mutex
	// began: start has accepted the hold. Until then nothing ends it; what pushedLoss learns is kept in pushed.
	began bool
	// grant is what the driver granted, with the SentAt of the latest proof. Its name, owner, ids and token never
	// change.
	grant backend.Grant
	// ttl is what renewals ask for: grant.TTL, or what Extend wants instead.
	ttl time.Duration
	// since is when the hold began here.
	since instant
	// gone is when the service's own TTL is over: the deadline and the margin. A hold that expired is given back then.
	gone instant
	// leases are those that live; empty from the end on. one is room for the usual one.
	leases []*Lease
	one    [1]*Lease
	// key is the attempt's that is under way, before there is a grant; pushed is set if the driver told of the loss of
	// what it granted to that attempt before it told of the grant.
	key    string
	pushed Reason
	// renewing: a renewal is in flight. No second one is begun.
	renewing bool
	// extends are those that wait for a proof, or for the end.
	extends []*extension
	// lastErr is the error of the latest renewal; nil if it was confirmed. It tells in a LostError why the deadline
	// passed.
	lastErr error
	// told: the observer knows of the hold, and will be told of its end.
	told bool
	// unused: nobody ran under the hold, so its minimum need not be kept.
	unused bool
	// bodies counts the functions of Do and Lead that run under the hold.
	bodies int
	// cleaning is the job that gives the hold back in the background; nil if there is none.
	cleaning *cleanJob
	// release counts the release in while it is in flight. It is a value here, so that a release allocates none.
	release flight

	// index is the hold's place in heart's heap, and protected by heart.mu; -1 if it is not there.
	index int
}

// newLease returns a lease with a hold of its own, which is not granted yet. Both are one piece of memory, and the list
// of leases has room for the one that is usual: a client may hold a hundred thousand (TestWhatLeasesCost).
func (c *Client) newLease(l line, name string, renew bool) *Lease {
	both := &struct {
		lease Lease
		hold  hold
	}{}
	h := &both.hold
	h.client, h.name, h.renew, h.values, h.index = c, name, renew, l.base, -1
	both.lease = Lease{of: h, line: l}
	h.leases = append(h.one[:0], &both.lease)
	return &both.lease
}

// token returns the token as the tier shows it: the efficiency tier shows none, also where the driver could fence, so
// that a guard in front of data refuses its leases. The caller holds mu, or the hold has begun: it never changes then.
func (h *hold) token() fencing.Token {
	if h.client.tier != Correctness {
		return 0
	}
	return h.grant.Token
}

// believedUntil is the deadline. It needs no lock.
func (h *hold) believedUntil() instant { return instant(h.deadline.Load()) }

// validity is how long after its sending a proof of ttl is believed: the more holds the client has, the less, so that
// all who lose together can be told within the margin. It takes no more than an eighth, so that leases of a short TTL
// keep most of their time in a client of many.
//
//	leases    TTL    believed for
//	   100   30 s    29.65 s
//	10,000   30 s    29.57 s
//	10,000    1 s     0.86 s
func (h *hold) validity(ttl time.Duration) time.Duration {
	c := h.client
	v := c.set.validity(c.driver.Describe(), ttl)
	return v - min(time.Duration(c.heart.size.Load()/1000)*tellThousand, v/8)
}

// believe moves the deadline, and the instant at which the service's own TTL is over. The caller holds mu and has
// decided that the deadline may move.
func (h *hold) believe(until, gone instant) {
	h.deadline.Store(int64(until))
	h.gone = gone
}

// start puts a granted hold under watch, and calls granted, if not nil, before anything else can happen to it: the
// observer hears of the grant before it can hear of a loss.
//
// A *LostError: it has ended already, because the driver told of a loss before it told of the grant, or because the
// grant took so long that its validity is over. ErrClosed: the client has been closed. In both cases the hold is not in
// the heap, and the caller gives the grant back.
//
//	sent          granted here            deadline          the service lets others in
//	  │◄─────────────────── validity ──────────┤◄── margin ──►│
//	                   the hold begins, or is over already
func (h *hold) start(g *backend.Grant, granted func(*hold)) error {
	c := h.client
	h.mu.Lock()
	defer h.mu.Unlock()
	now := c.set.Clock.Now()
	h.grant, h.ttl, h.since = *g, g.TTL, now
	deadline := g.SentAt.Add(h.validity(g.TTL))
	h.believe(deadline, g.SentAt.Add(g.TTL))
	switch {
	case h.pushed != "":
		return h.lostFor(h.pushed, nil)
	case now >= deadline:
		return h.lostFor(ReasonExpired,
			&overError{driver: c.driver.Describe().Name, sent: g.SentAt, ttl: g.TTL, now: now})
	}
	at, early := h.renewalDue(g.SentAt, c.spread())
	if !c.heart.schedule(h, at, early, now) {
		return ErrClosed
	}
	h.began = true
	if granted != nil {
		granted(h)
	}
	return nil
}

// lostFor makes the error of a loss. err is what the driver answered, if the loss was learnt from an answer.
func (h *hold) lostFor(reason Reason, err error) error {
	return &LostError{Name: h.name, Token: h.token(), Reason: reason, Err: err}
}

// ended returns why the hold is over, and nil while it is held. It reads the clock, and takes no lock while it is held.
// If the deadline has passed and the timer was late, the caller itself ends the hold here: nobody is told "held" after
// the deadline because a goroutine was not scheduled.
func (h *hold) ended() error {
	if cause := h.cause.Load(); cause != nil {
		return *cause
	}
	now := h.client.set.Clock.Now()
	if now < h.believedUntil() {
		return nil
	}
	h.mu.Lock()
	tell := h.expire(now)
	h.mu.Unlock()
	h.client.heart.announce(&tell, now)
	return h.causeOrNil()
}

// causeOrNil returns the cause without looking at the clock.
func (h *hold) causeOrNil() error {
	if cause := h.cause.Load(); cause != nil {
		return *cause
	}
	return nil
}

// expire ends the hold if its deadline has passed. The caller holds mu, and hands the result to heart.announce after
// unlocking.
func (h *hold) expire(now instant) ending {
	if !h.began || h.cause.Load() != nil || now < h.believedUntil() {
		return ending{}
	}
	return h.end(h.lostFor(ReasonExpired, h.lastErr))
}

// lose ends the hold if it is held, for what the service or the driver said. The caller holds mu, and hands the result
// to heart.announce after unlocking.
func (h *hold) lose(reason Reason, err error) ending {
	if !h.began || h.cause.Load() != nil {
		return ending{}
	}
	return h.end(h.lostFor(reason, err))
}

// ending is a hold that has just ended, and what ends the contexts of its leases. The zero value: none has. It is made
// under hold.mu and carried out without it, in two steps: cancel, which tells the holders, and heart.settleEnding,
// which does what nobody waits for.
//
//	timer, driver, Release, Close ─► end ─► ending ─► cancel ─► settleEnding ─► clean-up, event
type ending struct {
	hold  *hold
	cause error
	// first is apart from others, so that the usual single lease costs no slice.
	first  context.CancelCauseFunc
	others []context.CancelCauseFunc
}

// cancel ends the contexts. After a release the cause is context.Canceled, as of any context that is done with; after a
// loss it is the *LostError.
func (e *ending) cancel() {
	if e.first == nil {
		return
	}
	cause := e.cause
	if cause == ErrNotHeld { //nolint:errorlint // released, and not lost for another reason
		cause = nil
	}
	// Cancelling runs what callers have hung on the contexts, so this may take a while. It never runs under a mutex.
	e.first(cause)
	for _, cancel := range e.others {
		cancel(cause)
	}
}

// end is the one way for a hold to end. The caller holds mu and has seen that it is held. It stores the cause first, so
// that everybody who looks from now on sees the end; takes the hold out of the heap and out of the table of request
// ids; and answers the Extends that wait. It cancels nothing: see ending.
func (h *hold) end(cause error) ending {
	if cause == ErrNotHeld { //nolint:errorlint // released, and not lost for another reason
		h.cause.Store(&errNotHeld)
	} else {
		lost := cause
		h.cause.Store(&lost)
	}
	h.client.heart.drop(h)
	h.client.repeats.drop(h)
	told := ending{hold: h, cause: cause}
	told.take(h.leases)
	h.leases = nil
	for _, x := range h.extends {
		x.done <- cause
	}
	h.extends = nil
	return told
}

// take collects what ends the contexts of leases. A lease whose context nobody has asked for has nothing to end.
func (e *ending) take(leases []*Lease) {
	for _, l := range leases {
		switch {
		case l.cancel == nil:
		case e.first == nil:
			e.first = l.cancel
		default:
			e.others = append(e.others, l.cancel)
		}
	}
}

// renewalDue returns when a renewal should follow a proof that was sent at sent, and how much earlier it may ride along
// with others. The caller holds mu.
//
// A renewal is due a third of the validity later, or up to a fifth of that sooner: there is time to repeat an attempt
// that fails, and clients that began together drift apart. An Extend that waits is due at once. A hold that is not
// renewed is due at its deadline.
func (h *hold) renewalDue(sent instant, spread float64) (at instant, early time.Duration) {
	deadline := h.believedUntil()
	switch {
	case len(h.extends) > 0:
		return sent, 0
	case !h.renew:
		return deadline, 0
	}
	validity := deadline.Sub(sent)
	return sent.Add(time.Duration(float64(validity) / 3 * spread)), validity / 6
}

// pushedLoss is what the driver calls when it learns by itself of the loss of what was granted to the attempt with key.
// It may come before the grant: then start finds it. It may come for an earlier attempt of the same acquire, whose key
// differs: then it means nothing any more.
//
// A driver that learns that its whole service has forgotten tells it of each hold; the first one ends all of them.
func (h *hold) pushedLoss(key string, reason Reason) {
	h.mu.Lock()
	if h.key != key { // an earlier attempt's
		h.mu.Unlock()
		return
	}
	if !h.began {
		h.pushed = reason
	}
	tell := h.lose(reason, nil)
	h.mu.Unlock()
	h.client.heart.announce(&tell, h.client.set.Clock.Now())
	if reason == ReasonHistoryLost {
		h.client.forgot(&backend.HistoryError{What: "history", Was: "kept", Now: "lost, says the driver"})
	}
}

// leave takes l out of the leases that live, while others go on with the hold. The caller holds mu.
func (h *hold) leave(l *Lease) {
	if i := slices.Index(h.leases, l); i >= 0 {
		h.leases = slices.Delete(h.leases, i, i+1)
	}
}

// enter and exit count the functions of Do and Lead that run under the hold. A hold that Close has ended is given back
// by the last of them: until then its function may still be writing.
func (h *hold) enter() {
	h.mu.Lock()
	h.bodies++
	h.mu.Unlock()
}

// exit is the end of enter.
func (h *hold) exit() {
	h.mu.Lock()
	h.bodies--
	h.returnIfClosed()
	h.mu.Unlock()
}

// returnIfClosed has the hold given back if Close has ended it and nothing runs under it. The caller holds mu.
func (h *hold) returnIfClosed() {
	if lost := (*LostError)(nil); h.bodies == 0 && errors.As(h.causeOrNil(), &lost) && lost.Reason == ReasonClosed {
		h.clean(0)
	}
}

// returned is the grant as it is given back: without its minimum if nobody has worked under it.
func (h *hold) returned() backend.Grant {
	if h.unused {
		return withoutMinimum(h.grant)
	}
	return h.grant
}

// clean has the hold given back in the background, after a while; at once if it waits for that already and after is not
// positive. There is one job for a hold, however many reasons. The caller holds mu.
func (h *hold) clean(after time.Duration) *cleanJob {
	if h.cleaning == nil {
		h.cleaning = h.client.cleaner.add(h.values, h.returned(), granted, after)
	} else if after <= 0 {
		h.client.cleaner.hurry(h.cleaning)
	}
	return h.cleaning
}
