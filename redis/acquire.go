package redis

import (
	"context"
	"errors"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// call is one Acquire.
type call struct {
	d        *Driver
	r        backend.Request
	keys     redisscript.Keys
	metadata string
	again    bool // the request may be in the server already
	unknown  []outcome
}

// hold returns the hold that the next attempt asks for. Every attempt has a nonce of its own, so that a push for an
// earlier one is not taken for its own; it tells when the attempt was made.
func (c *call) hold() redisscript.Hold {
	return redisscript.Hold{
		PX:       max(c.r.TTL, c.r.MinHold),
		Shared:   c.r.Kind == backend.KindShared,
		Permits:  c.r.Permits,
		Limit:    c.r.Limit,
		Client:   c.d.identity,
		Nonce:    c.d.nonce(),
		Request:  c.r.RequestID,
		ID:       c.r.HoldID,
		Owner:    c.r.Owner,
		Metadata: c.metadata,
	}
}

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

// age returns how long before now the attempt was made that got the hold with that incarnation.
func age(incarnation string, now backend.Instant) time.Duration {
	incarnation, _, _ = strings.Cut(incarnation, "\n")
	made, err := strconv.ParseInt(incarnation[strings.LastIndexByte(incarnation, '|')+1:], nonceBase, 64)
	if err != nil {
		return math.MaxInt64 // not ours
	}
	return time.Duration(now) - time.Duration(made)*time.Microsecond
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

// step returns the attempt's first step.
func (c *call) step(h redisscript.Hold, once, again string) *step {
	if c.again {
		return newStep(again, c.keys, h.Value(), redisscript.Millis(h.PX), c.r.RequestID)
	}
	return newStep(once, c.keys, h.Value(), redisscript.Millis(h.PX))
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
			return backend.Grant{}, c.giveUp(err)
		}
	}
}

// once asks once, and does not wait. An error that is a Failure is one of the exchange.
func (c *call) once(ctx context.Context) (backend.Grant, error) {
	codes, h := codesOf(c.r.Kind), c.hold()
	s := c.step(h, codes.try, codes.tryAgain)
	if err := c.d.batch.do(ctx, s); err != nil {
		return backend.Grant{}, c.failed(s, h, err)
	}
	answer, sentAt := s.answer, s.sentAt
	s.free()
	switch answer {
	case int64(1):
		return c.grant(h, sentAt), nil
	case int64(redisscript.Mismatch):
		return backend.Grant{}, backend.ErrLimitMismatch
	}
	return backend.Grant{}, c.held(answer)
}

// failed notes an attempt that ended with err and may have left something.
func (c *call) failed(s *step, h redisscript.Hold, err error) *redisconn.Failure {
	f := redisconn.FailureOf(err)
	if f.Sent {
		c.again = true
		c.d.waiting.abandon(h.Nonce)
		c.unknown = append(c.unknown, outcomeOf(c.keys, h, s, f))
		if len(c.unknown) > maxUnknown {
			c.unknown = c.unknown[1:]
		}
	}
	return f
}

// giveUp starts to tidy up what attempts may have left, and returns err, as ErrUnknown if there are any.
func (c *call) giveUp(err error) error {
	if len(c.unknown) == 0 {
		return err
	}
	c.d.tidy(c.unknown)
	if errors.Is(err, backend.ErrUnknown) {
		return err
	}
	return &redisconn.Failure{Cause: err, Sent: true}
}

// held reads the answer to an attempt that lost.
func (c *call) held(answer any) error {
	s, ok := redisscript.ParseState(answer)
	if !ok {
		return &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
	}
	return redisconn.HeldError(c.r.Name, s)
}
