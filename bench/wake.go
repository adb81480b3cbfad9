package main

import (
	"context"
	"math/rand/v2"
	"time"
)

// wake is the latency of one hand-over on a quiet machine: a holder releases, one waiter with a client of its own has
// been waiting for 130 to 190 ms.
func wake() scenario {
	return scenario{
		name:  "wake1",
		about: "release to acquire, one waiter, the holder holds 130 to 190 ms",
		columns: []column{
			{key: "x", title: "x floor"}, {key: "p50", title: "p50 us"}, {key: "p95", title: "p95 us"},
			{key: "p99", title: "max us"}, {key: "trips", title: "trips/grant"},
			{key: "commands", title: "commands/grant"},
		},
		targets: map[string][]target{"redis": {atMost("p50", 600, "release to acquire, p50 us")}},
		floor:   "token by BLPOP",
		rounds:  3, quickRounds: 1,
		suits: func(_ system, p peer) bool { return p.waits },
		all:   interleaved(runWake),
	}
}

func runWake(ctx context.Context, l *lab, p peer) (sample, error) {
	clients, closeAll, err := l.open(ctx, p, 2, clientOptions{ttl: 10 * time.Second})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	name := l.fresh("wake")
	if err := l.seed(ctx, p, name); err != nil {
		return nil, err
	}
	trials := 10
	if l.quick {
		trials = 3
	}
	type grant struct {
		at  time.Time
		err error
	}
	var all []time.Duration
	before, err := takeUsage(ctx, l.at(p))
	if err != nil {
		return nil, err
	}
	for range trials {
		h, err := clients[0].lock(ctx, name)
		if err != nil {
			return nil, err
		}
		granted := make(chan grant, 1)
		go func() {
			h, err := clients[1].lock(ctx, name)
			at := time.Now()
			if err == nil {
				err = h.unlock(ctx)
			}
			granted <- grant{at, err}
		}()
		sleep(ctx, 130*time.Millisecond+rand.N(60*time.Millisecond))
		released := time.Now()
		if err := h.unlock(ctx); err != nil {
			return nil, err
		}
		g := <-granted
		if g.err != nil {
			return nil, g.err
		}
		all = append(all, g.at.Sub(released))
	}
	after, err := takeUsage(ctx, l.at(p))
	if err != nil {
		return nil, err
	}
	s := sample{}
	after.since(before).perOp(s, float64(2*trials))
	s.latencies(all)
	s["ops"] = 1 / s["p50"] // so that "x floor" is how many times faster than the floor
	return s, nil
}
