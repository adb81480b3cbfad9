package fencelock

// The way of an acquire, from the checked request to the lease that begins:
//
//	acquire ─► under (nested.go) ─► begin ─► acquireObserved ─► acquireOnce ─► obtain ─► Driver.Acquire
//	                                                                            │
//	            lease ◄─ sealed ◄─ hold.start ◄─ accept (history.go) ◄─ Grant ◄─┘
//
// Every way out that does not end in a lease gives back what the service may have: failed after an error that leaves
// doubt, undo after a grant that is of no use, sealed after a resource that refused. None of them keeps the caller for
// more than a moment after its context has ended.
//
// The two contexts. ctx is the caller's. bounded is made of it by begin, and also ends with Close and after WaitAtMost;
// its cause tells which of them it was. The hold depends on neither.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/history"
)

// lateGrace is how long a call goes on with a context that has already ended: long enough for a healthy service, short
// enough to count as "at once" for a caller who has stopped waiting.
const lateGrace = 40 * time.Millisecond

// lookAfterWait is how long an acquire that WaitAtMost ended asks who holds the lock. The caller's own context lives
// then, so there is more time than lateGrace.
const lookAfterWait = 500 * time.Millisecond

// maxOver is how many grants in a row may be over when they arrive, before an acquire gives up: one is a process that
// was paused, three are a driver or a clock that is wrong.
const maxOver = 3

// overError says that a grant was over when it arrived. It names what was compared, because the usual cause is a driver
// that leaves SentAt zero or reads another clock, and the author of the driver has to see that.
type overError struct {
	// driver is the name from Description; the others are what did not fit together.
	driver    string
	sent, now instant
	ttl       time.Duration
}

func (e *overError) Error() string {
	return fmt.Sprintf(
		"driver %s granted a hold that was over on arrival: SentAt %d, TTL %v, and the clock reads %d ns, "+
			"%v later", e.driver, e.sent, e.ttl, e.now, e.now.Sub(e.sent))
}

// errWaitedEnough is the cause of a context that WaitAtMost ended.
var errWaitedEnough = errors.New("waited as long as WaitAtMost allows")

// acquire is Acquire and TryAcquire. What can be refused without the service is refused first, in this order: bad
// options, an ended context, a deadlock with a lease that the caller holds already, a closed client.
func (c *Client) acquire(ctx context.Context, name string, wait bool, opts []AcquireOption) (*Lease, error) {
	r, o, err := c.request(name, wait, opts)
	if err != nil {
		return nil, callError("acquire", name, err)
	}
	if err := endOf(ctx); err != nil {
		return nil, callError("acquire", name, err) // nothing was sent, so nothing is left behind
	}
	// The leases that the caller has already: another lease of the same hold may be the answer, or a deadlock.
	line := newLine(ctx)
	switch inner, err := c.under(&line, name, &r, &o); {
	case err != nil:
		return nil, callError("acquire", name, err)
	case inner != nil:
		return inner, nil
	}
	flight := &flight{kind: acquiring}
	bounded, err := c.begin(ctx, flight, o.waitAtMost)
	if err != nil {
		return nil, callError("acquire", name, err)
	}
	defer c.done(flight)
	lease, err := c.acquireObserved(ctx, bounded, line, name, &r, &o)
	if err != nil {
		return nil, callError("acquire", name, err)
	}
	return lease, nil
}

// acquireObserved is acquireOnce with the events of it, and with the error that its caller gets to see. ctx is for the
// events, bounded for the work. Without an observer it does not read the clock, which costs as much as the rest of the
// core.
func (c *Client) acquireObserved(
	ctx, bounded context.Context, line line, name string, r *backend.Request, o *acquireOptions,
) (lease *Lease, err error) {
	began := c.observedNow()
	if c.observed() {
		// over comes before EventAcquired is queued, under the hold's mutex, so that the two stand in this order.
		over := c.tellOfWait(ctx, bounded, []string{name}, []backend.Request{*r})
		lease, err = c.acquireOnce(bounded, line, name, r, o, func(h *hold) { over(); h.tellOfGrant(began) })
		over()
	} else {
		lease, err = c.acquireOnce(bounded, line, name, r, o, nil)
	}
	if err != nil {
		err = c.explain(bounded, name, []backend.Request{*r}, o, err)
		sameRequest(err, r)
		c.tellOfFailure(ctx, name, r, began, err)
	}
	return lease, err
}

