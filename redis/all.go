package redis

// This file is AcquireAll: several names in one call of the script, which grants all or none. The script runs a call as
// a whole while nobody else is served, so no lock order and no undoing is needed; the price is that all keys must be on
// one server, and that a set never waits.

import (
	"context"
	"fmt"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// maxAll bounds the names of one AcquireAll, and with them how long one call of the script keeps the server from
// others.
const maxAll = maxSteps

// sharded reports whether two names may be on different servers: the client is one of a cluster, or the probe or
// Options.Assume says that a cluster is behind it.
func (d *Driver) sharded() bool {
	_, cluster := d.client.(*goredis.ClusterClient)
	return cluster || d.batch.lines.sharded.Load()
}

// AcquireAll grants all names, of whatever kinds, in one round trip, or none of them. On a cluster it is
// ErrUnsupported, as it is for more than 128 names. The grants are in the order of the requests. The error says which
// name is in the way: backend.ErrHeld with its holder, ErrLimitMismatch, ErrUnavailable (nothing was sent), ErrUnknown
// (what was granted may not have been given back), or ctx's error.
//
// It never waits: where a set with Wait cannot be granted at once it is ErrUnsupported, with nothing done. Waiting in
// the queues of several names at the same time would close some of them for others while the rest is awaited, or let
// those sets starve that never find all names free in one instant; names that are taken one after the other in one
// order do neither, and the core does that.
func (d *Driver) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	at := 0 // whose name to put into the error
	grants, err := d.acquireAll(ctx, rs, &at)
	if err != nil {
		name := ""
		if at < len(rs) {
			name = rs[at].Name
		}
		return nil, redisconn.CallError(ctx, driverName, "acquire-all", name, err)
	}
	return grants, nil
}

// acquireAll is AcquireAll without the words of its error. at says which request the error is about: the first until
// the server has named another.
func (d *Driver) acquireAll(ctx context.Context, rs []backend.Request, at *int) ([]backend.Grant, error) {
	if d.sharded() {
		return nil, fmt.Errorf("several names on a cluster: %w", backend.ErrUnsupported)
	}
	// One call of the script takes no more; the core takes the names one by one then.
	if len(rs) > maxAll {
		return nil, fmt.Errorf("%d names at once, more than %d: %w", len(rs), maxAll, backend.ErrUnsupported)
	}
	a := &allCall{d: d, rs: rs}
	if err := a.prepare(); err != nil {
		return nil, err
	}
	if err := redisconn.Begin(ctx, rs[0].Wait, d.begin); err != nil {
		return nil, err
	}
	defer d.end()
	// Whether a proxy hides a cluster is known once the first probe has passed, which begin awaits: hence the second
	// check.
	if d.sharded() {
		return nil, fmt.Errorf("several names on a cluster: %w", backend.ErrUnsupported)
	}
	grants, err := a.try(ctx, at)
	if err == nil {
		err = d.confirmed(ctx, grants...)
	}
	return grants, err
}

// allCall is one AcquireAll. Like call it belongs to its caller's goroutine.
type allCall struct {
	d     *Driver
	rs    []backend.Request
	calls []*call
	// Some request may be in the server already; the script then looks for all of them, each under its own id.
	again   bool
	unknown []outcome
}

// prepare refuses a set that cannot be meant, such as one name twice, and makes a call of each request. Only the holds
// and the keys of these calls are used: they never ask by themselves.
func (a *allCall) prepare() error {
	if err := kit.ValidateSet(a.d.Describe(), a.rs); err != nil {
		return err
	}
	for _, r := range a.rs {
		a.again = a.again || !r.Fresh
		a.calls = append(a.calls, a.d.call(r))
	}
	return nil
}

// try makes one attempt for the whole set. A fault is tried again, as in call.try. An attempt that lost is an answer,
// but an earlier one without an outcome may still be delivered and granted, so that what it would leave is tidied up
// before the answer is returned.
func (a *allCall) try(ctx context.Context, at *int) ([]backend.Grant, error) {
	for n := 1; ; n++ {
		holds := make([]redisscript.Hold, len(a.calls))
		for i, c := range a.calls {
			holds[i] = c.hold()
		}
		s := a.step(holds)
		answer, sentAt, err := a.d.batch.do(ctx, s)
		if err == nil {
			if grants := a.grants(answer, holds, sentAt); grants != nil {
				return grants, nil
			}
			if len(a.unknown) > 0 {
				a.d.tidy(a.unknown) // an earlier attempt may still be delivered
			}
			return nil, a.refused(answer, at)
		}
		f := a.failed(s, holds, err)
		if f.Fatal || n == tries || !redisconn.Pause(ctx, n) {
			return nil, a.d.giveUp(a.unknown, err)
		}
	}
}

// step asks for all holds. The step stands on the first name's keys, and carries the other names' keys beside them: one
// step, hence one atomic part of the script's call.
func (a *allCall) step(holds []redisscript.Hold) *step {
	s := newStep(redisscript.TryAll, a.calls[0].keys)
	again := "0"
	if a.again {
		again = "1"
	}
	s.Args = append(make([]string, 0, 1+2*len(holds)), again)
	for i, c := range a.calls {
		if i > 0 {
			s.Others = append(s.Others, c.keys)
		}
		s.Args = append(s.Args, holds[i].Value(), c.r.RequestID)
	}
	return s
}

// grants returns the answers to the callers, or nil for an attempt that lost. A request that has its name already keeps
// the hold that it has, while the others of the set are granted anew in the same call.
func (a *allCall) grants(answer any, holds []redisscript.Hold, sentAt backend.Instant) []backend.Grant {
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
	for i, c := range a.calls {
		grants[i] = c.grant(holds[i], sentAt)
		if kept != nil && kept[i] != "" {
			grants[i] = c.grantOf(kept[i], holds[i], sentAt)
		}
	}
	return grants
}

// refused reads the answer to an attempt that lost, and sets at to the request that is in the way.
func (a *allCall) refused(answer any, at *int) error {
	r, ok := redisscript.ParseRefused(answer, len(a.rs))
	if !ok {
		return &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
	}
	*at = r.Index
	switch {
	case r.Mismatch:
		return backend.ErrLimitMismatch
	case a.rs[0].Wait:
		return fmt.Errorf("a wait for several names at once: %w", backend.ErrUnsupported)
	}
	return redisconn.HeldError(a.rs[r.Index].Name, r.State)
}

// failed notes an attempt that ended with err and may have left holds. The step carried all of them, but only the first
// outcome refers to it: whether the server has run the step is signalled once, and tidy awaits every outcome before it
// removes the first hold.
func (a *allCall) failed(s *step, holds []redisscript.Hold, err error) *redisconn.Failure {
	f := redisconn.FailureOf(err)
	if !f.Sent {
		return f
	}
	a.again = true
	for i, c := range a.calls {
		o := outcome{keys: c.keys, hold: holds[i]}
		if i == 0 {
			o = outcomeOf(c.keys, holds[i], s, f) // once: its end may be signalled once
		}
		a.unknown = append(a.unknown, o)
	}
	return f
}
