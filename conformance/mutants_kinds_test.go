package conformance_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// asked makes the driver ask for something else than it was asked for, under what is still the old grant to its caller.
func (b *broken) asked(change func(r *backend.Request)) {
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		own := r
		change(&r)
		g, err := b.Driver.Acquire(ctx, r)
		g.Name, g.Kind, g.Permits, g.Limit, g.TTL = own.Name, own.Kind, own.Permits, own.Limit, own.TTL
		return g, err
	}
}

// under makes the driver keep requests of some kinds under another name.
func (b *broken) under(other func(r backend.Request) string) {
	b.asked(func(r *backend.Request) { r.Name = other(*r) })
	b.release = func(ctx context.Context, g backend.Grant) error {
		g.Name = other(backend.Request{Name: g.Name, Kind: g.Kind, Permits: g.Permits, Limit: g.Limit})
		return b.Driver.Release(ctx, g)
	}
	b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
		kept := make([]backend.Grant, len(grants))
		for i, g := range grants {
			g.Name = other(backend.Request{Name: g.Name, Kind: g.Kind, Permits: g.Permits, Limit: g.Limit})
			kept[i] = g
		}
		return b.Driver.Renew(ctx, kept)
	}
}

// slips gives a hold that the service knows nothing of to a client that asks beside holders of which all satisfy
// beside.
func (b *broken) slips(who func(r backend.Request) bool, beside func(h backend.Holder) bool) {
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		try := r
		try.Wait = false
		g, err := b.Driver.Acquire(ctx, try)
		if errors.Is(err, backend.ErrHeld) && who(r) {
			info, _ := b.Look(ctx, r.Name)
			fits := info.Held
			for _, h := range info.Holders {
				fits = fits && beside(h)
			}
			if fits {
				g = r.Grant()
				g.Token, g.Incarnation, g.SentAt = 1, "slipped", now()
				return g, nil
			}
		}
		if r.Wait && errors.Is(err, backend.ErrHeld) {
			return b.Driver.Acquire(ctx, r)
		}
		return g, err
	}
	b.release = func(ctx context.Context, g backend.Grant) error {
		if g.Incarnation == "slipped" {
			return nil
		}
		return b.Driver.Release(ctx, g)
	}
}