// acquireOnce sees to it that one request id is acquired once at a time: the first call with an id owns its place and
// goes on to the driver, others wait for that and get a lease of its hold. Without an id it is obtain. A place whose
// call failed, or whose hold has ended, is removed, and the id looked up again.
//
//	first call    owns the place ──► driver ──► lease A
//	second call        waits for the place ──────────► lease B of the same hold; A is lost with ReasonReplaced
func (c *Client) acquireOnce(
	bounded context.Context, line line, name string, r *backend.Request, o *acquireOptions, granted func(*hold),
) (*Lease, error) {
	if o.requestID == "" {
		lease := c.newLease(line, name, !o.noRenew)
		return c.obtain(bounded, lease, r, o, granted)
	}
	for {
		place, owner := c.repeats.find(repeatKey{r.Name, o.requestID})
		if !owner {
			lease, err := c.repeated(bounded, place, line, r)
			if lease != nil || err != nil {
				return lease, err
			}
			// The call failed, or its hold is over and about to free the place: do not wait for that.
			c.repeats.mu.Lock()
			c.repeats.remove(place)
			c.repeats.mu.Unlock()
			continue
		}
		lease := c.newLease(line, name, !o.noRenew)
		lease.of.repeat = place
		done := false
		defer func() {
			if !done { // also on a panic in the driver or in Seal
				c.repeats.settle(place, nil)
			}
		}()
		lease, err := c.obtain(bounded, lease, r, o, granted)
		if err == nil {
			done = true
			c.repeats.settle(place, lease.of)
		}
		return lease, err
	}
}

// endOf is ctx.Err() with its cause, such as the loss of the lease under which a call is made. The caller branches on
// either. Nil if ctx lives.
func endOf(ctx context.Context) error {
	err := ctx.Err()
	if cause := context.Cause(ctx); err != nil && !errors.Is(cause, err) {
		return fmt.Errorf("%w: %w", err, cause)
	}
	return err
}

// begin counts a call in, or refuses it after Close. The context that it returns ends with the call's own, with Close
// (cause ErrClosed) and after waitAtMost (cause errWaitedEnough), if that is not zero. done has to follow unless there
// is an error.
//
// There is one context for all that ends a call, so the driver gets one and knows nothing of Close or WaitAtMost.
func (c *Client) begin(ctx context.Context, f *flight, waitAtMost time.Duration) (context.Context, error) {
	bounded, cancel := context.WithCancelCause(ctx)
	f.cancel = cancel
	if err := c.work.begin(f); err != nil {
		cancel(nil)
		return nil, err
	}
	if waitAtMost > 0 {
		bounded, f.stop = context.WithTimeoutCause(bounded, waitAtMost, errWaitedEnough)
	}
	return bounded, nil
}

// done ends what begin began: the timer, the place among the flights, and the context.
func (c *Client) done(f *flight) {
	if f.stop != nil {
		f.stop()
	}
	c.work.leave(f)
	f.cancel(nil)
}

// obtain asks the driver until it has a grant that is still of use, and starts the lease; granted is called when the
// hold has begun. Every attempt has a key of its own, so that what is given back in between can only meet the attempt
// it belongs to.
//
// A grant is of no use if it was over on arrival, or overtaken by a later one: the process was paused. It is given back
// before the next attempt is made, which would otherwise wait for it. After maxOver such grants in a row the acquire
// fails instead of asking for ever: a driver that leaves SentAt zero would be asked without a pause
// (TestGrantsThatAreOverEndTheAcquire).
//
// On the error's way out nothing is kept: after an error of the driver see failed, after a grant that was refused see
// undo.
func (c *Client) obtain(
	bounded context.Context, lease *Lease, r *backend.Request, o *acquireOptions, granted func(*hold),
) (*Lease, error) {
	h := lease.of
	for tries := 1; ; tries++ {
		// Before the request leaves: a token that is noted between now and the answer is no sign of a lost history.
		sent, err := c.history.Now()
		if err != nil {
			return nil, err
		}
		c.bind(h, r, tries)
		g, err := c.driver.Acquire(bounded, *r)
		if err != nil {
			c.failed(h.values, err, r.Grant())
			return nil, err
		}
		err = c.accept(r, &g, sent)
		if err != nil && !errors.Is(err, history.ErrOvertaken) {
			// The driver is not fit, or the service has forgotten: asking again would not help.
			c.remember(err)
			c.undo(bounded, h.values, r.Grant()) // by request: it may lack its mark too
			return nil, err
		}
		if err == nil {
			err = h.start(&g, granted)
		}
		if err == nil {
			return lease, c.sealed(bounded, lease, o)
		}
		// The process was paused for so long that the grant has ended, or the client was closed meanwhile.
		c.undo(bounded, h.values, g)
		if err = c.again(bounded, r, err, tries); err != nil {
			return nil, err
		}
	}
}

