package fencelock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/cleanup"
)

// acquisition is one call that acquires one name or several: the only owner of its grants until the caller has the
// leases. It ends in handOver, or by end, which releases everything: after an error, a panic or runtime.Goexit in the
// driver, in Seal or in Options.Order.
//
//	begin ─► obtain, atOnce, oneByOne or join ─► seal ─► handOver ─► the caller has the leases
//	                       └─────────────────────┴─► fail ─► end ─► rollBack ─► cleaner
//
// It alone reports the acquire to the observer. No event mentions a lease before handOver, and each name for which an
// EventWaiting was reported gets an EventAcquired, EventContended or EventFailed.
//
// The two contexts. ctx is the caller's. bounded is derived from ctx by begin, and also ends with Close and after
// WaitAtMost; see its cause. The hold depends on neither.
type acquisition struct {
	client *Client
	ctx    context.Context
	// line has the leases that the call is made under. outer is the lease of that line with the requested hold, if
	// any: see under.
	line  line
	outer *Lease
	// names and rs are the requested names and their requests, in the caller's order; rs has one key for each name,
	// which bind replaces for a new attempt. leases are in the same order.
	names  []string
	rs     []backend.Request
	opts   acquireOptions
	leases Leases

	flight *flight
	// began is when the call began, for events; zero without an observer. wait reports that it waits.
	began instant
	wait  *waitReport
	// claimed is the request id that this call owns until it ends; nil without RequestID.
	claimed *repeat
	// joined is set if the lease is one more of a hold that other leases have, and replaces if they lose it to this one.
	joined, replaces bool
	// readsAgain: the request is shared under a shared hold of the same name, see under.
	readsAgain bool
	// over: handOver or fail has reported the outcome.
	over bool
}

// errAborted is the error in the event of an acquire that a panic or runtime.Goexit has ended.
var errAborted = errors.New("ended by a panic or runtime.Goexit")

// begin registers the call, or refuses it and reports that: for an error of under, and after Close. The context that
// it returns ends with the call's own, with Close (cause errClosing) and after WaitAtMost (cause errWaitedEnough).
// end has to follow unless there is an error.
//
// One context ends the call for all reasons, so the driver does not need to know Close or WaitAtMost.
func (a *acquisition) begin() (context.Context, error) {
	c := a.client
	if err := a.under(); err != nil {
		a.report(err)
		return nil, err
	}
	bounded, cancel := context.WithCancelCause(a.ctx)
	*a.flight = flight{kind: acquiring, cancel: cancel, inner: a.line.holdsOf(c)}
	err := c.work.begin(a.flight)
	if err == nil && c.work.draining.Load() && !a.flight.inner {
		c.work.leave(a.flight)
		err = ErrClosed
	}
	if err != nil {
		cancel(nil)
		a.report(err)
		return nil, err
	}
	if a.opts.waitAtMost > 0 {
		bounded, a.flight.stop = context.WithTimeoutCause(bounded, a.opts.waitAtMost, errWaitedEnough)
	}
	a.began = c.observedNow()
	c.annotate(a.ctx, a.rs)
	a.wait = a.reportWait(bounded)
	return bounded, nil
}

// end ends the call after begin, and rolls back unless handOver has run.
func (a *acquisition) end() {
	c := a.client
	if !a.over {
		a.rollBack(endedContext(), a.leases)
		a.report(errAborted)
	}
	if a.claimed != nil {
		c.repeats.settle(a.claimed, nil)
	}
	if a.flight.stop != nil {
		a.flight.stop()
	}
	c.work.leave(a.flight)
	a.flight.cancel(nil)
}

// handOver gives the leases to the caller: there is no rollback from now on. It first notifies the observer, and then
// the calls that wait for the same request id.
func (a *acquisition) handOver() {
	a.over = true
	a.wait.end()
	for i, l := range a.leases {
		switch acquired := a.wait.outcome(EventAcquired, i); {
		case a.replaces:
			l.of.replaceOthers(l, a.began, acquired)
		case !a.joined:
			l.of.hand(a.began, acquired)
		}
	}
	if a.claimed != nil {
		a.client.repeats.settle(a.claimed, a.leases[0].of)
		a.claimed = nil
	}
}

