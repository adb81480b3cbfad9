package fencelock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// instant is a driver without costs, so that only the core is measured.
type instant struct{ last fencing.Token }

func (d *instant) IssuesFencingTokens() backend.Driver { return d }
func (d *instant) Describe() backend.Description {
	return backend.Description{
		Name: "instant", Capabilities: backend.CapFencing, MinTTL: 1, TTLGranularity: 1,
		Exclusion: backend.ExclusionInProcess,
	}
}

func (d *instant) Acquire(_ context.Context, r backend.Request) (backend.Grant, error) {
	g := r.Grant()
	d.last++
	g.Token, g.SentAt = d.last, backend.SystemClock().Now()
	return g, nil
}

func (d *instant) Renew(_ context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	now := backend.SystemClock().Now()
	for i, g := range grants {
		out[i] = backend.Renewal{SentAt: now, TTL: g.TTL}
	}
	return out
}
func (d *instant) Release(context.Context, backend.Grant) error { return nil }
func (d *instant) Close(context.Context) error                  { return nil }

// BenchmarkCore measures the cost that the core adds to a driver's acquire and release, by the number of other leases
// held.
func BenchmarkCore(b *testing.B) {
	for _, held := range []int{0, 1_000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("held=%d", held), func(b *testing.B) {
			c, err := fencelock.ForCorrectness(&instant{}, &fencelock.Options{TTL: time.Hour})
			if err != nil {
				b.Fatal(err)
			}
			ctx := b.Context()
			for i := range held {
				if _, err := c.Acquire(ctx, fmt.Sprint("held-", i)); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				lease, err := c.Acquire(ctx, "x")
				if err != nil {
					b.Fatal(err)
				}
				if err := lease.Release(ctx); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			if err := c.Close(context.Background()); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkSet measures a set of n names over a driver without costs, with the context of all of them.
func BenchmarkSet(b *testing.B) {
	for _, n := range []int{1_000, 10_000} {
		b.Run(fmt.Sprintf("names=%d", n), func(b *testing.B) {
			c, err := fencelock.ForCorrectness(&instant{}, &fencelock.Options{TTL: time.Hour})
			if err != nil {
				b.Fatal(err)
			}
			ctx := b.Context()
			names := make([]string, n)
			for i := range names {
				names[i] = fmt.Sprint("name-", i)
			}
			b.ReportAllocs()
			for b.Loop() {
				leases, err := c.AcquireAll(ctx, names)
				if err != nil {
					b.Fatal(err)
				}
				leases.Context()
				if err := leases.Release(ctx); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			if err := c.Close(context.Background()); err != nil {
				b.Fatal(err)
			}
		})
	}
}
