package conformance_test

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// boundMutants are right as long as there is little of everything, and nobody waits for long.
var boundMutants = []mutant{
	{name: "a renewal with a shorter TTL shortens the hold", breaks: []string{"L10"}, apply: func(b *broken) {
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants)
			for i, g := range grants {
				if out[i].Err != nil {
					continue
				}
				_ = b.Driver.Release(ctx, g)
				_, _ = b.Driver.Acquire(ctx, backend.Request{Name: g.Name, RequestID: g.RequestID, TTL: g.TTL})
			}
			return out
		}
	}},
	{name: "renewals after the 32nd are confirmed but not sent", breaks: []string{"L11"}, apply: func(b *broken) {
		b.renew = func(ctx context.Context, grants []backend.Grant) []backend.Renewal {
			out := b.Driver.Renew(ctx, grants[:min(len(grants), 32)])
			for _, g := range grants[len(out):] {
				out = append(out, backend.Renewal{SentAt: now(), TTL: g.TTL})
			}
			return out
		}
	}},
	{name: "TTLs are truncated to seconds but returned as requested", breaks: []string{"L12"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) {
			if r.TTL > time.Second {
				r.TTL = r.TTL.Truncate(time.Second)
			}
		})
	}},
	{name: "TTLs are limited to a minute but returned as requested", breaks: []string{"L12"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) { r.TTL = min(r.TTL, time.Minute) })
	}},
	{name: "waits end after three quarters of their deadline", breaks: []string{"W9"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if end, ok := ctx.Deadline(); ok && r.Wait {
				short, cancel := context.WithTimeout(ctx, time.Until(end)*3/4)
				defer cancel()
				ctx = short
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "waits end after three seconds", breaks: []string{"W9"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if r.Wait {
				short, cancel := context.WithTimeout(ctx, 3*time.Second)
				defer cancel()
				ctx = short
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{
		name:   "an evicted waiter acquires when the current hold ends",
		breaks: []string{"W10"}, apply: falseTurn,
	},
	{name: "a waiter that was cut off acquires when it is reconnected", breaks: []string{"W11"},
		apply: func(b *broken) {
			b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
				for cut := false; ; {
					ask, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
					g, err := b.Driver.Acquire(ask, r)
					cancel()
					switch {
					case !r.Wait || ctx.Err() != nil || err == nil:
						return g, err
					case errors.Is(err, backend.ErrUnknown):
						cut = true
					case cut:
						return b.madeUp(r), nil
					}
				}
			}
		}},
	{name: "owners are truncated to 32 bytes", breaks: []string{"P16"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			owner := r.Owner
			r.Owner = owner[:min(len(owner), 32)]
			g, err := b.Driver.Acquire(ctx, r)
			g.Owner = owner
			return g, err
		}
	}},
	{name: "metadata above 1 KiB is dropped", breaks: []string{"P16"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			for _, v := range r.Metadata {
				if len(v) > 1024 {
					r.Metadata = nil
				}
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "a fifth reader is refused", breaks: []string{"R9"}, apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if state, _ := b.Driver.Look(ctx, r.Name); r.Kind == backend.KindShared && len(state.Holders) > 3 {
				return backend.Grant{}, &backend.HeldError{Name: r.Name}
			}
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "permits are counted modulo 256", breaks: []string{"Q8"}, apply: func(b *broken) {
		b.asked(func(r *backend.Request) {
			if r.Kind == backend.KindPermits {
				r.Permits = max(1, r.Permits%256)
				r.Limit = max(r.Permits, r.Limit%256)
			}
		})
	}},
	{name: "Describe takes a round trip", breaks: []string{"P2"}, apply: func(b *broken) {
		b.describe = func() backend.Description {
			time.Sleep(30 * time.Millisecond)
			return b.Driver.Describe()
		}
	}},
	{name: "an acquire leaves a goroutine until Close", breaks: []string{"K3"}, apply: func(b *broken) {
		closed := make(chan struct{})
		b.world.t.Cleanup(func() { close(closed) })
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			go func() { <-closed }()
			return b.Driver.Acquire(ctx, r)
		}
	}},
	{name: "a release continues after its context ends", breaks: []string{"C5", "D14"}, apply: func(b *broken) {
		b.release = func(_ context.Context, g backend.Grant) error {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			return b.Driver.Release(ctx, g)
		}
	}},
}

// falseTurn is what some ZooKeeper libraries do: a waiter watches the one before it alone, and not its own place.
func falseTurn(b *broken) {
	b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
		before, _ := b.Driver.Look(ctx, r.Name)
		if !r.Wait || !before.Held {
			return b.Driver.Acquire(ctx, r)
		}
		for {
			ask, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
			g, err := b.Driver.Acquire(ask, r)
			cancel()
			if err == nil || ctx.Err() != nil {
				return g, err
			}
			b.world.mu.Lock()
			evicted := b.world.noPlace[r.Name]
			b.world.mu.Unlock()
			now, _ := b.Driver.Look(ctx, r.Name)
			if evicted && (!now.Held || now.Holders[0].HoldID != before.Holders[0].HoldID) {
				return b.madeUp(r), nil
			}
		}
	}
}

// madeUp is a grant of which the service knows nothing.
func (b *broken) madeUp(r backend.Request) backend.Grant {
	g := r.Grant()
	g.Token, g.Incarnation, g.SentAt = 1, "made up", now()
	return g
}
