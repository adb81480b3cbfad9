package redis

// This file is one Acquire, as far as it does not wait. A call asks for its name in attempts: each sends one step, or
// two where the first finds the name contended for, and reads what the server says. try repeats an attempt after a
// fault, wait.go repeats it until the name is granted, all.go asks for several names, and background.go gives back what
// attempts without an answer may have left.
//
// What the server may have done is never guessed. An attempt whose outcome is not known is noted in call.unknown; the
// next attempt says that the request may be there already, and a call that ends without a hold hands the list to tidy.

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

// call is one Acquire. It belongs to the goroutine of its caller, so nothing here is locked; the driver that it points
// to is shared.
type call struct {
	d    *Driver
	r    backend.Request
	keys redisscript.Keys
	// The server may have seen the request: in an attempt without an answer, or before this Acquire began
	// (Request.Fresh is false). From then on attempts use the steps that look for the request first, which cost more.
	again bool
	// Attempts without an outcome, at most maxUnknown. What is given up hands them to Driver.giveUp.
	unknown []outcome
}

// call makes the call for r. The keys are computed once: they are the longest strings of a request, and every step of
// it sends them.
func (d *Driver) call(r backend.Request) *call {
	return &call{d: d, r: r, keys: redisscript.KeysOf(d.prefix, r.Name), again: !r.Fresh}
}

// hold returns the hold that the next attempt asks for. Every attempt has a nonce of its own, so that a push for an
// earlier attempt is not taken for an answer to this one, and a removal of the earlier one that arrives late does not
// remove this one. The request id alone was rejected for both: it is the same in all attempts of a request.
func (c *call) hold() redisscript.Hold { return redisconn.HoldOf(c.r, c.d.identity, c.d.nonce()) }

// nonceBase keeps nonces short: they travel in every value and every push.
const nonceBase = 36

// nonce returns a text that no other attempt of this driver has: the present time in microseconds, or one more than the
// last nonce where that is not later. The time is there for people who look at a queue in the server. A plain counter
// would do for the driver.
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

// codes are the steps by which a kind is acquired and kept. An exclusive hold is a string in Redis and the other kinds
// are a hash (see internal/redisscript/shares.lua), so that each has its own steps: exclusive requests, which most are,
// pay nothing for the other kinds.
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

// codesOf returns the steps of a kind.
func codesOf(k backend.Kind) *codes {
	if k == backend.KindExclusive {
		return &exclusiveCodes
	}
	return &groupCodes
}

// ask asks for h once. The answer is that of a wait or of a try, whichever commands it took.
//
// An exclusive name that nobody is known to want is taken by SET NX PX and EXISTS, without the script: measured on
// Redis 7.0, 77 % of what a call of the script costs the server is moving arguments and answers in and out of Lua. If
// the name is held, it is noted as wanted and the script is asked in a second round trip; the calls of the next second
// go to the script at once.
//
// TakeAhead says that SET NX took the lock while others wait for it, which happens where a hold has just run out. That
// grant must not stand, because it would pass by everyone in the queue: GiveWay puts h behind them. From the SET on the
// request is in the server, so a fault in that second step leaves its outcome unknown even if the step itself was never
// sent.
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
	// From now on this name's requests and releases ask the script first.
	c.d.wanted.Note(c.keys.Lock)
	switch {
	case answer != redisscript.TakeAhead:
		return c.run(ctx, h, false, code, value, px)
	case wait:
		return c.run(ctx, h, true, redisscript.GiveWay, value, px, "1")
	}
	return c.run(ctx, h, true, redisscript.GiveWay, value, px, "0")
}

// run runs one step of an attempt for h. there says that an earlier step of the same attempt has put h into the server:
// a fault then leaves something whether or not this step was sent.
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

// attempt asks for h once. Unless it won or failed, lost is the server's answer to a request that was not granted: a
// place in the queue if it waits, otherwise who is in the way.
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
	// The request may have the name already: a reply was lost, or another driver asked with the same id. The answer is
	// then that hold, not h: a second hold for one request would outlive the release of the first.
	if incarnation, ok := redisscript.ParseKept(answer, c.r.RequestID); ok {
		return c.grantOf(incarnation, h, sentAt), true, nil, nil
	}
	return g, false, answer, nil
}

// grantOf is the answer to the caller whose request has another hold than h. Everything that the caller sees is the
// request's own; only the incarnation, by which Renew and Release find the hold, is that of the hold in the server.
func (c *call) grantOf(incarnation string, h redisscript.Hold, sentAt backend.Instant) backend.Grant {
	g := c.grant(h, sentAt)
	g.Incarnation = incarnation + strings.TrimPrefix(g.Incarnation, h.Incarnation())
	return g
}

// grant is the answer to the caller who has h. Its validity counts from sentAt, the instant before the request left:
// the server cannot have started the time to live before that, whereas an answer may have been under way for any time.
func (c *call) grant(h redisscript.Hold, sentAt backend.Instant) backend.Grant {
	return redisconn.Grant(c.r, h, sentAt, c.d.clock.Now())
}

// tries bounds the round trips of one attempt that does not wait. A caller of TryAcquire wants an answer soon, and
// ErrUnavailable after three failures, with pauses of at most 10 and 20 ms between them, is one.
const tries = 3

// try makes one attempt that does not wait. A fault is tried again: the steps for requests that may have been there
// already answer with the hold that exists, so a repetition cannot take the name twice.
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

// once asks once and does not wait. The error is a Failure if the exchange failed, a HeldError if somebody else has the
// name.
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

// failed notes an attempt that ended with err and may have left a hold or a place. Its nonce is abandoned at once: if
// the server offers it the lock before tidy has removed it, the push declines (see push.go) instead of leaving the name
// closed until the offer ends.
//
// Only the last maxUnknown attempts are kept. What an older one left is a place whose client does not accept, or the
// hold that a later attempt of the same request has found.
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
