package conformance_test

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// serviceMutants break what a driver owes when its service forgets.
var serviceMutants = []mutant{
	{name: "a service that was wiped keeps its token space", breaks: []string{"S5"}, apply: func(b *broken) {
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.TokenSpace = "memory"
			return d
		}
	}},
	{name: "a driver goes on with a service that was wiped", breaks: []string{"S6"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if errors.Is(err, backend.ErrHistoryLost) {
				return b.world.store.Driver().Acquire(ctx, r)
			}
			return g, err
		}
	}},
	{name: "a service that was wiped has evicted", breaks: []string{"S6"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if lost := r.Lost; lost != nil {
				r.Lost = func(backend.Loss) { lost(backend.Loss{Reason: backend.ReasonEvicted}) }
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "a lost history is reported without the change", breaks: []string{"S6"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if errors.Is(err, backend.ErrHistoryLost) {
				err = &backend.CallError{Driver: "memory", Call: "acquire", Name: r.Name, Err: backend.ErrHistoryLost}
			}
			return g, err
		}
	}},
	{name: "a restart forgets what is younger than 300 ms", breaks: []string{"S7"}, apply: func(*broken) {},
		restart: func(w *world) {
			w.evict(300 * time.Millisecond)
		}},
	{name: "a restart forgets everything", breaks: []string{"S7"}, apply: func(*broken) {}, restart: func(w *world) {
		w.evict(time.Hour)
	}},
	{name: "fencing over a server that forgets", breaks: []string{"P15"}, apply: func(b *broken) {
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
	{name: "each client names another token space", breaks: []string{"F7"}, apply: func(b *broken) {
		own := backend.NewRequestID()
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.TokenSpace = own
			return d
		}
	}},
	{name: "the promise is that of the driver inside", breaks: []string{"T1", "T3"}, apply: func(b *broken) {
		b.promise = func() backend.Driver { return b.Driver }
	}},
}
