package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// cycle is the uncontended cost: callers that share one client, each with a name of its own, acquire and release.
func cycle(callers int) scenario {
	sc := scenario{
		name:  fmt.Sprint("tput", callers),
		about: fmt.Sprintf("%d callers, a name each, one client: acquire + release", callers),
		columns: columns("x=x floor; x2=x second; ops=cycles/s; p50=p50 us; p95=p95 us; p99=p99 us; trips=trips/op; " +
			"commands=commands/op; client-us=client CPU us/op; cpu-x=CPU x floor; " +
			"server-us=server CPU us/op"),
		floor: "raw pooled", second: []string{"raw autopipelined"},
		curve:  &curve{name: "callers", at: callers, keys: []string{"ops", "p99", "client-us", "server-us"}},
		rounds: 5, quickRounds: 1,
		suits: func(_ system, p peer) bool { return p.role != roleFloor || !p.waits },
		all:   interleaved(func(ctx context.Context, l *lab, p peer) (sample, error) { return runCycle(ctx, l, p, callers) }),
	}
	if callers == 1 {
		sc.second = append(sc.second, "redsync-5")
	}
	switch callers {
	case 1:
		sc.targets = map[string][]target{"redis": {
			atMost("trips", 2.02, "round trips per acquire + release (2, rounded)"),
			atMost("cpu-x", 1.3, "client CPU, x pooled floor"),
			atLeast("x", 0.87, "cycles/s, x pooled floor (1.15 x its latency)"),
		}, "redlock": {
			atLeast("x2", 1.67, "cycles/s, x redsync (0.6 x its latency)"),
		}, "etcd": {
			atMost("trips", 2.05, "messages per acquire + release (2, and a keepalive now and then)"),
		}, "builtin": {
			atMost("commands", 2.05, "log entries per acquire + release"),
		}, "http": {
			atLeast("x", 0.333, "cycles/s, x the SDK on the same server (3 x its time)"),
		}}
		sc.name, sc.about = "seq", "1 caller, 1 name: acquire + release (the curve's first point)"
	case 16:
		sc.targets = map[string][]target{"redis-cluster": {
			atLeast("x", 1.3, "cycles/s, x pooled floor"),
		}}
	case 32:
		sc.targets = map[string][]target{"postgres": {
			atLeast("x", 0.8, "cycles/s, x raw UPDATE, of which a cycle has two"),
		}}
	case 64:
		sc.targets = map[string][]target{"redis": {
			atLeast("x", 2, "cycles/s, x pooled floor"),
			atLeast("x2", 0.8, "cycles/s, x autopipelined floor"),
		}, "redis-cluster": {
			atLeast("x", 1.5, "cycles/s, x pooled floor"),
		}, "etcd": {
			atLeast("x", 1, "cycles/s, x raw put + delete"),
		}, "zookeeper": {
			atLeast("x", 1, "cycles/s, x raw create and delete on one session"),
		}, "builtin": {
			atLeast("x", 5, "cycles/s, x raw etcd of three members"),
		}}
	case 256:
		sc.targets = map[string][]target{"builtin": {
			atLeast("ops", 25_000, "cycles/s: 50 000 lock operations/s, an acquire and a release being two"),
			atMost("p99", 50_000, "acquire + release, p99 us"),
		}}
	}
	return sc
}

func runCycle(ctx context.Context, l *lab, p peer, callers int) (sample, error) {
	clients, closeAll, err := l.open(ctx, p, 1, clientOptions{ttl: 30 * time.Second})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	names := make([]string, callers)
	for i := range names {
		names[i] = l.fresh("cycle")
		if err := l.seed(ctx, p, names[i]); err != nil {
			return nil, err
		}
	}
	return runCallers(ctx, l, p, clients[0], names,
		l.length(150*time.Millisecond, 50*time.Millisecond), l.length(500*time.Millisecond, 200*time.Millisecond))
}

// runCallers acquires and releases names on one client, each by a caller of its own.
func runCallers(ctx context.Context, l *lab, p peer, c client, names []string, warmUp, length time.Duration) (sample, error) {
	m := newMeter()
	var wg sync.WaitGroup
	for _, name := range names {
		wg.Go(func() {
			m.repeat(func() error {
				h, err := c.lock(ctx, name)
				if err != nil {
					return err
				}
				return h.unlock(ctx)
			})
		})
	}
	d, err := m.measure(ctx, l, p, warmUp, length)
	wg.Wait()
	if err := errors.Join(m.err(), err); err != nil {
		return nil, err
	}
	return m.sample(d), nil
}

// grant is when a lock was granted that was given back at once.
type grant struct {
	at  time.Time
	err error
}

// granting waits for a lock that somebody else holds.
func granting(ctx context.Context, c client, name string) <-chan grant {
	granted := make(chan grant, 1)
	go func() {
		h, err := c.lock(ctx, name)
		at := time.Now()
		if err == nil {
			err = h.unlock(ctx)
		}
		granted <- grant{at, err}
	}()
	return granted
}

// sleep waits for d, or for the end of ctx.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