// sealed shows the claim of a new lease to the resource, if Seal asks for that, and gives the lease back if that fails
// or panics. The lease is held meanwhile, and renewed unless NoRenew forbids it; the context of show ends with the
// lease. Nobody has worked under a lease that could not be sealed, so its minimum hold is not kept.
func (c *Client) sealed(ctx context.Context, lease *Lease, o *acquireOptions) (err error) {
	if o.seal == nil {
		return nil
	}
	h, done := lease.of, false
	defer func() { // also on a panic
		if done {
			return
		}
		h.mu.Lock()
		h.unused = true
		h.mu.Unlock()
		_ = lease.release(ctx) // what is not done at once goes on in the background
	}()
	// The resource is asked for as long as the acquire may last and the lease lives. The release above has the caller's
	// context.
	asking, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	under := lease.Context()
	defer context.AfterFunc(under, func() { cancel(context.Cause(under)) })()
	if err := o.seal(asking, lease.Claim(lease.Name())); err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	done = true
	return nil
}

// again decides whether an acquire asks again after a grant that was of no use, and returns the error if not: the
// context has ended, the error is of another kind, it was one attempt, or it was the last of maxOver tries.
//
//	context ended                      its error, and why the grant was of no use
//	over, or overtaken; may wait       once more, up to maxOver in all
//	over, or overtaken; TryAcquire     the error
//	the client was closed              ErrClosed
func (c *Client) again(bounded context.Context, r *backend.Request, err error, tries int) error {
	useless := errors.Is(err, ErrLost) || errors.Is(err, history.ErrOvertaken)
	switch {
	case bounded.Err() != nil:
		return fmt.Errorf("%w: %w", endOf(bounded), err)
	case !useless, !r.Wait:
		return err
	case tries >= maxOver:
		if over := (*overError)(nil); errors.As(err, &over) {
			return fmt.Errorf("%d grants in a row were of no use: %w: %v", tries, err, over)
		}
		return fmt.Errorf("%d grants in a row were of no use: %w", tries, err)
	}
	return nil
}

// failed looks after what a failed acquire may have left: nothing, unless the answer leaves doubt. It does not wait;
// the job goes on after the acquire has returned.
func (c *Client) failed(ctx context.Context, err error, grants ...backend.Grant) {
	c.remember(err)
	if !ambiguous(err) {
		return
	}
	for _, g := range grants {
		c.cleaner.add(ctx, withoutMinimum(g), maybeInFlight, 0)
	}
}

// withoutMinimum is for a grant that nobody ran under: its name need not stay closed. Released by request alone,
// without token and incarnation, it does not.
func withoutMinimum(g backend.Grant) backend.Grant {
	if g.MinHoldUntil != 0 {
		g.MinHoldUntil, g.Token, g.Incarnation = 0, 0, ""
	}
	return g
}

// undo gives back grants that a call will not use, and waits for that as long as ctx allows: the next request of the
// same call must not meet them. What is not done by then goes on in the background.
//
// For example, a process that was paused for a minute gets a grant that was over before it woke up. The service may
// still have the entry, renewed by a session. A second request would stand behind it and wait until it has gone.
func (c *Client) undo(ctx, values context.Context, grants ...backend.Grant) {
	jobs := make([]*cleanJob, len(grants))
	for i, g := range grants {
		jobs[i] = c.cleaner.add(values, withoutMinimum(g), granted, 0)
	}
	for _, job := range jobs {
		select {
		case <-job.done:
		case <-ctx.Done():
			return
		}
	}
}

