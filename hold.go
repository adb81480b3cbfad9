package fencelock

// The hold behind a lease: the core's view of one entry in the service, from the grant to the end. heart (renew.go)
// renews it and ends it by time; this file has its state, the one way in (start) and the one way out (end).
//
// Locks. hold.mu comes first; heart.mu, cleaner.mu, repeats.mu, work.mu and telling.mu may be locked under it, and
// are never held while a hold's is locked. No code of a caller runs under hold.mu: contexts are cancelled after it is
// unlocked, because that runs the caller's callbacks. The only driver method called under a lock is Describe.

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/cleanup"
)

// instant is a moment on the driver's clock.
type instant = backend.Instant

// hold is the core's view of one hold in the service. Usually it has one lease; with Reentrant there are several, and
// with RequestID a later lease may replace an earlier one.
//
//	unasked ──bind──► asked ──driver──► granted ──start──► begun ──end──► ended (cause: released, or lost and why)
//
// Until the caller has the lease, the hold belongs to its acquisition, and only pushedLoss may access it too. A hold
// that has begun is in heart's heap and valid until its deadline, which only a proof moves, and only to later; the
// holder alone may shorten it (Extend). The end is final: later results find a cause and have no effect. Failed
// renewals are an event and no state, since no decision depends on them.
//
// cause and deadline are atomic, so that Lease.Err takes no lock while the lease is held (TestErrTakesNoLock): a
// renewal round that holds locks must not delay the last question before a write.
type hold struct {
	// client, name, values, minHold, metadata and repeat are set before the hold is shared, and never change. name is
	// without the namespace.
	client *Client
	name   string
	// minHold and metadata are from the request, see serves.
	minHold  time.Duration
	metadata map[string]string
	// values is the context of the acquire, for events: its values, and never its end.
	values context.Context
	// repeat is the hold's entry in the client's request ids; nil without RequestID.
	repeat *repeat

	// deadline is an instant, local and conservative: the hold is not believed beyond it. It is written under mu and
	// read without it.
	deadline atomic.Int64
	// cause is nil until the end, and is set once, under mu.
	cause atomic.Pointer[error]

	// mu protects the following fields but index. It is taken before heart.mu.
	mu sync.Mutex
	// stage is the progress of the acquire. Before stageBegun the hold cannot end; pushedLoss stores the reported
	// loss in pushed.
	stage stage
	// grant is the driver's grant, or Request.Grant before that. It has the SentAt of the latest proof, and as TTL
	// the longest that was requested. Its name, owner, ids and token never change after start.
	grant backend.Grant
	// ttl is the length that renewals ask for; a waiting Extend asks for more.
	ttl time.Duration
	// renew: one of the leases is renewed automatically.
	renew bool
	// last: the service no longer extends the hold, so its deadline is final; see backend.Renewal.
	last bool
	// since is when the hold began here.
	since instant
	// gone is when the service's own TTL is over: the deadline and the margin. An expired hold is released then.
	gone instant
	// leases are the live leases; empty from the end on. one is room for the usual single lease.
	leases []*Lease
	one    [1]*Lease
	// key is the key of the attempt in progress, before there is a grant; pushed is set if the driver reported the
	// loss of its grant before it returned the grant.
	key    string
	pushed Reason
	// renewing: a renewal is in flight. No second one is begun.
	renewing bool
	// extends are the calls of Extend that wait for a proof, or for the end. failed: the latest renewal was for one
	// of them, and failed.
	extends []*extension
	failed  bool
	// lastErr is the error of the latest renewal; nil if it was confirmed. In a LostError, it explains why the deadline
	// passed.
	lastErr error
	// suspect: an attempt has failed since the latest renewal that was confirmed, and the observer got an EventSuspect.
	suspect bool
	// handed: a caller has a lease of the hold, and the observer got an EventAcquired. Before that no code runs under
	// the hold, so it is released without its minimum and ends without an event.
	handed bool
	// settled: settleEnding has run.
	settled bool
	// bodies counts the functions of Do and Lead that run under the hold.
	bodies int
	// cleaning is the job that releases the hold in the background, or nil.
	cleaning *cleanup.Job
	// release registers the release while it is in flight. It is a value here, so that a release does not allocate.
	release flight

	// index is the hold's place in heart's heap, and protected by heart.mu; -1 if it is not there.
	index int
}

