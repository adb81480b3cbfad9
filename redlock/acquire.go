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
	metadata string
	patience time.Duration // with silent nodes
	again    bool          // the request may be in the servers already
	unsure   error         // why it is not known what an attempt left somewhere
}

// Acquire implements backend.Driver.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	g, err := d.acquire(ctx, r)
	if err != nil {
		return backend.Grant{}, redisconn.CallError(ctx, driverName, "acquire", r.Name, err)
	}
	return g, nil
}

func (d *Driver) acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if err := d.valid(r); err != nil {
		return backend.Grant{}, err
	}
	metadata, err := redisconn.Metadata(r)
	if err != nil {
		return backend.Grant{}, err
	}
	if err := redisconn.Begin(ctx, r.Wait, d.begin); err != nil {
		return backend.Grant{}, err
	}
	defer d.end()
	c := &call{
		d: d, r: r, keys: redisscript.KeysOf(d.o.KeyPrefix, r.Name), metadata: metadata, again: !r.Fresh,
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
			Why: fmt.Sprintf("it is negative, or longer than MaxTTL %v, for which a restarted server has no vote", d.o.MaxTTL),
		}
	}
	return nil
}

// hold returns the hold that the next attempt asks for. Attempts have nonces of their own, so that giving one back does
// not take from the next.
func (c *call) hold() redisscript.Hold {
	return redisscript.Hold{
		PX:       max(c.r.TTL, c.r.MinHold),
		Client:   c.d.identity,
		Nonce:    strconv.FormatUint(c.d.nonces.Add(1), 10),
		Request:  c.r.RequestID,
		ID:       c.r.HoldID,
		Owner:    c.r.Owner,
		Metadata: c.metadata,
	}
}

// ask returns an attempt's first step: once, or again if the request may be in the server already.
func (c *call) ask(h redisscript.Hold, before bool, once, again string) (code string, args []string) {
	if before {
		return again, []string{h.Value(), redisscript.Millis(h.PX), c.r.RequestID}
	}
	return once, []string{h.Value(), redisscript.Millis(h.PX)}
}

// grant is the answer to the caller, whose validity counts from sentAt; or false if that is over.
func (c *call) grant(h redisscript.Hold, sentAt backend.Instant) (backend.Grant, bool) {
	now := c.d.clock.Now()
	g := redisconn.Grant(c.r, h, sentAt, now)
	return g, now < sentAt.Add(c.d.Describe().Validity(g.TTL))
}

// vote is the outcome of asking all nodes for a lock.
type vote struct {
	proved  []backend.Instant // by node; zero: no vote
	yes     int
	refused map[string]int // by the holder that was in the way
	no      int
	top     int // the most refusals for one holder
	held    error
	fault   *redisconn.Failure // one of those that failed
	left    []*node            // may have, or will have, what the attempt asked for
}

// poll asks every node for the lock, in parallel. It returns as soon as the outcome is certain.
func (c *call) poll(ctx context.Context, h redisscript.Hold) *vote {
	d := c.d
	v := &vote{proved: make([]backend.Instant, len(d.nodes)), refused: map[string]int{}}
	code, args := c.ask(h, c.again, redisscript.Try, redisscript.TryAgain)
	steps, sink := d.toAll(c.keys, code, args...)
	heard := make([]bool, len(d.nodes))
	healthy := 0
	for _, n := range d.nodes {
		if !n.sick.Load() {
			healthy++
		}
	}
	certain := false
	silent := d.poll(ctx, steps, sink, c.patience, func(s *step) bool {
		heard[s.index] = true
		switch n, ok := s.answer.(int64); {
		case s.err != nil:
			if v.fault == nil || s.err.Fatal {
				v.fault = s.err
			}
			if s.err.Sent {
				v.left = append(v.left, d.nodes[s.index])
			}
		case ok && n == 1:
			v.proved[s.index] = s.sentAt
			v.left = append(v.left, d.nodes[s.index])
			v.yes++
		default:
			v.refusal(c.r.Name, s.answer)
		}
		certain = v.yes >= d.quorum || v.top >= d.quorum
		// A request that was here before may have left something on every node: the later grant replaces the earlier
		// one on all that are known to answer, before the caller can go on.
		return certain && (!c.again || v.yes+v.no >= healthy)
	})
	for _, s := range silent {
		heard[s.index] = true
		if s.drop() {
			continue
		}
		v.left = append(v.left, d.nodes[s.index])
		if !certain {
			v.fault = &redisconn.Failure{Cause: errSilent, Sent: true}
		}
	}
	if len(silent) > 0 && v.fault == nil {
		// No server has seen the question: each is still being connected to, or owes an answer to an earlier one.
		v.fault = &redisconn.Failure{Cause: errSilent}
	}
	for i, n := range d.nodes { // not awaited
		if !heard[i] {
			v.left = append(v.left, n)
		}
	}
	if v.fault != nil && v.fault.Sent || len(silent) > 0 {
		c.again = true
	}
	return v
}

// refusal notes the answer of a node that did not vote for us.
func (v *vote) refusal(name string, answer any) {
	v.no++
	s, ok := redisscript.ParseState(answer)
	if !ok || s.Value == "" {
		return // it was free in the end: somebody gave up its place just now
	}
	id := s.Value
	if s.Held {
		id = s.Hold.Request
	}
	v.refused[id]++
	if v.refused[id] > v.top {
		v.top, v.held = v.refused[id], redisconn.HeldError(name, s)
	}
}

const (
	tries      = 3  // rounds of one attempt that meets faults
	splitTries = 12 // rounds of one attempt in which nobody gets a majority
)

// try makes one attempt without waiting. Faults are tried again, since the script makes that harmless; split votes too,
// since an answer that the lock is held would be wrong: nobody holds it.
func (c *call) try(ctx context.Context) (backend.Grant, error) {
	h := c.hold()
	for faults, splits := 0, 0; ; {
		v := c.poll(ctx, h)
		if v.yes >= c.d.quorum {
			if g, valid := c.grant(h, nth(v.proved, c.d.quorum)); valid {
				return g, nil
			}
			c.giveBack(h, v.left)
			return backend.Grant{}, &redisconn.Failure{Cause: errLate, Sent: true}
		}
		c.giveBack(h, v.left)
		switch {
		case v.top >= c.d.quorum:
			return backend.Grant{}, v.held
		case v.fault == nil || v.no > len(c.d.nodes)-c.d.quorum:
			splits++
			if splits == splitTries || ctx.Err() != nil || !redisconn.PauseFor(ctx, splitPause(splits)) {
				return backend.Grant{}, c.refused(ctx, v)
			}
		default:
			if v.fault.Sent && c.unsure == nil {
				c.unsure = v.fault.Cause
			}
			faults++
			if v.fault.Fatal || faults == tries || !redisconn.Pause(ctx, faults) {
				return backend.Grant{}, c.giveUp(ctx, v.fault)
			}
		}
		h = c.hold()
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
func (c *call) giveBack(h redisscript.Hold, nodes []*node) {
	if len(nodes) == 0 {
		return
	}
	c.d.waiters.abandon(h.Nonce)
	for _, n := range nodes {
		n.owe(debt{keys: c.keys, start: h.Start()})
	}
}

// splitPause is how long to wait after the n-th split vote: long enough that of many contenders one is likely to be
// alone for a round trip.
func splitPause(n int) time.Duration {
	return time.Millisecond + mathrand.N(4*time.Millisecond<<min(n, 5))
}