// bind makes the request the n-th one for a hold: with a key of its own from the second on, without what the driver
// does not declare, and with the callback for losses. The callback carries the key, so that a loss that is told late is
// known to belong to an earlier attempt.
func (c *Client) bind(h *hold, r *backend.Request, n int) {
	if n > 1 {
		r.RequestID = backend.NewRequestID()
	}
	caps := c.driver.Describe().Capabilities
	if !caps.Has(backend.CapDeadlock) {
		r.Under = nil
	}
	if !caps.Has(backend.CapPushLoss) {
		return
	}
	key := r.RequestID
	h.mu.Lock()
	h.key, h.pushed = key, ""
	h.mu.Unlock()
	r.Lost = func(reason Reason) { h.pushedLoss(key, reason) }
}

// ambiguous reports whether a failed acquire may have left something in the service: if the driver says so, and if it
// gave an answer that is none of the contract's. The latter costs a needless Release now and then; trusting an unknown
// error would cost a name that is closed for a TTL.
//
//	ErrUnknown, alone or with others      true
//	one of the contract's other answers   false: nothing was left
//	the bare end of a context             false: the driver marks what it has sent
//	io.EOF, a bug in a driver             true
func ambiguous(err error) bool {
	if errors.Is(err, ErrUnknown) {
		return true
	}
	for _, definite := range []error{
		ErrHeld, ErrUnavailable, ErrUnsupported, ErrMisconfigured, ErrDeadlock, ErrLimitMismatch, ErrInvalidName,
		ErrInvalidTTL, ErrInvalidOption, ErrHistoryLost, ErrClosed, context.Canceled, context.DeadlineExceeded,
	} {
		if errors.Is(err, definite) {
			return false
		}
	}
	return true
}

// explain completes the error of an acquire whose context has ended: with the reason, and with the holder that it
// waited for. What the driver answered stays if it is more than that the context ended.
//
// A wait that ends is the same event whether the caller's context ends it or WaitAtMost, so both answers contain
// ErrHeld with the holder. Doubt about the outcome is added to that and not put in its place: ErrUnknown alone would
// hide from the caller that somebody has the lock (TestTheEndOfAWaitHidesNoAnswer). After Close the answer is ErrClosed
// and nothing else.
//
//	ended by     the driver answered    the caller's error contains
//	ctx          ctx's error            ctx.Err(), its cause, and ErrHeld if somebody holds the name
//	ctx          ErrUnknown             the same, and ErrUnknown
//	WaitAtMost   the context's error    ErrHeld; without a holder the context's error, and for how long was waited
//	WaitAtMost   ErrUnknown             ErrHeld and ErrUnknown
//	Close        either                 ErrClosed
//	any          another answer         that answer alone
func (c *Client) explain(
	bounded context.Context, name string, rs []backend.Request, o *acquireOptions, err error,
) error {
	// An answer such as ErrDeadlock, that came just before the end, is the answer.
	late := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrUnknown)
	if bounded.Err() == nil || errors.Is(err, ErrHeld) || !late {
		return err
	}
	cause := context.Cause(bounded)
	switch {
	case errors.Is(cause, ErrClosed):
		return ErrClosed
	case !rs[0].Wait:
		return err
	}
	held := c.heldBy(bounded, name, rs, o, err)
	switch {
	case !errors.Is(cause, errWaitedEnough): // the caller's context ended: its error and cause come first
		if !errors.Is(err, bounded.Err()) || !errors.Is(err, cause) {
			err = fmt.Errorf("%w: %w", endOf(bounded), err)
		}
		if held != nil {
			err = fmt.Errorf("%w: %w", err, held)
		}
		return err
	case held == nil:
		return fmt.Errorf("%w (%v): %w", cause, o.waitAtMost, err)
	case errors.Is(err, ErrUnknown):
		return fmt.Errorf("%w (%v): %w: %w", cause, o.waitAtMost, held, ErrUnknown)
	}
	return fmt.Errorf("%w (%v): %w", cause, o.waitAtMost, held)
}

