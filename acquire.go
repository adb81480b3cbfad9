package fencelock

// One name: from the checked request to the lease that begins.
//
//	acquire ─► under (nested.go) ─► begin ─► single ─► obtain ─► Driver.Acquire
//	                                                     │
//	   lease ◄─ handOver ◄─ seal ◄─ hold.start ◄─ accept ◄─ Grant
//
// The acquisition (acquisition.go) owns the grants until then. The caller returns within milliseconds after its
// context has ended.

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/cleanup"
	"github.com/fencelock/fencelock/internal/history"
)

// lateGrace bounds the time for which a call continues after its context has ended: long enough for a healthy service,
// short enough to be imperceptible to the caller.
const lateGrace = 40 * time.Millisecond

// lookAfterWait bounds the look for the holder after WaitAtMost ended an acquire. The caller's own context lives
// then, so there is more time than lateGrace.
const lookAfterWait = 500 * time.Millisecond

// maxOver bounds the consecutive grants that are over on arrival before an acquire fails: one is a paused process,
// three are a broken driver or clock.
const maxOver = 3

// overError says that a grant was over when it arrived. It names the compared values, because the usual cause is a
// driver that leaves SentAt zero or reads another clock, and its author has to see that.
type overError struct {
	// driver is the name from Description; the other fields are the figures that contradict each other.
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
var errWaitedEnough = errors.New("waited for WaitAtMost")

// acquire is Acquire and TryAcquire. Checks without the service come first, in this order: bad
// options, an ended context, a deadlock with a lease that the caller holds already, a closed client.
func (c *Client) acquire(ctx context.Context, name string, wait bool, opts []AcquireOption) (*Lease, error) {
	r, o, err := c.request(name, wait, opts)
	if err != nil {
		return nil, callError("acquire", name, err)
	}
	if err := endOf(ctx); err != nil {
		return nil, callError("acquire", name, err) // no request was sent, so there is no cleanup
	}
	room := &struct { // one piece of memory; a itself is on the stack
		flight flight
		name   [1]string
		r      [1]backend.Request
		lease  [1]*Lease
	}{name: [1]string{name}, r: [1]backend.Request{r}}
	a := acquisition{
		client: c, ctx: ctx, line: newLine(ctx), opts: o, flight: &room.flight,
		names: room.name[:], rs: room.r[:], leases: room.lease[:0],
	}
	bounded, err := a.begin()
	if err != nil {
		return nil, callError("acquire", name, err)
	}
	defer a.end()
	if err = a.single(bounded); err == nil {
		err = a.seal(bounded)
	}
	if err != nil {
		return nil, callError("acquire", name, a.fail(bounded, err))
	}
	a.handOver()
	return a.leases[0], nil
}

// single acquires the one name. One request id is acquired once at a time: the first call with an id owns it and asks
// the driver, others wait for that and join its hold. The id is freed and claimed again after its call failed, or its
// hold has ended.
//
//	first call    owns the id ──► driver ──► lease A
//	second call        waits for the first ──► lease B of the same hold; A is lost with ReasonReplaced
func (a *acquisition) single(bounded context.Context) error {
	c, r := a.client, &a.rs[0]
	if a.outer != nil {
		return a.join(bounded, a.outer.of)
	}
	for a.opts.requestID != "" && a.claimed == nil {
		claim, owner := c.repeats.find(repeatKey{r.Name, a.opts.requestID})
		if owner {
			a.claimed = claim
			break
		}
		h, err := c.repeats.wait(bounded, claim, r)
		if err != nil {
			return err
		}
		if h != nil {
			a.replaces = true
			if err := a.join(bounded, h); err == nil || h.ended() == nil {
				return err
			}
			a.leases, a.joined, a.replaces = a.leases[:0], false, false
		}
		// The call failed, or its hold has ended and is about to free the id: do not wait for that.
		c.repeats.free(claim)
	}
	a.leases = append(a.leases, c.newLease(a.line, a.names[0], &a.opts))
	a.leases[0].of.repeat = a.claimed
	return a.obtain(bounded, 0, false)
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

// obtain asks the driver for the i-th name until it gets a valid grant, and starts its hold. Every attempt has its
// own key, so that a release can only meet its own attempt; again says that the key of the request was sent before.
//
// A grant is invalid if it was over on arrival, or overtaken by a later one: the process was paused. It is released
// before the next attempt, which would otherwise wait for it. After maxOver such grants in a row the acquire fails
// instead of asking indefinitely: a driver that leaves SentAt zero would be asked without a pause
// (TestExpiredGrantsFailTheAcquire).
func (a *acquisition) obtain(bounded context.Context, i int, again bool) error {
	c, h, r := a.client, a.leases[i].of, &a.rs[i]
	for tries := 1; ; tries++ {
		// Before the request leaves: a token that is noted between now and the answer is no sign of a lost history.
		seen, err := c.history.Now()
		if err != nil {
			return err
		}
		c.bind(h, r, again || tries > 1)
		g, err := c.driver.Acquire(bounded, *r)
		if err != nil {
			c.refused(h, err)
			if a.readsAgain && errors.Is(err, ErrHeld) {
				err = fmt.Errorf("%w: %w", deadlock(c.set.Owner, a.names[i], a.names[i]), err)
			}
			return err
		}
		if err = c.admit(h, r, &g, seen); err == nil {
			return nil
		}
		if err = a.useless(bounded, a.leases[i:i+1], err, tries); err != nil {
			return err
		}
	}
}

// admit looks at a grant and starts its hold.
func (c *Client) admit(h *hold, r *backend.Request, g *backend.Grant, seen uint64) error {
	h.mu.Lock()
	h.stage = stageGranted
	h.mu.Unlock()
	if err := c.accept(r, g, seen); err != nil {
		return err
	}
	return h.start(g)
}

// useless rolls back grants that could not be admitted, and decides whether the acquire asks again. It returns the error
// if not: the context has ended, the error is of another kind, it was one attempt, or it was the last of maxOver tries.
//
//	context ended                      its error, and why the grant was invalid
//	over, or overtaken; may wait       once more, up to maxOver in all
//	over, or overtaken; TryAcquire     the error
//	closed, unfit, history lost        the error
func (a *acquisition) useless(bounded context.Context, leases Leases, err error, tries int) error {
	a.client.remember(err)
	a.rollBack(bounded, leases)
	switch {
	case !errors.Is(err, ErrLost) && !errors.Is(err, history.ErrOvertaken):
		return err
	case bounded.Err() != nil:
		return fmt.Errorf("%w: %w", endOf(bounded), err)
	case !a.rs[0].Wait:
		return err
	case tries >= maxOver:
		if over := (*overError)(nil); errors.As(err, &over) {
			return fmt.Errorf("%d grants in a row were invalid: %w: %v", tries, err, over)
		}
		return fmt.Errorf("%d grants in a row were invalid: %w", tries, err)
	}
	return nil
}

// bind records that a request is sent for a hold, with a new key if its key was sent before, without undeclared
// fields, and with the callback for losses. The callback carries the key, so that a late loss of an earlier attempt
// is recognized.
func (c *Client) bind(h *hold, r *backend.Request, again bool) {
	if again {
		r.RequestID = backend.NewRequestID()
	}
	caps := c.driver.Describe().Capabilities
	if !caps.Has(backend.CapDeadlock) {
		r.Under = nil
	}
	h.mu.Lock()
	h.stage, h.grant, h.cleaning = stageAsked, r.Grant(), nil
	h.key, h.pushed, h.lastErr = r.RequestID, "", nil
	h.mu.Unlock()
	if caps.Has(backend.CapPushLoss) {
		key := r.RequestID
		r.Lost = func(loss backend.Loss) { h.pushedLoss(key, loss) }
	}
}

// refused records that the driver did not grant: the service has no entry of the request, unless the error is
// ambiguous.
func (c *Client) refused(h *hold, err error) {
	c.remember(err)
	if cleanup.Ambiguous(err) {
		return
	}
	h.mu.Lock()
	h.stage = stageUnasked
	h.mu.Unlock()
}
