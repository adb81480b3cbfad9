package memory

import (
	"context"
	"iter"
	"maps"
	"math"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/machine"
)

// stateOf is what callers see of a name: who holds it, for how long still, and how many wait. Holds that are over and
// only keep the name closed are left out, because nobody holds them. The caller holds s.mu.
//
// The store counts instants of its clock and people read the time of day, so Since is reckoned back from now. It is for
// display and may jump with the wall clock; nothing is decided by it. The metadata is copied: the machine's own must
// not reach a caller, who may write to it.
func (s *Store) stateOf(now backend.Instant, info *machine.Info) backend.State {
	state := backend.State{Name: info.Name, Waiters: info.Waiters, Revision: info.Revision}
	for i := range info.Holders {
		h := &info.Holders[i]
		c := s.claims[h.Token.Order()]
		if c.lingers {
			continue
		}
		state.Held = true
		state.Holders = append(state.Holders, backend.Holder{
			Owner: h.Owner, HoldID: h.HoldID, Kind: backend.Kind(h.Kind), Permits: int(h.Permits), Token: h.Token,
			Since: time.Now().Add(-now.Sub(backend.Instant(h.Since))), ExpiresIn: c.due.Sub(now),
			Metadata: maps.Clone(h.Metadata),
		})
	}
	return state
}

// Look tells who holds a name and how many wait for it, as of one moment. A name that nobody holds is no error: its
// state says so, and has the revision from which Watch follows without a gap. Errors wrap backend.ErrUnavailable
// (nothing was sent, or the server is down), ErrUnknown (no answer came; nothing was changed), ErrClosed, or ctx's
// error.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	var state backend.State
	err := d.try(ctx, func(now backend.Instant) error {
		info := d.store.machine.Holder(name)
		state = d.store.stateOf(now, &info)
		return nil
	})
	if err != nil {
		return backend.State{}, callError("holder", name, err)
	}
	return state, nil
}

// List yields the names that begin with prefix and are held, sorted by their bytes, as of one moment; an empty prefix
// means all. Names that are only waited for, or only kept closed by a minimum hold, are left out.
//
// All states are collected before the first one is yielded, so the body of the loop may call the driver, and what it
// does to locks changes nothing of what follows. An error comes last, as the only element, with the errors of Look.
func (d *Driver) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		var states []backend.State
		err := d.try(ctx, func(now backend.Instant) error {
			names, _ := d.store.machine.List(prefix, "", math.MaxInt)
			for i := range names {
				states = append(states, d.store.stateOf(now, &names[i]))
			}
			return nil
		})
		if err != nil {
			yield(backend.State{}, callError("list", prefix, err))
			return
		}
		for _, state := range states {
			if state.Held && !yield(state, nil) {
				return
			}
		}
	}
}

// ForceRelease ends all holds of name, and a minimum hold too; the first waiters are granted in the same step. Holders
// are told at once, with backend.ReasonForceReleased. reason is for people: those who watch the name read it. A name
// that nobody holds is backend.ErrNotHeld; ErrUnknown says that it may have been done, and doing it again could hit the
// next holder.
func (d *Driver) ForceRelease(ctx context.Context, name, reason string) error {
	return callError("force-release", name, d.try(ctx, func(now backend.Instant) error {
		if !d.store.forceRelease(now, name, "", reason, backend.ReasonForceReleased) {
			return &backend.NotHeldError{Name: name}
		}
		return nil
	}))
}