// heldBy tells who holds one of the names that were waited for in vain; nil if nobody does, or if the service cannot be
// reached. It asks with a context of its own, since the caller's has usually ended, and briefly.
//
// Where the driver cannot tell, a wait that ended is taken for a sign that somebody holds the name, except where the
// error says that the service did not answer.
//
//	driver without CapInspect                 as if the service did not answer
//	somebody else holds one of the names      a *HeldError with the holder, and until when
//	nobody does, or only this very request    nil: the wait ended for another reason
//	the service does not answer               the name alone; nil after ErrUnknown and ErrUnavailable
func (c *Client) heldBy(
	ctx context.Context, name string, rs []backend.Request, o *acquireOptions, err error,
) *HeldError {
	held := &HeldError{Name: name}
	if errors.Is(err, ErrUnknown) || errors.Is(err, ErrUnavailable) {
		held = nil // in doubt
	}
	inspector := c.inspector()
	if inspector == nil {
		return held
	}
	patience := lateGrace
	if errors.Is(context.Cause(ctx), errWaitedEnough) {
		patience = lookAfterWait // the caller's own context lives
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	for i := range rs {
		state, err := inspector.Look(ctx, rs[i].Name)
		if err != nil {
			return held
		}
		for j := range state.Holders {
			h := &state.Holders[j]
			if h.HoldID != rs[i].HoldID || o.requestID != "" { // not what this very call may have been granted
				return &HeldError{Name: name, Holder: h.Owner, HoldID: h.HoldID, RetryAfter: h.ExpiresIn}
			}
		}
	}
	return nil
}

// tellOfWait tells the observer that an acquire waits, if it does so for a moment, and for whom. The function that it
// returns ends that, and has to be called; no EventWaiting follows it, so none comes after the EventAcquired of the
// same acquire. It may be called again.
//
// The question is asked on the timer's goroutine, which counts as a flight: Close waits for it. It ends with bounded,
// or after a second for each name.
func (c *Client) tellOfWait(ctx, bounded context.Context, names []string, rs []backend.Request) (over func()) {
	if !c.observed() || !rs[0].Wait {
		return func() {}
	}
	var mu sync.Mutex
	ended := false
	timer := time.AfterFunc(waitingAfter, func() {
		f := &flight{kind: looking}
		if c.work.begin(f) != nil {
			return
		}
		defer c.work.leave(f)
		holders := make([]*Holder, len(rs))
		for i := range rs {
			holders[i] = c.holderOf(bounded, rs[i].Name)
		}
		mu.Lock()
		defer mu.Unlock()
		for i := range rs {
			if !ended {
				c.tell(ctx, Event{
					Type: EventWaiting, Name: names[i], Kind: rs[i].Kind, HoldID: rs[i].HoldID, Holder: holders[i],
					Wait: waitingAfter,
				})
			}
		}
	})
	return func() {
		timer.Stop()
		mu.Lock()
		defer mu.Unlock()
		ended = true
	}
}

// inspector returns the driver's side of Look, or nil if the driver does not declare it.
func (c *Client) inspector() backend.Inspector {
	if c.need(backend.CapInspect) != nil {
		return nil
	}
	return as[backend.Inspector](c)
}

// holderOf looks who holds a name, for an event; nil if nobody does or it cannot be known within a second.
func (c *Client) holderOf(ctx context.Context, full string) *Holder {
	inspector := c.inspector()
	if inspector == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if state, err := inspector.Look(ctx, full); err == nil && len(state.Holders) > 0 {
		return &state.Holders[0]
	}
	return nil
}

// tellOfGrant tells the observer that a lease begins, and notes it: a hold of which the observer never heard ends
// without an event, too. The caller holds mu.
func (h *hold) tellOfGrant(began instant) {
	h.told = true
	if h.client.observed() {
		h.tell(Event{Type: EventAcquired, Wait: h.since.Sub(began), Contended: h.grant.Queued})
	}
}

// tellOfFailure tells the observer that an acquire ended without the lock: EventContended if somebody else has it, else
// EventFailed.
func (c *Client) tellOfFailure(ctx context.Context, name string, r *backend.Request, began instant, err error) {
	if !c.observed() {
		return
	}
	e := Event{
		Type: EventFailed, Name: name, Kind: r.Kind, HoldID: r.HoldID, Wait: c.observedNow().Sub(began), Err: err,
	}
	if held := (*HeldError)(nil); errors.As(err, &held) {
		e.Type, e.Contended = EventContended, true
		if held.Holder != "" || held.HoldID != "" {
			e.Holder = &Holder{Owner: held.Holder, HoldID: held.HoldID, ExpiresIn: held.RetryAfter}
		}
	}
	c.tell(ctx, e)
}
