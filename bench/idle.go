package main

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"
)

// idle is what waiting costs while nothing happens: the waiters share one client, the holder is another client.
func idle(waiters int) scenario {
	sc := scenario{
		name:  fmt.Sprint("idle", waiters),
		about: fmt.Sprintf("%d waiters on one client, nothing happens; per second, in all (the holder's renewals included)", waiters),
		columns: columns("commands/s; trips/s; kb/s=KB/s; client-cpu=client CPU %; server-cpu=server CPU %; " +
			"goroutines=goroutines/waiter; kb=KB/waiter; cancel-ms=all cancel ms"),
		targets: map[string][]target{"redis": {
			atMost("commands/s", 5, "commands/s in all"), atMost("client-cpu", 1, "client CPU %"),
			atMost("goroutines", 2.01, "goroutines per waiter (2, rounded; one is the caller's)"),
			atMost("kb", 15, "KB per waiter"),
		}, "etcd": {atMost("trips/s", 5, "requests/s in all")}},
		rounds: 1, quickRounds: 1,
		suits: func(_ system, p peer) bool { return p.waits },
		all: interleaved(func(ctx context.Context, l *lab, p peer) (sample, error) {
			return runIdle(ctx, l, p, waiters, 1)
		}),
	}
	if waiters == 2000 {
		sc.targets = map[string][]target{"zookeeper": {atMost("kb/s", 1000, "KB/s in all")}}
	}
	return sc
}

// idleNames is the same with a name for each waiter, all held for so long that nobody renews.
func idleNames(waiters int) scenario {
	sc := idle(waiters)
	sc.name = fmt.Sprint("idlenames", waiters)
	sc.about = fmt.Sprintf("%d waiters on one client, a name each, nothing happens; per second, in all", waiters)
	most := 40.0
	if waiters > 200 {
		most = 500
	}
	sc.targets = map[string][]target{"redis": {atMost("commands/s", most, "commands/s in all")}}
	sc.suits = func(_ system, p peer) bool { return p.waits && (p.role == roleOurs || waiters <= 200) }
	sc.all = interleaved(func(ctx context.Context, l *lab, p peer) (sample, error) {
		return runIdle(ctx, l, p, waiters, waiters)
	})
	return sc
}

func runIdle(ctx context.Context, l *lab, p peer, waiters, names int) (sample, error) {
	var t traffic
	o := clientOptions{ttl: 12 * time.Second, dial: t.dial}
	if names > 1 {
		o.ttl = time.Hour
	} else if p.renewEvery == nil {
		o.ttl = time.Minute // the hold must outlive the window without help
	}
	clients, closeAll, err := l.open(ctx, p, 2, o)
	if err != nil {
		return nil, err
	}
	defer closeAll()
	var all []string
	var holds []hold
	for range names {
		name := l.fresh("idle")
		if err := l.seed(ctx, p, name); err != nil {
			return nil, err
		}
		held, err := clients[0].lock(ctx, name)
		if err != nil {
			return nil, err
		}
		all, holds = append(all, name), append(holds, held)
	}

	foot := takeFootprint()
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	got := make(chan error, waiters)
	for i := range waiters {
		wg.Go(func() {
			h, err := clients[1].lock(waiting, all[i%names])
			if err == nil {
				err = fmt.Errorf("two holders of one lock: %v", h)
			}
			if waiting.Err() == nil {
				got <- err
			}
		})
	}
	// Until all stand in the queue, and those who look whether they do, after 1.5 s at most, have looked.
	entered := l.length(1500*time.Millisecond, 500*time.Millisecond) * time.Duration(max(1, waiters/200))
	sleep(ctx, entered+l.length(2500*time.Millisecond, 0))
	now := takeFootprint() // before the window: collecting garbage uses CPU
	passed := t.bytes.Load()
	d, err := l.spend(ctx, p, func() error { sleep(ctx, l.length(8*time.Second, time.Second)); return nil })
	passed = t.bytes.Load() - passed
	began := time.Now()
	cancel()
	deaf := time.AfterFunc(5*time.Second, clients[1].close) // it knows no contexts
	wg.Wait()
	cancelled := float64(time.Since(began).Microseconds()) / 1000
	if !deaf.Stop() {
		cancelled = math.Inf(1)
	}
	if err != nil {
		return nil, err
	}
	select {
	case err := <-got:
		return nil, fmt.Errorf("a waiter returned: %w", err)
	default:
	}
	s := sample{"cancel-ms": cancelled}
	d.perSecond(s)
	if passed > 0 { // the peer dials as it is told
		s["kb/s"] = float64(passed) / 1024 / d.wall.Seconds()
	}
	now.each(s, foot, waiters)
	for _, held := range holds {
		if err := held.unlock(ctx); err != nil {
			return nil, err
		}
	}
	return s, nil
}
