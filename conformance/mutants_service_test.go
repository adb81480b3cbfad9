package conformance_test

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// serviceMutants break what a driver owes when its service forgets.
var serviceMutants = []mutant{
	{name: "the token space does not change after a wipe", breaks: []string{"S5"}, apply: func(b *broken) {
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.TokenSpace = "memory"
			return d
		}
	}},
	{name: "acquires succeed after a wipe", breaks: []string{"S6"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if errors.Is(err, backend.ErrHistoryLost) {
				return b.world.store.Driver().Acquire(ctx, r)
			}
			return g, err
		}
	}},
	{name: "a wipe is reported as an eviction", breaks: []string{"S6"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if lost := r.Lost; lost != nil {
				r.Lost = func(backend.Loss) { lost(backend.Loss{Reason: backend.ReasonEvicted}) }
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "ErrHistoryLost does not name the change", breaks: []string{"S6"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if errors.Is(err, backend.ErrHistoryLost) {
				err = &backend.CallError{Driver: "memory", Call: "acquire", Name: r.Name, Err: backend.ErrHistoryLost}
			}
			return g, err
		}
	}},
	{name: "a restart loses holds younger than 300 ms", breaks: []string{"S7"}, apply: func(*broken) {},
		restart: func(w *world) {
			w.evict(300 * time.Millisecond)
		}},
	{name: "a restart loses every hold", breaks: []string{"S7"}, apply: func(*broken) {}, restart: func(w *world) {
		w.evict(time.Hour)
	}},
	{name: "fencing is declared over a volatile server", breaks: []string{"P15"}, apply: func(b *broken) {
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.Exclusion = backend.ExclusionVolatileServer
			return d
		}
	}},
	{name: "exclusion is not declared", breaks: []string{"P15", "T1"}, apply: func(b *broken) {
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.Exclusion = backend.ExclusionUndeclared
			return d
		}
	}},
	{name: "each client has its own token space", breaks: []string{"F7"}, apply: func(b *broken) {
		own := backend.NewRequestID()
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.TokenSpace = own
			return d
		}
	}},
	{name: "a wrapper returns the fencing promise of its driver", breaks: []string{"T1", "T3"}, apply: func(b *broken) {
		b.promise = func() backend.Driver { return b.Driver }
	}},
}
