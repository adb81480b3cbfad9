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
		name:    "wake1",
		about:   "release to acquire, one waiter, the holder holds 130 to 190 ms",
		columns: columns("x=x floor; p50=p50 us; p95=p95 us; p99=max us; trips=trips/grant; commands=commands/grant"),
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
	var all []time.Duration
	d, err := l.spend(ctx, p, func() error {
		for range trials {
			h, err := clients[0].lock(ctx, name)
			if err != nil {
				return err
			}
			granted := granting(ctx, clients[1], name)
			sleep(ctx, 130*time.Millisecond+rand.N(60*time.Millisecond))
			released := time.Now()
			if err := h.unlock(ctx); err != nil {
				return err
			}
			g := <-granted
			if g.err != nil {
				return g.err
			}
			all = append(all, g.at.Sub(released))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	s := sample{}
	d.perOp(s, float64(2*trials))
	s.latencies(all)
	s["ops"] = 1 / s["p50"] // so that "x floor" is how many times faster than the floor
	return s, nil
}