// kindMutants break holds that are not exclusive, several names at once, paths and the search for deadlocks.
var kindMutants = []mutant{
	{name: "shared holds exclude each other", breaks: []string{"R1", "R8"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) {
			if r.Kind == backend.KindShared {
				r.Kind = backend.KindExclusive
			}
		})
	}},
	{name: "readers and writers use different locks", breaks: []string{"R1", "R2", "R3", "R5", "R6"}, apply: func(b *broken) {
		b.under(func(r backend.Request) string {
			if r.Kind == backend.KindShared {
				return r.Name + ":readers"
			}
			return r.Name
		})
	}},
	{name: "readers overtake a waiting writer", breaks: []string{"R3"}, apply: func(b *broken) {
		b.slips(func(r backend.Request) bool { return r.Kind == backend.KindShared },
			func(h backend.Holder) bool { return h.Kind == backend.KindShared })
	}},
	{name: "a writer is granted beside readers", breaks: []string{"R1", "R5", "R6"}, apply: func(b *broken) {
		b.slips(func(r backend.Request) bool { return r.Kind == backend.KindExclusive },
			func(h backend.Holder) bool { return h.Kind == backend.KindShared })
	}},
	{name: "writers poll and do not queue", breaks: []string{"R4"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if r.Kind != backend.KindExclusive || !r.Wait {
				return b.Driver.Acquire(ctx, r)
			}
			for r.Wait = false; ; {
				g, err := b.Driver.Acquire(ctx, r)
				if !errors.Is(err, backend.ErrHeld) {
					return g, err
				}
				select {
				case <-time.After(150 * time.Millisecond):
				case <-ctx.Done():
					return g, ctx.Err()
				}
			}
		}
	}},
	{name: "tokens of shared holds and permits are marked exclusive", breaks: []string{"R7", "Q6"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if g.Kind != backend.KindExclusive {
				g.Token ^= 1 << 63
			}
			return g, err
		}
	}},
	{name: "one release ends all shared holds of a name", breaks: []string{"R1", "R8"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			info, _ := b.Look(ctx, g.Name)
			err := b.Driver.Release(ctx, g)
			for _, h := range info.Holders {
				if h.Kind == backend.KindShared {
					_ = b.Driver.Release(ctx, backend.Request{Name: g.Name, RequestID: b.world.request(h)}.Grant())
				}
			}
			return err
		}
	}},
	{name: "each request counts for one permit", breaks: []string{"Q1", "Q2"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) { r.Permits = min(r.Permits, 1) })
	}},
	{name: "each request acquires all permits", breaks: []string{"Q2", "Q7"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) { r.Permits = r.Limit })
	}},
	{name: "each limit has its own permits", breaks: []string{"Q3"}, apply: func(b *broken) {
		b.under(func(r backend.Request) string { return fmt.Sprintf("%s:%d", r.Name, r.Limit) })
	}},
	{name: "permits are granted beyond the limit", breaks: []string{"Q1", "Q2"}, apply: func(b *broken) {
		b.slips(func(r backend.Request) bool { return r.Kind == backend.KindPermits },
			func(h backend.Holder) bool { return h.Kind == backend.KindPermits })
	}},
	{name: "permits of a dead client do not expire", breaks: []string{"Q4"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) {
			if r.Kind == backend.KindPermits {
				r.TTL = time.Hour
			}
		})
	}},
	{name: "requests for several permits poll and do not queue", breaks: []string{"Q5"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if r.Permits < 2 || !r.Wait {
				return b.Driver.Acquire(ctx, r)
			}
			for r.Wait = false; ; {
				g, err := b.Driver.Acquire(ctx, r)
				if !errors.Is(err, backend.ErrHeld) {
					return g, err
				}
				select {
				case <-time.After(150 * time.Millisecond):
				case <-ctx.Done():
					return g, ctx.Err()
				}
			}
		}
	}},
	{name: "AcquireAll acquires one name after another without rollback", breaks: []string{"M1", "M2"}, apply: func(b *broken) {
		b.all = func(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
			var grants []backend.Grant
			for _, r := range rs {
				g, err := b.Acquire(ctx, r)
				if err != nil {
					return nil, err
				}
				grants = append(grants, g)
			}
			return grants, nil
		}
	}},
	{name: "AcquireAll returns grants in another order", breaks: []string{"M1"}, apply: func(b *broken) {
		b.all = func(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
			grants, err := b.Driver.AcquireAll(ctx, rs)
			if len(grants) > 1 {
				grants[0], grants[1] = grants[1], grants[0]
			}
			return grants, err
		}
	}},
	{name: "AcquireAll replaces the request ids", breaks: []string{"M3"}, apply: func(b *broken) {
		b.all = func(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
			for i := range rs {
				rs[i].RequestID = backend.NewRequestID()
			}
			return b.Driver.AcquireAll(ctx, rs)
		}
	}},
	{name: "AcquireAll without an answer returns ErrHeld", breaks: []string{"M4"}, apply: func(b *broken) {
		b.all = func(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
			grants, err := b.Driver.AcquireAll(ctx, rs)
			if errors.Is(err, backend.ErrUnknown) {
				err = &backend.HeldError{Name: rs[0].Name}
			}
			return grants, err
		}
	}},
	{name: "AcquireAll ignores an ended context", breaks: []string{"M5"}, apply: func(b *broken) {
		b.all = func(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
			for i := range rs {
				rs[i].Wait = false
			}
			_, _ = b.Driver.AcquireAll(context.WithoutCancel(ctx), rs)
			return b.Driver.AcquireAll(ctx, rs)
		}
	}},
	{name: "paths are treated as plain names", breaks: []string{"H1", "H2", "H3", "H4"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) { r.Hierarchical = false })
	}},
	{name: "plain names are treated as paths", breaks: []string{"H3"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) { r.Hierarchical = r.Kind != backend.KindPermits })
	}},
	{name: "shared paths are exclusive", breaks: []string{"H2"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) {
			if r.Hierarchical {
				r.Kind = backend.KindExclusive
			}
		})
	}},
	{name: "requests below a path overtake its waiter", breaks: []string{"H4"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if r.Hierarchical && errors.Is(err, backend.ErrHeld) {
				if info, _ := b.Look(ctx, r.Name); !info.Held {
					g, err = r.Grant(), nil
					g.Token, g.SentAt = 1, now()
				}
			}
			return g, err
		}
	}},
	{name: "cycles are not detected", breaks: []string{"G1", "G3", "G4"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) { r.Under = nil })
	}},
	{name: "each request is made under every hold of its client", breaks: []string{"G2"}, apply: func(b *broken) {
		var held []string
		b.asked(func(r *backend.Request) {
			b.world.mu.Lock()
			defer b.world.mu.Unlock()
			r.Under = slices.Clone(held)
			held = append(held, r.RequestID)
		})
	}},
	{name: "siblings under one hold are refused as a deadlock", breaks: []string{"G2"}, apply: func(b *broken) {
		under := map[string]bool{} // holds under which somebody holds
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			b.world.mu.Lock()
			refuse := false
			for _, id := range r.Under {
				refuse = refuse || r.Wait && under[id]
				under[id] = true
			}
			b.world.mu.Unlock()
			if refuse {
				return backend.Grant{}, &backend.DeadlockError{}
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "every wait under a hold is refused as a deadlock", breaks: []string{"G1", "G2"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if r.Wait && len(r.Under) > 0 {
				return backend.Grant{}, backend.ErrDeadlock
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "a cycle is reported without its names", breaks: []string{"G1"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if errors.Is(err, backend.ErrDeadlock) {
				err = &backend.DeadlockError{}
			}
			return g, err
		}
	}},
}
