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
	{name: "SentAt of a grant after a wait is read at the receipt of the answer", breaks: []string{"L13"},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				g, err := b.Driver.Acquire(ctx, r)
				if g.Queued {
					g.SentAt = now()
				}
				return g, err
			}
		}},
	{name: "SentAt of a set is read at the receipt of the answer", breaks: []string{"L13"}, apply: func(b *broken) {
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
	{name: "the TTL of a renewal is longer than what was asked for", breaks: []string{"L3", "D6"}, apply: func(b *broken) {
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants)
			for i := range out {
				out[i].TTL += time.Hour
			}
			return out
		}
	}},
	{name: "tokens fall while waiters follow each other", breaks: []string{"F4", "W2", "C4"}, apply: func(b *broken) {
		b.renumber(func(_ string, token fencing.Token) fencing.Token { return 1<<40 - token })
	}},
	{name: "one nonce for all holds of a client", breaks: []string{"O3", "F1"}, apply: func(b *broken) {
		nonce := fencing.NewNonce()
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			g.Nonce = nonce
			return g, err
		}
	}},
	{name: "owners are shown with capital letters", breaks: []string{"C3", "R2"}, apply: func(b *broken) {
		b.look = func(ctx context.Context, name string) (backend.State, error) {
			s, err := b.Driver.Look(ctx, name)
			for i := range s.Holders {
				s.Holders[i].Owner += "!"
			}
			return s, err
		}
	}},
	{name: "a declared time is missing", breaks: []string{"P23"}, apply: func(b *broken) {
		b.look = func(ctx context.Context, name string) (backend.State, error) {
			s, err := b.Driver.Look(ctx, name)
			for i := range s.Holders {
				s.Holders[i].Since = time.Time{}
			}
			return s, err
		}
	}},
	{name: "the queue is shown the last one first", breaks: []string{"P23"}, apply: func(b *broken) {
		b.look = func(ctx context.Context, name string) (backend.State, error) {
			s, err := b.Driver.Look(ctx, name)
			slices.Reverse(s.Queue)
			return s, err
		}
	}},
	{name: "a list shows an expiry that is not declared", breaks: []string{"P24"}, apply: func(b *broken) {
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.Shows.List.ExpiresIn = false
			return d
		}
	}},
	{name: "waiters for permits do not say how many", breaks: []string{"P25"}, apply: func(b *broken) {
		b.look = func(ctx context.Context, name string) (backend.State, error) {
			s, err := b.Driver.Look(ctx, name)
			for i := range s.Queue {
				s.Queue[i].Permits = 0
			}
			return s, err
		}
	}},
	{name: "a refusal does not say when to retry", breaks: []string{"P26"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			var held *backend.HeldError
			if errors.As(err, &held) {
				held.RetryAfter = 0
			}
			return g, err
		}
	}},
	{name: "a forced release has no author", breaks: []string{"P27"}, apply: func(b *broken) {
		b.retell(func() func(backend.Change) []backend.Change {
			return func(c backend.Change) []backend.Change {
				c.By = ""
				return []backend.Change{c}
			}
		})
	}},
}
