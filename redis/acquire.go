package redis

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// call is one Acquire.
type call struct {
	d       *Driver
	r       backend.Request
	keys    redisscript.Keys
	again   bool // the request may be in the server already
	unknown []outcome
}

func (d *Driver) call(r backend.Request) *call {
	return &call{d: d, r: r, keys: redisscript.KeysOf(d.prefix, r.Name), again: !r.Fresh}
}

// hold returns the hold that the next attempt asks for. Every attempt has a nonce of its own, so that a push for an
// earlier one is not taken for its own; it tells when the attempt was made.
func (c *call) hold() redisscript.Hold { return redisconn.HoldOf(c.r, c.d.identity, c.d.nonce()) }

const nonceBase = 36

// nonce returns the present time in microseconds, or the next one that was not taken.
func (d *Driver) nonce() string {
	now := int64(d.clock.Now()) / int64(time.Microsecond)
	for {
		last := d.nonces.Load()
		next := max(now, last+1)
		if d.nonces.CompareAndSwap(last, next) {
			return strconv.FormatInt(next, nonceBase)
		}
	}
}

// codes are the steps by which a kind is acquired and kept.
type codes struct{ wait, waitAgain, try, tryAgain, renew, accept string }

var (
	exclusiveCodes = codes{
		redisscript.Wait, redisscript.WaitAgain, redisscript.Try, redisscript.TryAgain, redisscript.Renew,
		redisscript.Accept,
	}
	groupCodes = codes{
		redisscript.GroupWait, redisscript.GroupWaitAgain, redisscript.GroupTry, redisscript.GroupTryAgain,
		redisscript.GroupRenew, redisscript.GroupAccept,
	}
)

func codesOf(k backend.Kind) *codes {
	if k == backend.KindExclusive {
		return &exclusiveCodes
	}
	return &groupCodes
}

// ask asks for h once. The answer is that of a wait or a try: a name that nobody is known to want is taken without the
// script, which is asked only if that was not possible.
func (c *call) ask(ctx context.Context, h redisscript.Hold, wait bool) (answer any, sentAt backend.Instant, err error) {
	codes := codesOf(c.r.Kind)
	code, again := codes.try, codes.tryAgain
	if wait {
		code, again = codes.wait, codes.waitAgain
	}
	value, px := h.Value(), redisscript.Millis(h.PX)
	switch {
	case c.again:
		return c.run(ctx, h, false, again, value, px, c.r.RequestID, redisscript.Keeps)
	case c.r.Kind != backend.KindExclusive || c.d.wanted.Has(c.keys.Lock):
		return c.run(ctx, h, false, code, value, px)
	}
	answer, sentAt, err = c.run(ctx, h, false, redisscript.Take, value, px)
	if err != nil || answer == redisscript.TakeGranted {
		return answer, sentAt, err
	}
	c.d.wanted.Note(c.keys.Lock)
	switch {
	case answer != redisscript.TakeAhead:
		return c.run(ctx, h, false, code, value, px)
	case wait:
		return c.run(ctx, h, true, redisscript.GiveWay, value, px, "1")
	}
	return c.run(ctx, h, true, redisscript.GiveWay, value, px, "0")
}

// run runs one step of an attempt for h, which may be there already.
func (c *call) run(ctx context.Context, h redisscript.Hold, there bool, code string, args ...string) (
	answer any, sentAt backend.Instant, err error,
) {
	s := newStep(code, c.keys, args...)
	if answer, sentAt, err = c.d.batch.do(ctx, s); err != nil {
		f := *redisconn.FailureOf(err)
		f.Sent = f.Sent || there
		return nil, 0, c.failed(s, h, &f)
	}
	return answer, sentAt, nil
}

// attempt asks for h once. Unless it won, or failed, lost is the answer of a step that granted nothing.
func (c *call) attempt(ctx context.Context, h redisscript.Hold, wait bool) (
	g backend.Grant, won bool, lost any, err error,
) {
	answer, sentAt, err := c.ask(ctx, h, wait)
	switch {
	case err != nil:
		return g, false, nil, err
	case answer == int64(1):
		return c.grant(h, sentAt), true, nil, nil
	case answer == int64(redisscript.Mismatch):
		return g, false, nil, backend.ErrLimitMismatch
	}
	// The request may hold the name already, through another client or a later attempt.
	if incarnation, ok := redisscript.ParseKept(answer, c.r.RequestID); ok {
		return c.grantOf(incarnation, h, sentAt), true, nil, nil
	}
	return g, false, answer, nil
}

// grantOf is the answer to the caller whose request has another hold than h.
func (c *call) grantOf(incarnation string, h redisscript.Hold, sentAt backend.Instant) backend.Grant {
	g := c.grant(h, sentAt)
	g.Incarnation = incarnation + strings.TrimPrefix(g.Incarnation, h.Incarnation())
	return g
}

// grant is the answer to the caller.
func (c *call) grant(h redisscript.Hold, sentAt backend.Instant) backend.Grant {
	return redisconn.Grant(c.r, h, sentAt, c.d.clock.Now())
}

const tries = 3 // round trips of one attempt without Wait

// try makes one attempt. Faults are tried again, since the script makes that harmless.
func (c *call) try(ctx context.Context) (backend.Grant, error) {
	for n := 1; ; n++ {
		g, err := c.once(ctx)
		var f *redisconn.Failure
		if err == nil || !errors.As(err, &f) {
			return g, err
		}
		if f.Fatal || n == tries || !redisconn.Pause(ctx, n) {
			return backend.Grant{}, c.d.giveUp(c.unknown, err)
		}
	}
}

// once asks once, and does not wait. An error that is a Failure is one of the exchange.
func (c *call) once(ctx context.Context) (backend.Grant, error) {
	g, won, answer, err := c.attempt(ctx, c.hold(), false)
	if won || err != nil {
		return g, err
	}
	s, ok := redisscript.ParseState(answer)
	if !ok {
		return g, &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
	}
	return g, redisconn.HeldError(c.r.Name, s)
}

// failed notes an attempt that ended with err and may have left something.
func (c *call) failed(s *step, h redisscript.Hold, err error) *redisconn.Failure {
	f := redisconn.FailureOf(err)
	if f.Sent {
		c.again = true
		c.d.waiting.ended.Note(h.Nonce)
		c.unknown = append(c.unknown, outcomeOf(c.keys, h, s, f))
		if len(c.unknown) > maxUnknown {
			c.unknown = c.unknown[1:]
		}
	}
	return f
}