// stage is the progress of the acquire of a hold, and so determines the possible entry in the service.
type stage uint8

const (
	// stageUnasked: no request was sent, or the service has answered that it has no entry.
	stageUnasked stage = iota
	// stageAsked: a request is under way, or its outcome is unknown.
	stageAsked
	// stageGranted: the driver has granted, and start has not accepted the grant.
	stageGranted
	// stageBegun: start has accepted the grant.
	stageBegun
)

// newLease returns a lease with a new hold, which is not granted yet. Both are one allocation, and the list of leases
// has room for one: a client may hold a hundred thousand (TestLeaseMemory).
func (c *Client) newLease(l line, name string, o *acquireOptions) *Lease {
	both := &struct {
		lease Lease
		hold  hold
	}{}
	h := &both.hold
	h.client, h.name, h.renew, h.values, h.index = c, name, !o.noRenew, l.base, -1
	h.minHold, h.metadata = o.minHold, o.metadata
	both.lease = Lease{of: h, line: l, renew: h.renew}
	h.leases = append(h.one[:0], &both.lease)
	return &both.lease
}

// token returns the token if the tier shows it: the efficiency tier returns zero, even if the driver could fence, so
// that a guard refuses its leases. The caller holds mu, or the hold has begun: it never changes then.
func (h *hold) token() fencing.Token {
	if h.client.tier != Correctness {
		return 0
	}
	return h.grant.Token
}

// believedUntil is the deadline. It needs no lock.
func (h *hold) believedUntil() instant { return instant(h.deadline.Load()) }

// validity returns for how long a proof of ttl is valid after its request was sent: the more holds the client has,
// the shorter, so that all losers can be notified within the margin. It subtracts at most an eighth, so that leases
// with a short TTL keep most of their time in a client with many holds.
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

// start accepts a grant for the request that bind noted: from now on the hold is renewed and can be lost.
//
// A *LostError: it has ended already, because the driver reported a loss before it returned the grant, or because the
// grant took so long that its validity is over. A *ContractError: the driver claims more than it was asked for.
// ErrClosed: the client has been closed. In all cases the hold is not in the heap, and the acquisition releases it.
//
//	sent          granted here            deadline          the service lets others in
//	  │◄─────────────────── validity ──────────┤◄── margin ──►│
//	                   the hold begins, or is over already
func (h *hold) start(g *backend.Grant) error {
	c := h.client
	h.mu.Lock()
	defer h.mu.Unlock()
	now := c.set.Clock.Now()
	if err := c.overstated(g.SentAt, g.TTL, h.grant.TTL, now); err != nil {
		return err
	}
	h.grant, h.ttl, h.since = *g, g.TTL, now
	deadline := g.SentAt.Add(h.validity(g.TTL))
	h.believe(deadline, g.SentAt.Add(g.TTL))
	switch {
	case h.pushed != "":
		return h.lostFor(h.pushed, h.lastErr)
	case now >= deadline:
		return h.lostFor(ReasonExpired,
			&overError{driver: c.driver.Describe().Name, sent: g.SentAt, ttl: g.TTL, now: now})
	}
	at, early := h.renewalDue(g.SentAt, c.spread())
	if !c.heart.schedule(h, at, early, now) {
		return ErrClosed
	}
	h.stage = stageBegun
	return nil
}

// hand gives the hold to its caller: the observer gets the EventAcquired, and the EventLost of a hold that was lost
// before.
func (h *hold) hand(began instant, acquired Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.handed = true
	acquired.Wait, acquired.Contended = h.since.Sub(began), h.grant.Queued
	h.tell(&acquired)
	if h.settled {
		h.tellOfLoss(h.since)
	}
}

