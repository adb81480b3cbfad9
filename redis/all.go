package redis

// This file is AcquireAll: one call of the script for several names, which grants all or none. A script call is atomic,
// so no lock order and no undo is needed. In return, all keys must be on one server, and a set never waits.

import (
	"context"
	"fmt"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// maxAll bounds the names of one AcquireAll, and with them how long one call of the script keeps the server from
// others.
const maxAll = lines.MaxSteps

// sharded reports whether two names may be on different servers: the client is one of a cluster, or the probe or
// Options.Assume says that a cluster is behind it.
func (d *Driver) sharded() bool { return d.lines.Sharded.Load() }

// AcquireAll grants all names, of any kinds, in one round trip, or no name at all. On a cluster, and for more than
// 128 names, it returns ErrUnsupported. The grants are in the order of the requests. The error names the blocked
// name: backend.ErrHeld with its holder, ErrLimitMismatch, ErrUnavailable (not sent), ErrUnknown (grants may not have
// been released), or ctx's error.
//
// It never waits: if a set with Wait cannot be granted immediately it returns ErrUnsupported without a change, and
// the core acquires the names one after the other. Waiting in the queues of several names at the same time would
// either close some names while the set waits for the rest, or starve sets that never find all names free in one
// instant.
func (d *Driver) AcquireAll(ctx context.Context, rs []backend.Request) (_ []backend.Grant, err error) {
	a := &setAttempt{d: d, rs: rs}
	defer func() { err = redisconn.CallError(ctx, driverName, "acquire-all", a.inTheWay(), err) }()
	if d.sharded() {
		return nil, fmt.Errorf("several names on a cluster: %w", backend.ErrUnsupported)
	}
	// One call of the script takes no more; the core takes the names one by one then.
	if len(rs) > maxAll {
		return nil, fmt.Errorf("%d names in one call, more than %d: %w", len(rs), maxAll, backend.ErrUnsupported)
	}
	if err := d.probe.BeginAcquire(ctx, d.Describe(), rs...); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	// Whether a proxy hides a cluster is known once the first probe has passed, which begin awaits: hence the second
	// check.
	if d.sharded() {
		return nil, fmt.Errorf("several names on a cluster: %w", backend.ErrUnsupported)
	}
	for _, r := range rs {
		a.again = a.again || !r.Fresh
		a.wishes = append(a.wishes, d.attempt(r))
	}
	grants, err := a.acquire(ctx)
	if err == nil {
		err = d.confirmed(ctx, grants...)
	}
	if err != nil {
		return nil, err
	}
	return grants, nil
}

// setAttempt is one AcquireAll, over all its tries. Like attempt it belongs to its caller's goroutine.
type setAttempt struct {
	d  *Driver
	rs []backend.Request
	// One for each name. Only their holds and keys are used: they never send requests.
	wishes []*attempt
	// Some request may be in the server already; the script then looks for all of them, each under its own id.
	again     bool
	leftovers []leftover
	// Which request the error is about: the first until the server has named another.
	at int
}

// inTheWay returns the name for the error, or "" for an empty set.
func (a *setAttempt) inTheWay() string {
	if len(a.rs) == 0 {
		return ""
	}
	return a.rs[a.at].Name
}

// acquire asks for the whole set. It retries after a fault, as attempt.noWait does. A try that lost is an answer, but
// an earlier try without an outcome may still be delivered and granted, so its possible leftovers are tidied up before
// acquire returns.
func (a *setAttempt) acquire(ctx context.Context) ([]backend.Grant, error) {
	for n := 1; ; n++ {
		holds := make([]redisscript.Hold, len(a.wishes))
		for i, w := range a.wishes {
			holds[i] = w.hold()
		}
		s := a.step(holds)
		answer, sentAt, err := a.d.lines.Do(ctx, s)
		if err == nil {
			if grants := a.grants(answer, holds, sentAt); grants != nil {
				return grants, nil
			}
			if len(a.leftovers) > 0 {
				a.d.tidy(a.leftovers) // an earlier try may still be delivered
			}
			return nil, a.refused(ctx, answer)
		}
		f := a.failed(s, holds, err)
		if f.Fatal || n == tries || !redisconn.Pause(ctx, n) {
			return nil, a.d.giveUp(a.leftovers, err)
		}
	}
}

// step asks for all holds. The step stands on the first name's keys, and carries the other names' keys beside them: one
// step, hence one atomic part of the script's call.
func (a *setAttempt) step(holds []redisscript.Hold) *lines.Step {
	s := lines.NewStep(redisscript.TryAll, a.wishes[0].keys)
	again := "0"
	if a.again {
		again = "1"
	}
	s.Args = append(make([]string, 0, 1+2*len(holds)), again)
	for i, w := range a.wishes {
		if i > 0 {
			s.Others = append(s.Others, w.keys)
		}
		s.Args = append(s.Args, holds[i].Value(), w.r.RequestID)
	}
	return s
}

// grants returns the answers to the callers, or nil for a try that lost. A request that has its name already keeps the
// hold that it has, while the others of the set are granted anew in the same call.
func (a *setAttempt) grants(answer any, holds []redisscript.Hold, sentAt backend.Instant) []backend.Grant {
	var kept []string
	if answer != int64(1) {
		requests := make([]string, len(a.rs))
		for i := range a.rs {
			requests[i] = a.rs[i].RequestID
		}
		var ok bool
		if kept, ok = redisscript.ParseAllKept(answer, requests); !ok {
			return nil
		}
	}
	grants := make([]backend.Grant, len(holds))
	for i, w := range a.wishes {
		grants[i] = w.grant(holds[i], sentAt)
		if kept != nil && kept[i] != "" {
			grants[i] = w.grantOf(kept[i], holds[i], sentAt)
		}
	}
	return grants
}

// refused reads the answer to a try that lost, which says who is in the way.
func (a *setAttempt) refused(ctx context.Context, answer any) error {
	r, ok := redisscript.ParseRefused(answer, len(a.rs))
	if !ok {
		return &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
	}
	a.at = r.Index
	switch {
	case r.Mismatch:
		return a.d.mismatch(ctx, a.rs[r.Index].Name)
	case a.rs[0].Wait:
		return fmt.Errorf("a wait for several names: %w", backend.ErrUnsupported)
	}
	return redisconn.HeldError(a.rs[r.Index].Name, r.State)
}

// failed notes a try that ended with err and may have left holds. The step carried all of them, but only the first
// leftover refers to it: whether the server has run the step is signalled once, and tidy awaits every leftover before
// it removes the first hold.
func (a *setAttempt) failed(s *lines.Step, holds []redisscript.Hold, err error) *redisconn.Failure {
	f := redisconn.FailureOf(err)
	if !f.Sent {
		return f
	}
	a.again = true
	for i, w := range a.wishes {
		l := leftover{keys: w.keys, hold: holds[i]}
		if i == 0 {
			l = leftoverOf(w.keys, holds[i], s, f) // once: its end may be signalled once
		}
		a.leftovers = append(a.leftovers, l)
	}
	return f
}
