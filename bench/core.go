package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/fencing"
)

// startMemory starts the in-process driver. It has no peer: it shows the cost of the core and a driver without a
// network.
func startMemory(*scope) *system {
	store := memory.NewStore(nil)
	return &system{
		name: "memory", version: "memory (in process)",
		reset: func(*scope) { store = memory.NewStore(nil) },
		peers: []peer{ourPeer(func(*client, clientOptions) backend.Driver { return store.Driver() }, nil)},
	}
}

// startCore starts no service: scenario core makes its own driver.
func startCore(*scope) *system {
	return &system{name: "in process", version: "in process", reset: func(*scope) {}, peers: []peer{ourPeer(nil, nil)}}
}

// instant is a driver that only reads the clock, as every driver must.
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
	renewals := make([]backend.Renewal, len(grants))
	for i, g := range grants {
		renewals[i] = backend.Renewal{SentAt: backend.SystemClock().Now(), TTL: g.TTL}
	}
	return renewals
}

func (d *instant) Release(context.Context, backend.Grant) error { return nil }
func (d *instant) Close(context.Context) error                  { return nil }

// core measures the cost of the core on top of a driver, by the number of other leases held.
func core(r *round) {
	r.row("the driver alone", roleFloor)
	var d backend.Driver = &instant{} // the same two calls without the core
	ask := backend.Request{Name: "x", Owner: "bench", Fresh: true, Wait: true, TTL: time.Hour}
	ask.RequestID = backend.NewRequestID()
	r.timed(func() {
		g, err := d.Acquire(r.ctx, ask)
		r.must(err)
		r.must(d.Release(r.ctx, g))
	})
	alone := r.s["ns"]
	for _, n := range []int{0, 1000, 10_000, 100_000} {
		r.row(fmt.Sprintf("%s, %d held", ours, n), roleOurs)
		c, err := fencelock.ForCorrectness(&instant{}, &fencelock.Options{TTL: time.Hour})
		r.must(err)
		kept := r.keeping()
		for i := range n {
			_, err := c.Acquire(r.ctx, fmt.Sprint("held-", i))
			r.must(err)
		}
		if n > 0 {
			kept(n)
		}
		r.timed(func() {
			lease, err := c.Acquire(r.ctx, "x")
			r.must(err)
			r.must(lease.Release(r.ctx))
		})
		r.s["beside-ns"] = r.s["ns"] - alone
		r.must(c.Close(context.WithoutCancel(r.ctx)))
	}
}

// timed repeats f for a while, and notes the time and the CPU of one call.
func (r *round) timed(f func()) {
	length := r.length(200*time.Millisecond, 50*time.Millisecond)
	var m0, m1 runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m0)
	n := 0.0
	d := r.spend(func() {
		for began := time.Now(); time.Since(began) < length; n += 100 {
			for range 100 { // so that reading the clock does not count
				f()
			}
		}
	})
	runtime.ReadMemStats(&m1)
	r.s["ns"], r.s["cpu-ns"] = float64(d.wall)/n, float64(d.client)/n // the collector's CPU, too
	r.s["allocs"], r.s["bytes"] = float64(m1.Mallocs-m0.Mallocs)/n, float64(m1.TotalAlloc-m0.TotalAlloc)/n
}
