package redis

// This file is one Acquire that does not wait. An attempt asks for its name in tries. Each try sends one step, or two
// if the name turns out to be contended, and reads the answer. noWait repeats a try after a fault, wait.go repeats it
// until the name is granted, all.go asks for several names, and background.go removes the leftovers of tries without an
// answer.
//
// The driver never guesses whether the server has carried out a try. A try without a known outcome is noted in
// attempt.leftovers; the next try says that the request may be there already, and an attempt that ends without a hold
// hands the list to tidy.

import (
	"context"
	"errors"
	"strings"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// attempt is one Acquire, over all its tries. It belongs to its caller's goroutine and needs no lock; its driver is
// shared.
type attempt struct {
	d    *Driver
	r    backend.Request
	keys redisscript.Keys
	// The server may have seen the request: in a try without an answer, or before this Acquire began (Request.Fresh is
	// false). From then on tries use the steps that look for the request first, which cost more.
	again bool
	// At most maxLeftovers tries without a known outcome. A failed attempt hands them to Driver.giveUp.
	leftovers []leftover
}

// attempt makes the attempt for r. The keys are computed once: they are the longest strings of a request, and every
// step of it sends them.
func (d *Driver) attempt(r backend.Request) *attempt {
	return &attempt{d: d, r: r, keys: d.keys(r.Name), again: !r.Fresh}
}

// hold returns the hold that the next try asks for. Every try has its own nonce. A push for an earlier try is then not
// mistaken for an answer to this one, and a late removal of the earlier try does not remove this one. The request id
// alone cannot tell them apart: all tries of a request have the same.
func (a *attempt) hold() redisscript.Hold {
	return redisconn.HoldOf(a.r, a.d.identity, a.d.nonces.Add(1))
}

// codes are the steps by which a kind is acquired and kept. An exclusive hold is a string in Redis and the other kinds
// are a hash (see internal/redisscript/shares.lua), so that each has its own steps: exclusive requests, which most are,
// do not pay for the other kinds.
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
// Redis 7.0, 77 % of the server's time for a call of the script goes into moving arguments and answers in and out of
// Lua. If the name is held, it is noted as wanted and the script is asked in a second round trip; the calls of the next
// second go straight to the script.
//
// TakeAhead says that SET NX took the lock while others wait for it, which happens where a hold has just run out. That
// grant must not stand, because it would pass by everyone in the queue: GiveWay puts h behind them. From the SET on the
// request is in the server, so a fault in that second step leaves its outcome unknown even if the step itself was never
// sent.
func (a *attempt) ask(ctx context.Context, h redisscript.Hold, wait bool) (
	answer any, sentAt backend.Instant, err error,
) {
	codes := codesOf(a.r.Kind)
	code, again := codes.try, codes.tryAgain
	if wait {
		code, again = codes.wait, codes.waitAgain
	}
	value, px := h.Value(), redisscript.Millis(h.PX)
	switch {
	case a.again:
		return a.run(ctx, h, false, again, value, px, a.r.RequestID, redisscript.Keeps)
	case a.r.Kind != backend.KindExclusive || a.d.wanted.Has(a.keys.Lock):
		return a.run(ctx, h, false, code, value, px)
	}
	answer, sentAt, err = a.run(ctx, h, false, redisscript.Take, value, px)
	if err != nil || answer == redisscript.TakeGranted {
		return answer, sentAt, err
	}
	// From now on this name's requests and releases ask the script first.
	a.d.wanted.Note(a.keys.Lock)
	switch {
	case answer != redisscript.TakeAhead:
		return a.run(ctx, h, false, code, value, px)
	case wait:
		return a.run(ctx, h, true, redisscript.GiveWay, value, px, "1")
	}
	return a.run(ctx, h, true, redisscript.GiveWay, value, px, "0")
}

// run runs one step of a try for h. there says that an earlier step of the same try has put h into the server: a fault
// then leaves something whether or not this step was sent.
func (a *attempt) run(ctx context.Context, h redisscript.Hold, there bool, code string, args ...string) (
	answer any, sentAt backend.Instant, err error,
) {
	s := lines.NewStep(code, a.keys, args...)
	if answer, sentAt, err = a.d.lines.Do(ctx, s); err != nil {
		f := *redisconn.FailureOf(err)
		f.Sent = f.Sent || there
		return nil, 0, a.failed(s, h, &f)
	}
	return answer, sentAt, nil
}

// try asks for h once. Unless it won or failed, lost is the server's answer to a request that was not granted: a place
// in the queue if it waits, otherwise who is in the way.
func (a *attempt) try(ctx context.Context, h redisscript.Hold, wait bool) (
	g backend.Grant, won bool, lost any, err error,
) {
	answer, sentAt, err := a.ask(ctx, h, wait)
	switch {
	case err != nil:
		return g, false, nil, err
	case answer == int64(1):
		return a.grant(h, sentAt), true, nil, nil
	case answer == int64(redisscript.Mismatch):
		return g, false, nil, a.d.mismatch(ctx, a.r.Name)
	}
	// The request may have the name already: a reply was lost, or another driver asked with the same id. The answer is
	// then that hold, not h: a second hold for one request would outlive the release of the first.
	if incarnation, ok := redisscript.ParseKept(answer, a.r.RequestID); ok {
		return a.grantOf(incarnation, h, sentAt), true, nil, nil
	}
	return g, false, answer, nil
}

// mismatch returns the present use of a name. It asks the server once more, for people: the user of the name may have
// gone meanwhile, and without an answer the error names nobody.
func (d *Driver) mismatch(ctx context.Context, name string) error {
	e := &backend.LimitError{Name: name}
	answer, _, err := d.lines.Do(ctx, lines.NewStep(redisscript.Inform, d.keys(name)))
	if err != nil {
		return e
	}
	state, _ := redisscript.ParseState(answer)
	for _, s := range append(state.Shares, state) {
		if !s.Held {
			continue
		}
		e.Holder, e.Limit = s.Hold.Owner, s.Hold.Limit
		switch {
		case s.Hold.Permits > 0:
			e.Kind = backend.KindPermits
		case s.Hold.Shared:
			e.Kind = backend.KindShared
		}
		break
	}
	return e
}

// grantOf returns the grant to a caller whose request already has a hold other than h. Its fields are those of the
// request, except for the incarnation, by which Renew and Release find the hold, and the nonce: both are those of the
// server's hold.
func (a *attempt) grantOf(incarnation string, h redisscript.Hold, sentAt backend.Instant) backend.Grant {
	g := a.grant(h, sentAt)
	g.Incarnation = incarnation + strings.TrimPrefix(g.Incarnation, h.Incarnation())
	g.Nonce = redisscript.NonceOf(redisscript.StartOf(incarnation, a.r.RequestID))
	return g
}

// grant is the answer to the caller who has h. Its validity counts from sentAt, the instant before the request left:
// the server cannot have started the time to live before that, whereas an answer may have been under way for any time.
func (a *attempt) grant(h redisscript.Hold, sentAt backend.Instant) backend.Grant {
	return redisconn.Grant(a.r, h, sentAt, a.d.clock.Now())
}

// tries bounds an attempt that does not wait. A caller of TryAcquire wants an answer soon, and ErrUnavailable after
// three failures, with pauses of at most 10 and 20 ms between them, is one.
const tries = 3

// noWait acquires without waiting. It retries after a fault: the steps for requests that may have been there already
// answer with the hold that exists, so a repetition cannot take the name twice.
func (a *attempt) noWait(ctx context.Context) (backend.Grant, error) {
	for n := 1; ; n++ {
		g, err := a.once(ctx)
		var f *redisconn.Failure
		if err == nil || !errors.As(err, &f) {
			return g, err
		}
		if f.Fatal || n == tries || !redisconn.Pause(ctx, n) {
			return backend.Grant{}, a.d.giveUp(a.leftovers, err)
		}
	}
}

// once asks once and does not wait. The error is a Failure if the exchange failed, a HeldError if somebody else has the
// name.
func (a *attempt) once(ctx context.Context) (backend.Grant, error) {
	g, won, answer, err := a.try(ctx, a.hold(), false)
	if won || err != nil {
		return g, err
	}
	s, ok := redisscript.ParseState(answer)
	if !ok {
		return g, &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
	}
	return g, redisconn.HeldError(a.r.Name, s)
}

// failed records that a try that ended with err may have left a hold or a place in the queue. It abandons the nonce
// immediately: if the server offers it the lock before tidy has removed it, the push declines (see push.go), and the
// name does not stay closed until the offer ends.
//
// Only the last maxLeftovers are kept. An older one is a place with a client that does not accept, or the hold that a
// later try of the same request has found.
func (a *attempt) failed(s *lines.Step, h redisscript.Hold, err error) *redisconn.Failure {
	f := redisconn.FailureOf(err)
	if f.Sent {
		a.again = true
		a.d.waiting.ended.Note(h.Nonce)
		a.leftovers = append(a.leftovers, leftoverOf(a.keys, h, s, f))
		if len(a.leftovers) > maxLeftovers {
			a.leftovers = a.leftovers[1:]
		}
	}
	return f
}
