package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// core is what the project's core adds to a driver, by the number of leases that are held beside.
func core() scenario {
	return scenario{
		name:  "core",
		about: "core overhead per acquire + release on a driver that costs nothing, beside what is held already",
		columns: columns("ns=ns/op; beside-ns=beside the driver ns; cpu-ns=CPU ns/op; allocs=allocs/op; bytes=B/op; " +
			"kb=KB/lease held"),
		targets: map[string][]target{"in process": {
			atMost("beside-ns", 2000, "ns beside the driver"), atMost("allocs", 10.1, "allocations"),
		}},
		rounds: 5, quickRounds: 1,
		suits: func(s system, p peer) bool { return s.name() == "in process" },
		all:   runCores,
	}
}

// coreSystem is no service at all: scenario core brings its own driver.
type coreSystem struct{ memorySystem }

func startCore(context.Context, string) (system, error) { return &coreSystem{}, nil }

func (coreSystem) name() string    { return "in process" }
func (coreSystem) version() string { return "in process" }
func (coreSystem) peers() []peer   { return []peer{{name: ours, role: roleOurs}} }

// instant is a driver that costs nothing but a look at the clock, which every driver owes.
type instant struct{ last fencing.Token }

func (d *instant) IssuesFencingTokens() backend.Driver { return d }

func (d *instant) Describe() backend.Description {
	return backend.Description{
		Name: "instant", Capabilities: backend.CapFencing, MinTTL: 1, TTLGranularity: 1, Exclusion: backend.ExclusionInProcess,
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
	now := backend.SystemClock().Now()
	for i, g := range grants {
		renewals[i] = backend.Renewal{SentAt: now, TTL: g.TTL}
	}
	return renewals
}

func (d *instant) Release(context.Context, backend.Grant) error { return nil }
func (d *instant) Close(context.Context) error                  { return nil }

func runCores(ctx context.Context, l *lab, _ []peer, rounds int) []row {
	rows := []row{{name: "the driver alone", role: roleFloor}}
	sizes := []int{0, 1000, 10_000, 100_000}
	for _, n := range sizes {
		rows = append(rows, row{name: fmt.Sprintf("%s, %d held", ours, n), role: roleOurs})
	}
	for range rounds {
		alone, err := l.quiet(func() (sample, error) { return l.timed(driverAlone(ctx)), nil })
		rows[0].add(alone, err)
		for i, n := range sizes {
			s, err := l.quiet(func() (sample, error) { return runCore(ctx, l, n) })
			if err == nil {
				s["beside-ns"] = s["ns"] - alone["ns"]
			}
			rows[i+1].add(s, err)
		}
	}
	return rows
}

// driverAlone is the same two calls without the core.
func driverAlone(ctx context.Context) func() error {
	var d backend.Driver = &instant{}
	r := backend.Request{Name: "x", Owner: "bench", RequestID: backend.NewRequestID(), Fresh: true, TTL: time.Hour, Wait: true}
	return func() error {
		g, err := d.Acquire(ctx, r)
		if err != nil {
			return err
		}
		return d.Release(ctx, g)
	}
}

func runCore(ctx context.Context, l *lab, n int) (sample, error) {
	c, err := fencelock.ForCorrectness(&instant{}, &fencelock.Options{TTL: time.Hour})
	if err != nil {
		return nil, err
	}
	defer c.Close(context.WithoutCancel(ctx))
	before := takeFootprint()
	for i := range n {
		if _, err := c.Acquire(ctx, fmt.Sprint("held-", i)); err != nil {
			return nil, err
		}
	}
	now := takeFootprint()
	var failed error
	s := l.timed(func() error {
		lease, err := c.Acquire(ctx, "x")
		if err == nil {
			err = lease.Release(ctx)
		}
		if err != nil {
			failed = err
		}
		return err
	})
	if n > 0 {
		now.each(s, before, n)
	}
	return s, failed
}

// timed repeats f for a while and returns what one call takes.
func (l *lab) timed(f func() error) sample {
	length := l.length(200*time.Millisecond, 50*time.Millisecond)
	var m0, m1 runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m0)
	before := usage{at: time.Now(), client: ownCPU(), machine: machineCPU()}
	n := 0
	for time.Since(before.at) < length {
		for range 100 { // the look at the clock must not count
			if f() != nil {
				return sample{}
			}
		}
		n += 100
	}
	after := usage{at: time.Now(), client: ownCPU(), machine: machineCPU()}
	runtime.ReadMemStats(&m1)
	took := after.at.Sub(before.at)
	return sample{
		"foreign": after.since(before).foreign,
		"ns":      float64(took.Nanoseconds()) / float64(n),
		"cpu-ns":  float64((after.client - before.client).Nanoseconds()) / float64(n), // the collector's, too
		"allocs":  float64(m1.Mallocs-m0.Mallocs) / float64(n),
		"bytes":   float64(m1.TotalAlloc-m0.TotalAlloc) / float64(n),
	}
}
