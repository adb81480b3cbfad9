package redlock

// This file is one Acquire, as far as it does not wait: tries, each a round of votes (vote.go), until the lock is
// granted, somebody else has a majority, or too many rounds have met faults. contend.go is the part that waits,
// leftover.go the part that releases the votes of lost rounds.
//
// Two things tell a Redlock attempt from one on a single server. Votes can split, so that nobody has the lock although
// no server is free; such a round is repeated after a random pause. And an answer that comes late may be worthless: the
// grant counts from the instant before the oldest of the votes that it needs was asked for.

import (
	"context"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// attempt is one Acquire, over all its tries. It belongs to the goroutine of its caller.
type attempt struct {
	d    *Driver
	r    backend.Request
	keys redisscript.Keys
	// How long silent nodes are waited for, where the outcome depends on them: Driver.nodeTimeout.
	patience time.Duration
	// Servers may have seen the request, in an earlier round or before this Acquire: they are asked to look for it
	// first.
	again bool
	// The reason why the leftovers of a round are uncertain, or nil. It makes the outcome of the attempt unknown.
	unsure error
}

// Acquire takes a lock when a majority of the servers has voted for the request: one parallel round for a free name.
// With Wait it stays in the queue of the first healthy server until its turn comes or ctx ends; its entries on all
// servers are removed then, in the background if a server does not answer. A repetition with the same RequestID gets
// the same hold. Validity counts from Grant.SentAt and is shorter than the TTL, see Describe.
//
// Errors wrap backend.ErrHeld (with the holder if a majority names the same), ErrUnavailable (no majority answered,
// no votes are left), ErrUnknown (votes may be left), ErrMisconfigured, ErrClosed, or ctx's error.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (_ backend.Grant, err error) {
	defer redisconn.Tell(ctx, driverName, "acquire", r.Name, &err)
	if err := d.probe.BeginAcquire(ctx, d.Describe(), r); err != nil {
		return backend.Grant{}, err
	}
	defer d.gate.Leave()
	a := &attempt{
		d: d, r: r, keys: d.keys(r.Name), again: !r.Fresh,
		patience: d.nodeTimeout(r.TTL),
	}
	if r.Wait {
		return a.wait(ctx)
	}
	return a.noWait(ctx)
}

// hold returns the hold that the next try asks for. Each try has its own nonce, so that removing one does not take from
// the next: the leftovers of the last round may still be under way when the next one has the lock.
func (a *attempt) hold() redisscript.Hold {
	return redisconn.HoldOf(a.r, a.d.identity, a.d.nonces.Add(1))
}

// ask returns the code and arguments of a try's first step: once, or again if the request may be in the server already.
func (a *attempt) ask(h redisscript.Hold, before bool, once, again string) (code string, args []string) {
	if before {
		return again, []string{h.Value(), redisscript.Millis(h.PX), a.r.RequestID}
	}
	return once, []string{h.Value(), redisscript.Millis(h.PX)}
}

// once makes one try without waiting. If it won, the servers that it has not asked follow later (later.go). Otherwise
// its votes are removed, even if a majority voted so late that no validity remains: won is then false, and v.yes says
// that there was a majority.
func (a *attempt) once(ctx context.Context) (g backend.Grant, won bool, v *vote) {
	v = a.poll(ctx, a.hold())
	if v.yes >= a.d.quorum {
		if g, won = a.grant(v.h, nth(v.proved, a.d.quorum)); won {
			a.d.voteLater(a, v, g)
			return g, true, v
		}
	}
	a.giveBack(v.h, v.left())
	if v.fault != nil && v.fault.Sent && a.unsure == nil {
		a.unsure = v.fault.Cause
	}
	return backend.Grant{}, false, v
}

// grant returns the grant with a validity that counts from sentAt; false if the validity is over. The margin for
// clock drift and the resolution of Redis' expiry is part of Describe().Validity.
func (a *attempt) grant(h redisscript.Hold, sentAt backend.Instant) (backend.Grant, bool) {
	now := a.d.clock.Now()
	g := redisconn.Grant(a.r, h, sentAt, now)
	return g, now < sentAt.Add(a.d.Describe().Validity(g.TTL))
}

const (
	// tries bounds the rounds of one attempt that meets faults.
	tries = 3
	// splitTries bounds the rounds of one attempt in which nobody gets a majority.
	splitTries = 12
)

// noWait acquires without waiting. It retries faults, since the script makes that harmless, and split votes, since an
// answer that the lock is held would be wrong: nobody holds it.
//
// A round with enough refusals to rule out a majority was split, whatever faults it met. Only a round that more
// answers could have decided counts as a fault.
func (a *attempt) noWait(ctx context.Context) (backend.Grant, error) {
	for faults, splits := 0, 0; ; {
		g, won, v := a.once(ctx)
		switch {
		case won:
			return g, nil
		// A majority has voted, but so late that the grant would be over. The request has left votes, so the outcome is
		// unknown.
		case v.yes >= a.d.quorum:
			return backend.Grant{}, &redisconn.Failure{Cause: errLate, Sent: true}
		// A majority names one holder: the lock is held.
		case v.top >= a.d.quorum:
			return backend.Grant{}, v.held
		// More refusals than a majority could do without: no missing answer could have decided the round.
		case v.fault == nil || v.no > len(a.d.nodes)-a.d.quorum:
			splits++
			if splits == splitTries || ctx.Err() != nil || !redisconn.PauseFor(ctx, splitPause(splits)) {
				return backend.Grant{}, a.refused(ctx, v)
			}
		default:
			faults++
			// A permanent fault ends the attempt immediately, a network fault after three rounds.
			if v.fault.Fatal || faults == tries || !redisconn.Pause(ctx, faults) {
				return backend.Grant{}, a.giveUp(ctx, v.fault)
			}
		}
	}
}

// refused is the error of an attempt that met others only: who has most of the votes, if anybody was named.
func (a *attempt) refused(ctx context.Context, v *vote) error {
	switch {
	case ctx.Err() != nil:
		return a.giveUp(ctx, &redisconn.Failure{Cause: ctx.Err(), Sent: v.fault != nil && v.fault.Sent})
	case v.held != nil:
		return v.held
	}
	return &backend.HeldError{Name: a.r.Name}
}

// giveUp returns f with the context's error, as an unknown outcome if any round may have left something.
func (a *attempt) giveUp(ctx context.Context, f *redisconn.Failure) error {
	cause := f.Cause
	if err := ctx.Err(); err != nil && !errors.Is(cause, err) {
		cause = fmt.Errorf("%w: %w", err, cause)
	}
	return &redisconn.Failure{Cause: cause, Sent: f.Sent || a.unsure != nil, Fatal: f.Fatal && a.unsure == nil}
}

// giveBack removes in the background one try's present and future entries on nodes. The caller does not wait: its
// outcome does not depend on it. The nonce is abandoned first, so that a push which offers one of these nodes' votes is
// declined.
func (a *attempt) giveBack(h redisscript.Hold, nodes set) {
	if nodes == 0 {
		return
	}
	a.d.waiters.ended.Note(h.Nonce)
	for i, n := range a.d.nodes {
		if nodes.has(i) {
			n.leave(leftover{keys: a.keys, start: h.Start()})
		}
	}
}

// splitPause returns the pause after the n-th split vote: 1 ms and up to 128 ms more, growing with n, so that one of
// many attempts is likely to be alone for a round trip. A fixed pause would keep attempts together that came together.
func splitPause(n int) time.Duration {
	return time.Millisecond + mathrand.N(4*time.Millisecond<<min(n, 5))
}
