package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
)

// distance is the latency over a network: callers come at random, whatever became of those before them (an open loop),
// each takes and releases a name of its own, and every message is on its way for half of a round trip of 1.2 ms.
func distance(rate int) scenario {
	return scenario{
		name:    fmt.Sprint("rtt", rate),
		about:   fmt.Sprintf("%d arrivals/s at random, names of their own, 1.2 ms round trip: acquire + release", rate),
		columns: columns("x=x floor; p50=p50 us; p95=p95 us; p99=p99 us; ops=cycles/s; client-us=client CPU us/op"),
		targets: map[string][]target{"redis": {atMost("x", 1.1, "median, x pooled floor")}},
		floor:   "raw pooled", ratioOf: "p50",
		rounds: 5, quickRounds: 1,
		suits: func(_ system, p peer) bool {
			return p.role == roleFloor && !p.waits || p.role == roleOurs || p.name == "rueidislock"
		},
		all: interleaved(func(ctx context.Context, l *lab, p peer) (sample, error) { return runDistance(ctx, l, p, rate) }),
	}
}

func runDistance(ctx context.Context, l *lab, p peer, rate int) (sample, error) {
	proxy, err := fault.NewProxy(l.at(p).addr())
	if err != nil {
		return nil, err
	}
	defer proxy.Close()
	proxy.Delay(fault.Both, 600*time.Microsecond)
	clients, closeAll, err := l.open(ctx, p, 1, clientOptions{addr: proxy.Addr(), proxied: true, ttl: 30 * time.Second})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	m := newMeter()
	var all sync.WaitGroup
	all.Go(func() { arrivals(l, m, &all, clients[0], rate) })
	d, err := m.measure(ctx, l, p,
		l.length(300*time.Millisecond, 100*time.Millisecond), l.length(2*time.Second, 500*time.Millisecond))
	all.Wait()
	if err := errors.Join(m.err(), err); err != nil {
		return nil, err
	}
	return m.sample(d), nil
}

// arrivals starts cycles at random, as many a second as rate says, until the measurement is over.
func arrivals(l *lab, m *meter, all *sync.WaitGroup, c client, rate int) {
	for next := time.Now(); m.running(); {
		next = next.Add(time.Duration(rand.ExpFloat64() * float64(time.Second) / float64(rate)))
		time.Sleep(time.Until(next))
		name := l.fresh("distance")
		all.Go(func() {
			m.once(func() error {
				ctx, cancel := context.WithTimeout(context.Background(), roundTime)
				defer cancel()
				h, err := c.lock(ctx, name)
				if err != nil {
					return err
				}
				return h.unlock(ctx)
			})
		})
	}
}