// retract ends a hold with a lease that the caller never gets. It returns the job that releases a possible entry in
// the service, or nil.
func (h *hold) retract() *cleanup.Job {
	h.mu.Lock()
	var gone ending
	known := cleanup.Granted
	switch h.stage {
	case stageUnasked:
		h.mu.Unlock()
		return nil
	case stageAsked:
		known = cleanup.InFlight
	case stageBegun:
		if h.cause.Load() == nil {
			gone = h.end(ErrNotHeld)
		}
	}
	h.stage = stageUnasked
	job := h.clean(known, 0)
	h.mu.Unlock()
	gone.cancel()
	return job
}

// lostFor makes the error of a loss. err is the driver's error, if the driver reported the loss.
func (h *hold) lostFor(reason Reason, err error) error {
	lost := &LostError{Name: h.name, Token: h.token(), Reason: reason, Err: err}
	if gone := (*backend.NotHeldError)(nil); errors.As(err, &gone) {
		lost.Text, lost.By, lost.Principal = gone.Text, gone.By, gone.Principal
	}
	return lost
}

// ended returns why the hold is over, and nil while it is held. It reads the clock, and takes no lock while it is held.
// If the deadline has passed and the timer was late, ended itself ends the hold: no caller gets "held" after the
// deadline because a goroutine was not scheduled.
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
	if h.stage != stageBegun || h.cause.Load() != nil || now < h.believedUntil() {
		return ending{}
	}
	return h.end(h.timeUp())
}

// timeUp makes the error of a loss by time. The caller holds mu.
func (h *hold) timeUp() error {
	if h.last {
		return h.lostFor(ReasonMaxHold, nil)
	}
	return h.lostFor(ReasonExpired, h.lastErr)
}

// byTime reports that the hold was lost because its deadline passed: the service may still have the entry.
func (e *LostError) byTime() bool { return e.Reason == ReasonExpired || e.Reason == ReasonMaxHold }

// lose ends the hold if it is held, for a loss that the service or the driver reported. The caller holds mu, and
// hands the result to heart.announce after unlocking.
func (h *hold) lose(reason Reason, err error) ending {
	if h.stage != stageBegun || h.cause.Load() != nil {
		return ending{}
	}
	return h.end(h.lostFor(reason, err))
}

// ending is a hold that has just ended, with the functions that cancel the contexts of its leases; the zero value has
// no hold. It is made under hold.mu and carried out without it, in two steps: cancel, which notifies the holders, and
// heart.settleEnding, which does the rest.
//
//	timer, driver, Release, Close ─► end ─► ending ─► cancel ─► settleEnding ─► clean-up, event
type ending struct {
	hold  *hold
	cause error
	// first is apart from others, so that the usual single lease costs no slice.
	first  context.CancelCauseFunc
	others []context.CancelCauseFunc
}

// cancel ends the contexts. After a release the cause is context.Canceled, as usual; after a
// loss it is the *LostError.
func (e *ending) cancel() {
	if e.first == nil {
		return
	}
	cause := endCause(e.cause)
	// Cancelling runs the callers' functions on the contexts, so this may take a while. It never runs under a mutex.
	e.first(cause)
	for _, cancel := range e.others {
		cancel(cause)
	}
}

// end is the one way for a hold to end. The caller holds mu and has seen that it is held. It stores the cause first,
// so that every later look sees the end; removes the hold from the heap and from the table of request ids; and
// answers the waiting Extends. It does not cancel contexts: see ending.
func (h *hold) end(cause error) ending {
	if cause == ErrNotHeld { //nolint:errorlint // released, and not lost for another reason
		h.cause.Store(&errNotHeld)
	} else {
		lost := cause
		h.cause.Store(&lost)
	}
	h.client.heart.drop(h)
	h.client.work.wakeAll()
	h.client.repeats.drop(h)
	told := ending{hold: h, cause: cause}
	told.take(h.leases)
	h.leases = nil
	h.answer(func(*extension) bool { return true }, cause)
	return told
}

// take collects the functions that cancel the contexts of leases. A lease without calls of Context has no context to
// cancel.
func (e *ending) take(leases []*Lease) {
	for _, l := range leases {
		for _, cancel := range l.cancels {
			if e.first == nil {
				e.first = cancel
			} else {
				e.others = append(e.others, cancel)
			}
		}
	}
}