// fail rolls everything back, and returns the error that the caller gets, which the observer gets too.
func (a *acquisition) fail(bounded context.Context, err error) error {
	a.rollBack(bounded, a.leases)
	err = a.explain(bounded, err)
	if len(a.rs) == 1 {
		sameRequest(err, &a.rs[0])
	}
	a.report(err)
	return err
}

// rollBack releases the service's entries for leases that the caller will not get, and waits for that while ctx
// lives: the next request of the same call must not meet them. It does not wait for grants that may still come, nor
// longer than a TTL, nor after the end of ctx. Unfinished releases go on in the background.
//
// For example, a process that was paused for a minute gets a grant that was over before it woke up. The service may
// still have the entry, renewed by a session. A second request would stand behind it and wait until it has gone.
func (a *acquisition) rollBack(ctx context.Context, leases Leases) {
	var jobs []*cleanup.Job
	for _, l := range leases {
		if a.joined {
			l.retract(ctx)
		} else if job := l.of.retract(); job != nil && job.Known == cleanup.Granted {
			jobs = append(jobs, job)
		}
	}
	if len(jobs) == 0 {
		return
	}
	patience := time.NewTimer(max(a.rs[0].TTL, time.Second))
	defer patience.Stop()
	for _, job := range jobs {
		select {
		case <-job.Done:
		case <-ctx.Done():
			return
		case <-patience.C:
			return
		}
	}
}

// retract releases a lease that joined others in their hold, which keep it.
func (l *Lease) retract(ctx context.Context) {
	_ = l.release(ctx) // a failed release continues in the background
}

// endedContext returns a context that has ended, for work that must not wait.
func endedContext() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// seal shows the claims of new leases to the resource, if Seal asks for that. The leases are held meanwhile, and renewed
// unless NoRenew forbids it; the context of show carries them, and ends with the lease and with the acquire.
func (a *acquisition) seal(bounded context.Context) error {
	if a.opts.seal == nil {
		return nil
	}
	for _, l := range a.leases {
		if err := a.show(bounded, l); err != nil {
			return fmt.Errorf("seal: %w", err)
		}
	}
	return nil
}

// show is Seal for one lease.
func (a *acquisition) show(bounded context.Context, l *Lease) error {
	ctx, cancel := context.WithCancelCause(l.work().within(bounded))
	defer cancel(nil)
	under := l.Context()
	defer context.AfterFunc(under, func() { cancel(context.Cause(under)) })()
	return a.opts.seal(ctx, l.Claim(l.Name()))
}

// explain completes the error of an acquire after its context has ended: with the reason, and with the holder that it
// waited for. The driver's error stays if it is more than the error of the context.
//
// A wait that ends is the same event whether the caller's context ends it or WaitAtMost, so both answers contain
// ErrHeld with the holder. An unknown outcome is added to that: ErrUnknown alone would hide from the caller that the
// lock is held (TestEndedWaitKeepsTheDriversError). After Close the error is only ErrClosed.
//
//	ended by     the driver answered    the caller's error contains
//	ctx          ctx's error            ctx.Err(), its cause, and ErrHeld if the name is held
//	ctx          ErrUnknown             the same, and ErrUnknown
//	WaitAtMost   the context's error    ErrHeld; without a holder the context's error, and for how long was waited
//	WaitAtMost   ErrUnknown             ErrHeld and ErrUnknown
//	Close        either                 ErrClosed
//	any          another answer         that answer alone
func (a *acquisition) explain(bounded context.Context, err error) error {
	// An answer such as ErrDeadlock, that came just before the end, is the answer.
	late := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrUnknown)
	if bounded.Err() == nil || errors.Is(err, ErrHeld) || !late {
		return err
	}
	cause := context.Cause(bounded)
	switch {
	case cause == errClosing: //nolint:errorlint // this client's Close, and not another's in the caller's cause
		return ErrClosed
	case !a.rs[0].Wait:
		return err
	}
	held := a.heldBy(bounded, err)
	if e, ok := err.(*CallError); ok {
		err = e.Err // the caller's error has a prefix
	}
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
		return fmt.Errorf("%w (%v): %w", cause, a.opts.waitAtMost, err)
	case errors.Is(err, ErrUnknown):
		return fmt.Errorf("%w (%v): %w: %w", cause, a.opts.waitAtMost, held, ErrUnknown)
	}
	return fmt.Errorf("%w (%v): %w", cause, a.opts.waitAtMost, held)
}

