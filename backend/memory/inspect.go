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

// stateOf tells of a name what people ask.
func (s *Store) stateOf(now backend.Instant, info *machine.Info) backend.State {
	state := backend.State{Name: info.Name, Waiters: info.Waiters, Revision: info.Revision}
	for i := range info.Holders {
		h := &info.Holders[i]
		if h.Lingering {
			continue
		}
		state.Held = true
		state.Holders = append(state.Holders, backend.Holder{
			Owner: h.Owner, HoldID: h.HoldID, Kind: backend.Kind(h.Kind), Permits: int(h.Permits), Token: h.Token,
			Since: time.Now().Add(-now.Sub(backend.Instant(h.Since))), ExpiresIn: s.holds[h.Token].expires.Sub(now),
			Metadata: maps.Clone(h.Metadata),
		})
	}
	return state
}

// Look tells who holds a name and how many wait for it, as of one moment.
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

// List yields the names that begin with prefix and are held, sorted, as of one moment.
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

// ForceRelease ends all holds of name, and a minimum hold too. Holders are told at once, and the reason is told to
// those who watch the name. A name that nobody holds is backend.ErrNotHeld.
func (d *Driver) ForceRelease(ctx context.Context, name, reason string) error {
	return callError("force-release", name, d.try(ctx, func(now backend.Instant) error {
		if !d.store.forceRelease(now, name, "", reason, backend.ReasonForceReleased) {
			return &backend.NotHeldError{Name: name}
		}
		return nil
	}))
}
