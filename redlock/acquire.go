package redlock

import (
	"context"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// call is one Acquire.
type call struct {
	d        *Driver
	r        backend.Request
	keys     redisscript.Keys
	patience time.Duration // with silent nodes
	again    bool          // the request may be in the servers already
	unsure   error         // why it is not known what an attempt left somewhere
}

// Acquire takes a lock when a majority of the servers has voted for the request. With Wait it stands in the queues of
// all servers until it is granted or ctx ends; what it left anywhere is taken back then, in the background where a
// server does not answer. The same RequestID again gets the same hold. Errors wrap backend.ErrHeld, ErrUnavailable (no
// majority answered, nothing is left), ErrUnknown (something may be left), or ctx's error.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	g, err := d.acquire(ctx, r)
	return g, redisconn.CallError(ctx, driverName, "acquire", r.Name, err)
}

func (d *Driver) acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if err := d.valid(r); err != nil {
		return backend.Grant{}, err
	}
	if err := redisconn.Begin(ctx, r.Wait, d.begin); err != nil {
		return backend.Grant{}, err
	}
	defer d.end()
	c := &call{
		d: d, r: r, keys: redisscript.KeysOf(d.o.KeyPrefix, r.Name), again: !r.Fresh,
		patience: d.nodeTimeout(r.TTL),
	}
	if r.Wait {
		return c.wait(ctx)
	}
	return c.try(ctx)
}

// valid refuses what the core has refused already, for those who use the driver directly, and minimum holds that a
// server could forget and vote again.
func (d *Driver) valid(r backend.Request) error {
	if err := kit.Validate(d.Describe(), r); err != nil {
		return err
	}
	if r.MinHold < 0 || r.MinHold > d.o.MaxTTL {
		return &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "MinHold", Value: r.MinHold.String(),
			Why: fmt.Sprintf("it is negative, or longer than MaxTTL %v, for which a restarted server has no vote",
				d.o.MaxTTL),
		}
	}
	return nil
}

// hold returns the hold that the next attempt asks for. Attempts have nonces of their own, so that giving one back does
// not take from the next.
func (c *call) hold() redisscript.Hold {
	return redisconn.HoldOf(c.r, c.d.identity, strconv.FormatUint(c.d.nonces.Add(1), 10))
}

// ask returns an attempt's first step: once, or again if the request may be in the server already.
func (c *call) ask(h redisscript.Hold, before bool, once, again string) (code string, args []string) {
	if before {
		return again, []string{h.Value(), redisscript.Millis(h.PX), c.r.RequestID}
	}
	return once, []string{h.Value(), redisscript.Millis(h.PX)}
}

// once makes one attempt without waiting. If it won, the servers that it has not asked follow; what it left otherwise is
// given back.
func (c *call) once(ctx context.Context) (g backend.Grant, won bool, v *vote) {
	v = c.poll(ctx, c.hold())
	if v.yes >= c.d.quorum {
		if g, won = c.grant(v.h, nth(v.proved, c.d.quorum)); won {
			c.d.voteLater(c, v, g)
			return g, true, v
		}
	}
	c.giveBack(v.h, v.left())
	if v.fault != nil && v.fault.Sent && c.unsure == nil {
		c.unsure = v.fault.Cause
	}
	return backend.Grant{}, false, v
}

// grant is the answer to the caller, whose validity counts from sentAt; or false if that is over.
func (c *call) grant(h redisscript.Hold, sentAt backend.Instant) (backend.Grant, bool) {
	now := c.d.clock.Now()
	g := redisconn.Grant(c.r, h, sentAt, now)
	return g, now < sentAt.Add(c.d.Describe().Validity(g.TTL))
}

const (
	tries      = 3  // rounds of one attempt that meets faults
	splitTries = 12 // rounds of one attempt in which nobody gets a majority
)

// try makes one attempt without waiting. Faults are tried again, since the script makes that harmless; split votes too,
// since an answer that the lock is held would be wrong: nobody holds it.
func (c *call) try(ctx context.Context) (backend.Grant, error) {
	for faults, splits := 0, 0; ; {
		g, won, v := c.once(ctx)
		switch {
		case won:
			return g, nil
		case v.yes >= c.d.quorum:
			return backend.Grant{}, &redisconn.Failure{Cause: errLate, Sent: true}
		case v.top >= c.d.quorum:
			return backend.Grant{}, v.held
		case v.fault == nil || v.no > len(c.d.nodes)-c.d.quorum:
			splits++
			if splits == splitTries || ctx.Err() != nil || !redisconn.PauseFor(ctx, splitPause(splits)) {
				return backend.Grant{}, c.refused(ctx, v)
			}
		default:
			faults++
			if v.fault.Fatal || faults == tries || !redisconn.Pause(ctx, faults) {
				return backend.Grant{}, c.giveUp(ctx, v.fault)
			}
		}
	}
}

// refused is the error of an attempt that met other contenders only.
func (c *call) refused(ctx context.Context, v *vote) error {
	switch {
	case ctx.Err() != nil:
		return c.giveUp(ctx, &redisconn.Failure{Cause: ctx.Err(), Sent: v.fault != nil && v.fault.Sent})
	case v.held != nil:
		return v.held
	}
	return &backend.HeldError{Name: c.r.Name}
}

// giveUp returns f, as an unknown outcome if any attempt may have left something.
func (c *call) giveUp(ctx context.Context, f *redisconn.Failure) error {
	cause := f.Cause
	if err := ctx.Err(); err != nil && !errors.Is(cause, err) {
		cause = fmt.Errorf("%w: %w", err, cause)
	}
	return &redisconn.Failure{Cause: cause, Sent: f.Sent || c.unsure != nil, Fatal: f.Fatal && c.unsure == nil}
}

// giveBack removes in the background what one attempt left, or will leave, on nodes.
func (c *call) giveBack(h redisscript.Hold, nodes set) {
	if nodes == 0 {
		return
	}
	c.d.waiters.ended.Note(h.Nonce)
	for i, n := range c.d.nodes {
		if nodes.has(i) {
			n.owe(debt{keys: c.keys, start: h.Start()})
		}
	}
}

// splitPause is how long to wait after the n-th split vote: long enough that of many contenders one is likely to be
// alone for a round trip.
func splitPause(n int) time.Duration {
	return time.Millisecond + mathrand.N(4*time.Millisecond<<min(n, 5))
}
