package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// handoff is contention: workers that all want one name, hold it for no time and want it again at once. What counts is
// grants to another worker than the one that has released: a library that hands the lock back to the releaser again and
// again is fast and starves the others.
func handoff(workers int, shared bool) scenario {
	sc := scenario{
		name:  fmt.Sprint("handoff", workers),
		about: fmt.Sprintf("%d workers with a client each want one name, hold time 0", workers),
		columns: columns("x=x floor; x2=x recipe; ops=to another/s; all=grants/s; p50=p50 us; p95=p95 us; p99=p99 us; " +
			"trips=trips/grant; commands=commands/grant; client-us=client CPU us; server-us=server CPU us; " +
			"mean=grants/worker; least=min/mean<; most=max/mean>; starved>; wait-ms=longest wait ms>; " +
			"overlaps>; errors>"),
		targets: map[string][]target{"redis": {
			atLeast("ops", 8000, "grants/s to another worker"),
			atLeast("x", 0.45, "grants/s to another worker, x token by BLPOP"),
			atMost("commands", 13.2, "commands per grant (13, and some settlements)"),
			atLeast("least", 0.95, "fewest grants of a worker, x mean"),
			atMost("most", 1.05, "most grants of a worker, x mean"),
		}, "etcd": {
			atLeast("x", 0.9, "grants/s to another worker, x raw queue"),
			atMost("p95", 3000, "release to acquire, p95 us"),
			atLeast("least", 0.9, "fewest grants of a worker, x mean"),
		}, "zookeeper": {
			atLeast("x2", 1, "grants/s to another worker, x zk.Lock"),
			atLeast("least", 0.9, "fewest grants of a worker, x mean"),
		}, "postgres": {
			atLeast("x2", 100, "grants/s to another worker, x polled lease"),
			atLeast("least", 0.9, "fewest grants of a worker, x mean"),
		}, "builtin": {
			atLeast("least", 0.9, "fewest grants of a worker, x mean"),
		}},
		floor: "token by BLPOP", second: recipes,
		rounds: 3, quickRounds: 1,
		suits: func(_ system, p peer) bool { return p.waits },
		all: interleaved(func(ctx context.Context, l *lab, p peer) (sample, error) {
			return runHandoff(ctx, l, p, workers, shared)
		}),
	}
	if workers == 64 {
		sc.targets["builtin"] = append(sc.targets["builtin"], atLeast("x2", 5, "grants/s to another worker, x etcd's concurrency.Mutex"))
	}
	if shared {
		sc.name += "s"
		sc.about = fmt.Sprintf("%d workers that share one client want one name, hold time 0", workers)
	}
	return sc
}

// recipes are what the services' own client libraries have.
var recipes = []string{"zk.Lock", "concurrency.Mutex", "etcd concurrency.Mutex", "polled lease"}

// baton is what the workers see of each other.
type baton struct {
	phase    atomic.Int32 // 0: warm-up, 1: counted, 2: over
	inside   atomic.Int32
	last     atomic.Int32 // worker + 1
	released atomic.Int64 // when the last one began to release, in ns since start
	overlaps atomic.Int64
	errors   atomic.Int64
	ended    atomic.Int64 // when phase 2 began, in ns since start
	start    time.Time
}

// runner is one worker's record.
type runner struct {
	grants, handed int
	handoffs       []time.Duration
	longest        time.Duration
}

func runHandoff(ctx context.Context, l *lab, p peer, workers int, shared bool) (sample, error) {
	n := workers
	if shared {
		n = 1
	}
	clients, closeAll, err := l.open(ctx, p, n, clientOptions{ttl: 10 * time.Second})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	name := l.fresh("handoff")
	if err := l.seed(ctx, p, name); err != nil {
		return nil, err
	}

	b := &baton{start: time.Now()}
	runners := make([]runner, workers)
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	for i := range runners {
		wg.Go(func() { runners[i].run(waiting, b, clients[i%n], name, int32(i+1)) })
	}
	sleep(ctx, l.length(200*time.Millisecond, 100*time.Millisecond))
	d, err := l.spend(ctx, p, func() error {
		b.phase.Store(1)
		sleep(ctx, l.length(2*time.Second, 300*time.Millisecond))
		b.ended.Store(int64(time.Since(b.start)))
		b.phase.Store(2)
		return nil
	})
	cancel()
	wg.Wait()
	if err != nil {
		return nil, err
	}

	var handed, grants, starved int
	var handoffs []time.Duration
	var longest time.Duration
	least, most := runners[0].grants, 0
	for _, r := range runners {
		handed, grants = handed+r.handed, grants+r.grants
		least, most = min(least, r.grants), max(most, r.grants)
		if r.grants == 0 {
			starved++
		}
		handoffs = append(handoffs, r.handoffs...)
		longest = max(longest, r.longest)
	}
	mean := float64(grants) / float64(workers)
	s := sample{
		"ops": float64(handed) / d.wall.Seconds(), "all": float64(grants) / d.wall.Seconds(),
		"mean": mean, "least": float64(least) / mean, "most": float64(most) / mean, "starved": float64(starved),
		"wait-ms":  float64(longest.Milliseconds()),
		"overlaps": float64(b.overlaps.Load()), "errors": float64(b.errors.Load()),
	}
	d.perOp(s, float64(grants))
	s.latencies(handoffs)
	return s, nil
}

func (r *runner) run(ctx context.Context, b *baton, c client, name string, me int32) {
	for b.phase.Load() < 2 {
		began := time.Now()
		h, err := c.lock(ctx, name)
		if err != nil {
			if ctx.Err() != nil {
				r.waited(b, began)
				return
			}
			b.errors.Add(1)
			sleep(ctx, time.Millisecond)
			continue
		}
		now := time.Since(b.start)
		if b.inside.Add(1) != 1 {
			b.overlaps.Add(1)
		}
		other := b.last.Swap(me) != me
		if b.phase.Load() == 1 {
			r.grants++
			r.waited(b, began)
			if from := b.released.Load(); other && from > 0 {
				r.handed++
				r.handoffs = append(r.handoffs, now-time.Duration(from))
			}
		}
		b.inside.Add(-1)
		b.released.Store(int64(time.Since(b.start)))
		if err := h.unlock(ctx); err != nil && ctx.Err() == nil {
			b.errors.Add(1)
		}
	}
}

// waited notes the longest wait; one that the end of the counted phase cut short counts as long as it was until then.
func (r *runner) waited(b *baton, began time.Time) {
	phase, until := b.phase.Load(), time.Since(b.start)
	if phase == 0 {
		return
	}
	if ended := b.ended.Load(); ended > 0 {
		until = min(until, time.Duration(ended))
	}
	r.longest = max(r.longest, until-began.Sub(b.start))
}