// heldBy returns the holder of one of the names after an unsuccessful wait; nil if they are free, or if the service
// cannot be reached. It asks briefly and with its own context, since the caller's has usually ended.
//
// If the driver cannot look, a wait that ended counts as a sign that the name is held, unless the error says that the
// service did not answer.
//
//	driver without CapInspect                 as if the service did not answer
//	another client holds one of the names      a *HeldError with the holder, and until when
//	nobody does, or only this very request    nil: the wait ended for another reason
//	the service does not answer               the name alone; nil after ErrUnknown and ErrUnavailable
func (a *acquisition) heldBy(bounded context.Context, err error) *HeldError {
	name := listed(a.names)
	held := &HeldError{Name: name}
	if errors.Is(err, ErrUnknown) || errors.Is(err, ErrUnavailable) {
		held = nil // in doubt
	}
	inspector := a.client.inspector()
	if inspector == nil {
		return held
	}
	patience := lateGrace
	if errors.Is(context.Cause(bounded), errWaitedEnough) {
		patience = lookAfterWait // the caller's own context lives
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(bounded), patience)
	defer cancel()
	for i := range a.rs {
		state, err := inspector.Look(ctx, a.rs[i].Name)
		if err != nil {
			return held
		}
		for j := range state.Holders {
			h := &state.Holders[j]
			if h.HoldID != a.rs[i].HoldID || a.opts.requestID != "" { // not the possible grant of this very call
				return &HeldError{Name: name, Holder: h.Owner, HoldID: h.HoldID, RetryAfter: h.ExpiresIn}
			}
		}
	}
	return nil
}

// report reports an acquire that ended without the lock: EventContended if another client holds it, else
// EventFailed, for each name.
func (a *acquisition) report(err error) {
	c := a.client
	a.over = true
	if !c.observed() {
		return
	}
	a.wait.end()
	took := time.Duration(0)
	if !a.began.IsZero() { // else it was refused before it began
		took = c.observedNow().Sub(a.began)
	}
	held := (*HeldError)(nil)
	errors.As(err, &held)
	for i := range a.rs {
		e := a.wait.outcome(EventFailed, i)
		e.Name, e.Kind, e.HoldID, e.Wait, e.Err = a.names[i], a.rs[i].Kind, a.rs[i].HoldID, took, err
		if held != nil {
			e.Type, e.Contended, e.Holder = EventContended, true, holderIn(held, e.Holder)
		}
		c.tell(a.ctx, &e)
	}
}

// holderIn returns the holder in an error, completed with the earlier look at the same hold. Without a holder in the
// error it returns seen.
func holderIn(held *HeldError, seen *Holder) *Holder {
	if held.Holder == "" && held.HoldID == "" {
		return seen
	}
	var h Holder
	if seen != nil && seen.HoldID == held.HoldID {
		h = *seen
	}
	h.Owner, h.HoldID, h.ExpiresIn = held.Holder, held.HoldID, held.RetryAfter
	return &h
}

// inspector returns the driver's side of Look, or nil if the driver does not declare it.
func (c *Client) inspector() backend.Inspector {
	if c.need(backend.CapInspect) != nil {
		return nil
	}
	return as[backend.Inspector](c)
}

// holderOf returns the holder of a name for an event; nil if the name is free or the look takes more than a second.
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