// renewalDue returns when a renewal should follow a proof that was sent at sent, and how much earlier it may ride along
// with others. The caller holds mu.
//
// A renewal is due a third of the validity later, or up to a fifth of that sooner: there is time to repeat an attempt
// that fails, and clients that began together drift apart. An Extend that waits is due at once. A hold that is not
// renewed, or extended no more, is due at its deadline.
func (h *hold) renewalDue(sent instant, spread float64) (at instant, early time.Duration) {
	deadline := h.believedUntil()
	switch {
	case len(h.extends) > 0:
		return sent, 0
	case !h.renew || h.last:
		return deadline, 0
	}
	validity := deadline.Sub(sent)
	return sent.Add(time.Duration(float64(validity) / 3 * spread)), validity / 6
}

// pushedLoss is called by the driver when it detects the loss of the grant to the attempt with key. It may come
// before the grant: then start finds it. It may come for an earlier attempt of the same acquire, with another key:
// then it has no effect. A loss without a reason is a fault of the driver, and a loss all the same.
//
// A driver that detects a lost history reports it for each hold; the first report ends all of them.
func (h *hold) pushedLoss(key string, loss backend.Loss) {
	reason := loss.Reason
	var err error
	h.mu.Lock()
	switch {
	case reason == "":
		reason, err = ReasonEvicted, h.client.broken("it reported a loss without a reason")
	case loss.Text != "":
		err = loss.NotHeld(h.grant.Name)
	}
	if h.key != key { // an earlier attempt's
		h.mu.Unlock()
		return
	}
	if h.stage != stageBegun {
		h.pushed, h.lastErr = reason, err
	}
	gone := h.lose(reason, err)
	h.mu.Unlock()
	h.client.heart.announce(&gone, h.client.set.Clock.Now())
	if reason == ReasonHistoryLost {
		h.client.forgot(&backend.HistoryError{What: "history", Was: "kept", Now: "lost, says the driver"})
	}
}

// add makes l one more lease of the hold. The caller holds mu and has seen that the hold is held.
func (h *hold) add(l *Lease) {
	h.leases = append(h.leases, l)
	if l.renew && !h.renew {
		h.renew = true
		now := h.client.set.Clock.Now()
		at, early := h.renewalDue(h.grant.SentAt, h.client.spread())
		h.client.heart.schedule(h, max(at, now), early, now)
	}
}

// leave removes l from the leases that live, while others go on with the hold. The caller holds mu.
func (h *hold) leave(l *Lease) {
	h.leases = slices.DeleteFunc(h.leases, func(other *Lease) bool { return other == l })
	h.renew = slices.ContainsFunc(h.leases, func(other *Lease) bool { return other.renew })
}

// enter and exit count the functions of Do and Lead that run under the hold. The last of them releases a hold that
// Close has ended: until then a function may still be writing.
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

// returnIfClosed releases the hold if Close has ended it and no function runs under it. The caller holds mu.
func (h *hold) returnIfClosed() {
	if lost := (*LostError)(nil); h.bodies == 0 && errors.As(h.causeOrNil(), &lost) && lost.Reason == ReasonClosed {
		h.clean(cleanup.Granted, 0)
	}
}

// returned is the grant as it is released. If no caller had the hold, the grant names its request alone, which
// releases it without its minimum, even if the driver's incarnation of it is unknown.
func (h *hold) returned() backend.Grant {
	if h.handed {
		return h.grant
	}
	g := h.grant
	g.Token, g.Nonce, g.Generation = 0, fencing.Nonce{}, fencing.Generation{}
	g.Incarnation, g.SentAt, g.MinHoldUntil = "", 0, 0
	return g
}

// clean releases the hold in the background after a while; immediately if it waits for that already and after is not
// positive. There is one job for a hold, however many reasons. The caller holds mu.
func (h *hold) clean(known cleanup.Certainty, after time.Duration) *cleanup.Job {
	if h.cleaning == nil {
		h.cleaning = h.client.cleaner.Add(h.values, h.returned(), known, after)
	} else if after <= 0 {
		h.client.cleaner.Hurry(h.cleaning)
	}
	return h.cleaning
}
