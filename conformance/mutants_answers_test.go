package conformance_test

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// answerMutants answer wrongly in a place that no clause is about: the ledger, which holds every answer of a driver
// against all earlier ones, has to see them. Each breaks clauses that are about something else.
var answerMutants = []mutant{
	{name: "SentAt of a grant after a wait is read when the answer arrives", breaks: []string{"L13"},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				g, err := b.Driver.Acquire(ctx, r)
				if g.Queued {
					g.SentAt = now()
				}
				return g, err
			}
		}},
	{name: "SentAt of a set is read when the answer arrives", breaks: []string{"L13"}, apply: func(b *broken) {
		b.all = func(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
			grants, err := b.Driver.AcquireAll(ctx, rs)
			for i := range grants {
				grants[i].SentAt = now()
			}
			return grants, err
		}
	}},
	{name: "SentAt lies ahead of the clock", breaks: []string{"X2", "O1", "N1"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			g.SentAt = g.SentAt.Add(time.Minute)
			return g, err
		}
	}},
	{name: "the TTL of a renewal is longer than requested", breaks: []string{"L3", "D6"}, apply: func(b *broken) {
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants)
			for i := range out {
				out[i].TTL += time.Hour
			}
			return out
		}
	}},
	{name: "tokens decrease from grant to grant", breaks: []string{"F4", "W2", "C4"}, apply: func(b *broken) {
		b.renumber(func(_ string, token fencing.Token) fencing.Token { return 1<<40 - token })
	}},
	{name: "all holds of a client have the same nonce", breaks: []string{"O3", "F1"}, apply: func(b *broken) {
		nonce := fencing.NewNonce()
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			g.Nonce = nonce
			return g, err
		}
	}},
	{name: "Look returns another owner", breaks: []string{"C3", "R2"}, apply: func(b *broken) {
		b.look = func(ctx context.Context, name string) (backend.State, error) {
			s, err := b.Driver.Look(ctx, name)
			for i := range s.Holders {
				s.Holders[i].Owner += "!"
			}
			return s, err
		}
	}},
	{name: "Look omits a declared time", breaks: []string{"P23"}, apply: func(b *broken) {
		b.look = func(ctx context.Context, name string) (backend.State, error) {
			s, err := b.Driver.Look(ctx, name)
			for i := range s.Holders {
				s.Holders[i].Since = time.Time{}
			}
			return s, err
		}
	}},
	{name: "Look returns the queue in reverse order", breaks: []string{"P23"}, apply: func(b *broken) {
		b.look = func(ctx context.Context, name string) (backend.State, error) {
			s, err := b.Driver.Look(ctx, name)
			slices.Reverse(s.Queue)
			return s, err
		}
	}},
	{name: "List returns an expiry that is not declared", breaks: []string{"P24"}, apply: func(b *broken) {
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.Shows.List.ExpiresIn = false
			return d
		}
	}},
	{name: "the queue omits the number of permits", breaks: []string{"P25"}, apply: func(b *broken) {
		b.look = func(ctx context.Context, name string) (backend.State, error) {
			s, err := b.Driver.Look(ctx, name)
			for i := range s.Queue {
				s.Queue[i].Permits = 0
			}
			return s, err
		}
	}},
	{name: "a refusal omits RetryAfter", breaks: []string{"P26"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			var held *backend.HeldError
			if errors.As(err, &held) {
				held.RetryAfter = 0
			}
			return g, err
		}
	}},
	{name: "a watch omits the author of a forced release", breaks: []string{"P27"}, apply: func(b *broken) {
		b.retell(func() func(backend.Change) []backend.Change {
			return func(c backend.Change) []backend.Change {
				c.By = ""
				return []backend.Change{c}
			}
		})
	}},
}
