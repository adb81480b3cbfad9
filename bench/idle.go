package main

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// idle is what waiting costs while nothing happens: 200 waiters on one client, the holder is another client.
func idle() scenario {
	return scenario{
		name:  "idle200",
		about: "200 waiters on one client, nothing happens; per second, in all (the holder's renewals included)",
		columns: []column{
			{key: "commands/s", title: "commands/s"}, {key: "trips/s", title: "trips/s"},
			{key: "client-cpu", title: "client CPU %"}, {key: "server-cpu", title: "server CPU %"},
			{key: "goroutines", title: "goroutines/waiter"}, {key: "kb", title: "KB/waiter"},
			{key: "cancel-ms", title: "200 cancels ms"},
		},
		targets: map[string][]target{"redis": {
			atMost("commands/s", 5, "commands/s in all"), atMost("client-cpu", 1, "client CPU %"),
			atMost("goroutines", 2.01, "goroutines per waiter (2, rounded; one is the caller's)"),
			atMost("kb", 15, "KB per waiter"),
		}},
		rounds: 1, quickRounds: 1,
		suits: func(_ system, p peer) bool { return p.waits },
		all:   interleaved(runIdle),
	}
}

func runIdle(ctx context.Context, l *lab, p peer) (sample, error) {
	const waiters = 200
	o := clientOptions{ttl: 12 * time.Second}
	if p.renewEvery == nil {
		o.ttl = time.Minute // the hold must outlive the window without help
	}
	clients, closeAll, err := l.open(ctx, p, 2, o)
	if err != nil {
		return nil, err
	}
	defer closeAll()
	name := l.fresh("idle")
	if err := l.seed(ctx, p, name); err != nil {
		return nil, err
	}
	held, err := clients[0].lock(ctx, name)
	if err != nil {
		return nil, err
	}

	foot := takeFootprint()
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	got := make(chan error, waiters)
	for range waiters {
		wg.Go(func() {
			h, err := clients[1].lock(waiting, name)
			if err == nil {
				err = fmt.Errorf("two holders of one lock: %v", h)
			}
			if waiting.Err() == nil {
				got <- err
			}
		})
	}
	sleep(ctx, l.length(1500*time.Millisecond, 500*time.Millisecond))
	now := takeFootprint() // before the window: collecting garbage uses CPU
	before, err := takeUsage(ctx, l.at(p))
	sleep(ctx, l.length(8*time.Second, time.Second))
	after, err2 := takeUsage(ctx, l.at(p))
	began := time.Now()
	cancel()
	wg.Wait()
	cancelled := time.Since(began)
	if err := firstError(err, err2); err != nil {
		return nil, err
	}
	select {
	case err := <-got:
		return nil, fmt.Errorf("a waiter returned: %w", err)
	default:
	}
	s := sample{"cancel-ms": float64(cancelled.Microseconds()) / 1000}
	after.since(before).perSecond(s)
	now.each(s, foot, waiters)
	return s, held.unlock(ctx)
}
