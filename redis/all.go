package redis

import (
	"context"
	"fmt"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// maxAll bounds the names of one AcquireAll: it bounds how long one call of the script keeps the server from others.
const maxAll = maxSteps

// sharded reports whether the names of a set may be on different servers.
func (d *Driver) sharded() bool {
	_, cluster := d.client.(*goredis.ClusterClient)
	return cluster || d.batch.lines.sharded.Load()
}

// AcquireAll implements backend.MultiAcquirer: one call of the script grants all names, of whatever kinds, or none. On
// a cluster it is ErrUnsupported, as it is for more than 128 names.
//
// It never waits: where a set with Wait cannot be granted at once it is ErrUnsupported, with nothing done. Waiting in
// the queues of several names at the same time would close some of them for others while the rest is awaited, or let
// those sets starve that never find all names free in one instant; names that are taken one after the other in one
// order do neither.
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

func (d *Driver) acquireAll(ctx context.Context, rs []backend.Request, at *int) ([]backend.Grant, error) {
	if d.sharded() {
		return nil, fmt.Errorf("several names on a cluster: %w", backend.ErrUnsupported)
	}
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
	if d.sharded() { // as the probe has found out
		return nil, fmt.Errorf("several names on a cluster: %w", backend.ErrUnsupported)
	}
	grants, err := a.try(ctx, at)
	if err == nil {
		err = d.confirmed(ctx, grants...)
	}
	return grants, err
}

// allCall is one AcquireAll.
type allCall struct {
	d       *Driver
	rs      []backend.Request
	calls   []*call
	again   bool // the requests may be in the server already
	unknown []outcome
}

// prepare refuses a set that cannot be meant, and makes a call of each request.
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

// try makes one attempt. Faults are tried again, since the script makes that harmless.
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

// step asks for all holds.
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

// grants returns nil for an attempt that lost.
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

// refused reads the answer to an attempt that lost.
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

// failed notes an attempt that ended with err and may have left something.
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
