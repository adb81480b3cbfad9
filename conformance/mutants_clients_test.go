package conformance_test

import (
	"context"
	"errors"
	"iter"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// clientMutants have the typical mistakes with client libraries and query languages: one connection for all calls,
// pages, patterns, numbers of 16, 32 or 53 bits, maps that are kept, sessions that are shared.
var clientMutants = []mutant{
	{name: "acquires and renewals share one connection", breaks: []string{"C6"}, apply: func(b *broken) {
		conn := make(chan struct{}, 1)
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			conn <- struct{}{}
			defer func() { <-conn }()
			return b.Driver.Acquire(ctx, r)
		}
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			conn <- struct{}{}
			defer func() { <-conn }()
			return b.Driver.Renew(ctx, grants)
		}
	}},
	{name: "a release waits for a renewal that hangs", breaks: []string{"C7"}, apply: func(b *broken) {
		conn := make(chan struct{}, 1)
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			select {
			case conn <- struct{}{}:
				defer func() { <-conn }()
			case <-ctx.Done():
			}
			return b.Driver.Renew(ctx, grants)
		}
		b.release = func(ctx context.Context, g backend.Grant) error {
			conn <- struct{}{}
			defer func() { <-conn }()
			return b.Driver.Release(ctx, g)
		}
	}},
	{name: "List uses its prefix as a LIKE pattern", breaks: []string{"P19"}, apply: func(b *broken) {
		b.list = func(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
			literal, _, _ := strings.Cut(prefix, "_")
			return func(yield func(backend.State, error) bool) {
				for s, err := range b.Driver.List(ctx, literal) {
					if err == nil && len(s.Name) < len(prefix) {
						continue
					}
					if !yield(s, err) {
						return
					}
				}
			}
		}
	}},
	{name: "List ends after a page of a hundred names", breaks: []string{"P19"}, apply: func(b *broken) {
		b.list = func(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
			return func(yield func(backend.State, error) bool) {
				n := 0
				for s, err := range b.Driver.List(ctx, prefix) {
					if n++; n > 100 || !yield(s, err) {
						return
					}
				}
			}
		}
	}},
	{name: "tokens have 16 bits", breaks: []string{"F8"}, apply: func(b *broken) {
		b.renumber(func(_ string, token fencing.Token) fencing.Token { return token & (1<<16 - 1) })
	}},
	{name: "tokens have 32 bits", breaks: []string{"F8"}, apply: func(b *broken) {
		b.renumber(func(_ string, token fencing.Token) fencing.Token { return token & (1<<32 - 1) })
	}},
	{name: "tokens are floating-point numbers", breaks: []string{"F8"}, apply: func(b *broken) {
		b.renumber(func(_ string, token fencing.Token) fencing.Token { return fencing.Token(float64(token)) })
	}},
	{name: "Ping does not contact the service", breaks: []string{"P20"}, apply: func(b *broken) {
		b.ping = func(context.Context) error { return nil }
	}},
	{name: "metadata keys are converted to lower case", breaks: []string{"P16"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			lower := map[string]string{}
			for k, v := range r.Metadata {
				lower[strings.ToLower(k)] = v
			}
			r.Metadata = lower
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "the driver retains the caller's metadata map", breaks: []string{"P16"}, apply: func(b *broken) {
		w := b.world
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			w.mu.Lock()
			w.metadata[r.HoldID] = r.Metadata
			w.mu.Unlock()
			return b.Driver.Acquire(ctx, r)
		}
		b.showing(func(s *backend.State) {
			w.mu.Lock()
			defer w.mu.Unlock()
			for i := range s.Holders {
				s.Holders[i].Metadata = maps.Clone(w.metadata[s.Holders[i].HoldID])
			}
		})
	}},
	{name: "a repeat returns the SentAt of the first grant", breaks: []string{"O13"}, apply: func(b *broken) {
		var mu sync.Mutex
		first := map[string]backend.Instant{}
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			mu.Lock()
			defer mu.Unlock()
			if sent, again := first[g.Incarnation]; again && err == nil {
				g.SentAt = sent
			} else if err == nil {
				first[g.Incarnation] = g.SentAt
			}
			return g, err
		}
	}},
	{name: "waiters are not counted", breaks: []string{"P4"}, apply: func(b *broken) {
		b.showing(func(s *backend.State) { s.Waiters = 0 })
	}},
	{name: "Since of a holder is always 1970", breaks: []string{"P4"}, apply: func(b *broken) {
		b.showing(func(s *backend.State) {
			for i := range s.Holders {
				s.Holders[i].Since = time.Unix(0, 0)
			}
		})
	}},
	{name: "ExpiresIn is a thousand times too long", breaks: []string{"P4"}, apply: func(b *broken) {
		b.showing(func(s *backend.State) {
			for i := range s.Holders {
				s.Holders[i].ExpiresIn *= 1000
			}
		})
	}},
	{name: "SentAt of a keepalive is read when the answer arrives", breaks: []string{"L13", "L15"}, apply: func(b *broken) {
		var mu sync.Mutex
		proofs := map[string]backend.Instant{}
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			mu.Lock()
			defer mu.Unlock()
			out := make([]backend.Renewal, len(grants))
			for i, g := range grants {
				if proofs[g.RequestID] == 0 {
					proofs[g.RequestID] = g.SentAt
				}
				if now().Sub(proofs[g.RequestID]) > g.TTL/3 {
					if out[i] = b.Driver.Renew(ctx, grants[i:i+1])[0]; out[i].Err != nil {
						continue
					}
					proofs[g.RequestID] = now()
				}
				out[i] = backend.Renewal{SentAt: proofs[g.RequestID], TTL: g.TTL}
			}
			return out
		}
	}},
	{name: "a late request is renewed with its client's session", breaks: []string{"A9"}, apply: func(b *broken) {
		var mu sync.Mutex
		var doubts []backend.Request
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if errors.Is(err, backend.ErrUnknown) {
				mu.Lock()
				defer mu.Unlock()
				doubts = append(doubts, r)
			}
			return g, err
		}
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			mu.Lock()
			for _, r := range doubts {
				_, _ = b.Driver.Acquire(ctx, r) // prolongs what it finds
			}
			mu.Unlock()
			return b.Driver.Renew(ctx, grants)
		}
	}},
	{name: "the first acquire of a TTL does not report an unknown outcome", breaks: []string{"A8"}, apply: func(b *broken) {
		var mu sync.Mutex
		known := map[time.Duration]bool{}
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			mu.Lock()
			first := !known[r.TTL]
			known[r.TTL] = true
			mu.Unlock()
			g, err := b.Driver.Acquire(ctx, r)
			if first && errors.Is(err, backend.ErrUnknown) && ctx.Err() != nil {
				return backend.Grant{}, ctx.Err()
			}
			return g, err
		}
	}},
	{name: "holds of a client's ninth TTL expire a minute late", breaks: []string{"L14"}, apply: func(b *broken) {
		var mu sync.Mutex
		known := map[time.Duration]bool{}
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			mu.Lock()
			known[r.TTL] = true
			asked := r.TTL
			if len(known) > 8 {
				r.TTL += time.Minute
			}
			mu.Unlock()
			g, err := b.Driver.Acquire(ctx, r)
			g.TTL = asked
			return g, err
		}
	}},
	{name: "concurrent first calls return ErrHistoryLost", breaks: []string{"S8"}, apply: func(b *broken) {
		var calls, answered atomic.Int64
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if n := calls.Add(1); n > 1 && answered.Load() == 0 {
				return backend.Grant{}, &backend.HistoryError{What: "token space", Was: "a", Now: "b"}
			}
			defer answered.Add(1)
			time.Sleep(time.Millisecond)
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "concurrent acquires of permits return ErrHeld", breaks: []string{"Q9"}, apply: func(b *broken) {
		var under atomic.Int64
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			defer under.Add(-1)
			if under.Add(1) > 2 && r.Kind == backend.KindPermits {
				return backend.Grant{}, &backend.HeldError{Name: r.Name}
			}
			time.Sleep(time.Millisecond)
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "every release is reported as a loss", breaks: []string{"D12"}, apply: func(b *broken) {
		var mu sync.Mutex
		losses := map[string]func(backend.Loss){}
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			mu.Lock()
			losses[r.RequestID] = r.Lost
			mu.Unlock()
			return b.Driver.Acquire(ctx, r)
		}
		b.release = func(ctx context.Context, g backend.Grant) error {
			err := b.Driver.Release(ctx, g)
			mu.Lock()
			lost := losses[g.RequestID]
			mu.Unlock()
			if err == nil && lost != nil {
				time.AfterFunc(time.Millisecond, func() { lost(backend.Loss{Reason: backend.ReasonEvicted}) })
			}
			return err
		}
	}},
	{name: "Close with an ended context leaves a goroutine", breaks: []string{"K4"}, apply: func(b *broken) {
		over := make(chan struct{})
		b.world.t.Cleanup(func() { close(over) })
		b.close = func(ctx context.Context) error {
			if ctx.Err() != nil {
				go func() { <-over }() // a grace that nobody bounds
			}
			return b.Driver.Close(ctx)
		}
	}},
}

// showing makes Look show what change makes of it.
func (b *broken) showing(change func(*backend.State)) {
	b.look = func(ctx context.Context, name string) (backend.State, error) {
		s, err := b.Driver.Look(ctx, name)
		change(&s)
		return s, err
	}
}
