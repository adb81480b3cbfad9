package redlock

// This file looks at a name for people: who holds it, and how many wait. It asks every server, and reports the view of
// a majority; one server's word is not a hold. The result may be outdated on arrival, so no decision may rest on it.

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// Look returns the holder with the votes of a majority, in one parallel round. Since is not known; Waiters is the
// length of the longest queue, as each waiter usually stands in one queue. Without a majority for one request the
// name counts as free. Without the answers of a majority it is backend.ErrUnavailable; other errors wrap
// ErrMisconfigured, ErrClosed, or ctx's error.
func (d *Driver) Look(ctx context.Context, name string) (info backend.State, err error) {
	defer redisconn.Tell(ctx, driverName, "holder", name, &err)
	info.Name = name
	if err := backend.ValidateName(name); err != nil {
		return info, err
	}
	if err := d.probe.Begin(ctx); err != nil {
		return info, err
	}
	defer d.gate.Leave()
	steps, sink := d.toAll(d.keys(name), redisscript.Inform)
	// All servers that answer in time are waited for, since each may have a waiter that the others lack.
	answered := 0
	var t tally
	votes := map[string]int{}
	var holder *redisscript.State
	d.poll(ctx, steps, sink, d.nodeTimeout(time.Second), func(s *step, f *redisconn.Failure) bool {
		state, ok := redisscript.State{}, false
		if f == nil {
			state, ok = redisscript.ParseState(s.Answer)
		}
		// A server that cannot tell is a fault, which matters only if no majority answers.
		if !ok {
			t.count(s, f)
			return false
		}
		answered++
		info.Waiters = max(info.Waiters, state.Waiters)
		if !state.Held {
			return false
		}
		// The hold is known by the request and not by its whole value: two servers may have it from different tries.
		if votes[state.Hold.Request]++; votes[state.Hold.Request] == d.quorum {
			holder = &state
		}
		return false
	})
	switch {
	case holder != nil:
		h, err := redisconn.HolderOf(*holder)
		if err != nil {
			return info, err
		}
		info.Held, info.Holders = true, []backend.Holder{h}
		return info, nil
	// A majority answered, and no hold has the votes of one.
	case answered >= d.quorum:
		return info, nil
	}
	return info, redisconn.Unsent(t.undecided(ctx))
}
