package conformance_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"iter"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// identityMutants confuse what is shown of a hold with what moves it.
var identityMutants = []mutant{
	{name: "the HoldID is derived from the request id", breaks: []string{"O9", "D13"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			r.HoldID = backend.HoldID(r.RequestID)
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "Look returns the request id", breaks: []string{"O9"}, apply: func(b *broken) {
		b.look = func(ctx context.Context, name string) (backend.State, error) {
			state, err := b.Driver.Look(ctx, name)
			for i, h := range state.Holders {
				state.Holders[i].HoldID = b.world.request(h)
			}
			return state, err
		}
	}},
	{name: "a refusal returns the request id", breaks: []string{"O9"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if held := (*backend.HeldError)(nil); errors.As(err, &held) {
				held.HoldID = b.world.request(backend.Holder{HoldID: held.HoldID})
			}
			return g, err
		}
	}},
	{name: "errors contain the request id", breaks: []string{"O9"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			if err := b.Driver.Release(ctx, g); err != nil {
				return fmt.Errorf("%v: %w", g, err)
			}
			return nil
		}
	}},
	{name: "acquire accepts a HoldID as a request id", breaks: []string{"O9"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if key := b.world.request(backend.Holder{HoldID: r.RequestID}); key != "" {
				r.RequestID = key
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "holds have no HoldID", breaks: []string{"O9", "D13"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			r.HoldID = ""
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "acquire returns the hold with the same HoldID", breaks: []string{"D13"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if state, err := b.Driver.Look(ctx, r.Name); err == nil && state.Held &&
				state.Holders[0].HoldID == r.HoldID {
				b.world.mu.Lock()
				r.RequestID = b.world.holders[r.HoldID]
				b.world.mu.Unlock()
			}
			g, err := b.Driver.Acquire(ctx, r)
			if err == nil {
				b.world.mu.Lock()
				b.world.holders[r.HoldID] = r.RequestID
				b.world.mu.Unlock()
			}
			return g, err
		}
	}},
	{name: "release compares the HoldID instead of the request", breaks: []string{"D16"}, apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			if state, err := b.Driver.Look(ctx, g.Name); err == nil && state.Held &&
				state.Holders[0].HoldID == g.HoldID {
				g = backend.Request{Name: g.Name, RequestID: b.world.request(state.Holders[0])}.Grant()
			}
			return b.Driver.Release(ctx, g)
		}
	}},
	{name: "grants have no nonce", breaks: []string{"O10", "O11", "O12"}, apply: func(b *broken) {
		b.withNonce(func(backend.Grant) fencing.Nonce { return fencing.Nonce{} })
	}},
	{name: "the nonce is derived from the request id", breaks: []string{"O10"}, apply: func(b *broken) {
		b.withNonce(func(g backend.Grant) fencing.Nonce {
			sum := sha256.Sum256([]byte(g.RequestID))
			return fencing.Nonce(sum[:16])
		})
	}},
	{name: "each answer has a new nonce", breaks: []string{"O11", "O12"}, apply: func(b *broken) {
		b.withNonce(func(backend.Grant) fencing.Nonce { return fencing.NewNonce() })
	}},
	{name: "grants of a set share their nonce", breaks: []string{"O10"}, apply: func(b *broken) {
		b.all = func(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
			grants, err := b.Driver.AcquireAll(ctx, rs)
			for i := range grants {
				grants[i].Nonce = grants[0].Nonce
			}
			return grants, err
		}
	}},
	{name: "List omits the nonce", breaks: []string{"O12"}, apply: func(b *broken) {
		b.list = func(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
			return func(yield func(backend.State, error) bool) {
				for state, err := range b.Driver.List(ctx, prefix) {
					for i := range state.Holders {
						state.Holders[i].Nonce = fencing.Nonce{}
					}
					if !yield(state, err) {
						return
					}
				}
			}
		}
	}},
	{name: "Look returns another nonce", breaks: []string{"O12"}, apply: func(b *broken) {
		b.look = func(ctx context.Context, name string) (backend.State, error) {
			state, err := b.Driver.Look(ctx, name)
			for i := range state.Holders {
				state.Holders[i].Nonce[0]++
			}
			return state, err
		}
	}},
	{name: "releases are confirmed but not sent", breaks: []string{"D15", "O1", "X1"}, apply: func(b *broken) {
		b.release = func(context.Context, backend.Grant) error { return nil }
	}},
}

// withNonce replaces the nonces of all grants.
func (b *broken) withNonce(draw func(backend.Grant) fencing.Nonce) {
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		g, err := b.Driver.Acquire(ctx, r)
		if err == nil {
			g.Nonce = draw(g)
		}
		return g, err
	}
}
