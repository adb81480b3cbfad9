package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// watching is how soon watchers of one name hear of a change: from just before the call that changes it until each of
// them has the event.
func watching(watchers int) scenario {
	sc := scenario{
		name: fmt.Sprint("watch", watchers),
		about: fmt.Sprintf("%d watchers of one name on %d clients; from the call of acquire or release to the event",
			watchers, watchClients(watchers)),
		columns: columns("x=x floor; p50=p50 us; p95=p95 us; p99=p99 us; last=last one, median us; " +
			"client-us=client CPU us/event; server-us=server CPU us/event"),
		floor: "etcd raw",
		curve: &curve{name: "watchers", at: watchers, keys: []string{"p50", "p99", "last"}},

		rounds: 3, quickRounds: 1,
		suits: func(_ system, p peer) bool { return p.watch != nil },
		all: interleaved(func(ctx context.Context, l *lab, p peer) (sample, error) {
			return runWatching(ctx, l, p, watchers)
		}),
	}
	if watchers >= 1000 {
		sc.targets = map[string][]target{"builtin": {atMost("p99", 50_000, "from the change to the client, p99 us")}}
	}
	return sc
}

func watchClients(watchers int) int { return min(watchers, 10) }

// change is one change on its way to all watchers.
type change struct {
	began time.Time
	late  []time.Duration // by who has heard of it, in their order
	heard atomic.Int64
	all   chan struct{} // closed when everybody has
}

// hear notes that one watcher has heard of it.
func (c *change) hear() {
	n := c.heard.Add(1)
	if int(n) > len(c.late) {
		return // heard twice, which the next change would show as heard by too few
	}
	c.late[n-1] = time.Since(c.began)
	if int(n) == len(c.late) {
		close(c.all)
	}
}

func runWatching(ctx context.Context, l *lab, p peer, watchers int) (sample, error) {
	clients, closeAll, err := l.open(ctx, p, watchClients(watchers), clientOptions{ttl: 30 * time.Second})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	holders, closeHolder, err := l.open(ctx, p, 1, clientOptions{ttl: 30 * time.Second})
	if err != nil {
		return nil, err
	}
	defer closeHolder()

	name := l.fresh("watch")
	var present atomic.Pointer[change]
	watchingCtx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	failed := make(chan error, watchers)
	for i := range watchers {
		wg.Go(func() {
			err := p.watch(watchingCtx, clients[i%len(clients)], name, func() {
				if c := present.Load(); c != nil {
					c.hear()
				}
			})
			if watchingCtx.Err() == nil {
				failed <- fmt.Errorf("a watch ended: %w", err)
			}
		})
	}
	// see makes a change and waits until everybody has heard of it; false if that takes too long.
	see := func(limit time.Duration, act func() error) (*change, bool, error) {
		c := &change{began: time.Now(), late: make([]time.Duration, watchers), all: make(chan struct{})}
		present.Store(c)
		if err := act(); err != nil {
			return nil, false, err
		}
		select {
		case <-c.all:
			return c, true, nil
		case err := <-failed:
			return nil, false, err
		case <-time.After(limit):
			return c, false, nil
		case <-ctx.Done():
			return nil, false, ctx.Err()
		}
	}
	// cycle is two changes.
	cycle := func(limit time.Duration) (both []*change, ok bool, err error) {
		var h hold
		up, seen, err := see(limit, func() (err error) { h, err = holders[0].lock(ctx, name); return err })
		if err != nil {
			return nil, false, err
		}
		down, seenToo, err := see(limit, func() error { return h.unlock(ctx) })
		return []*change{up, down}, seen && seenToo, err
	}
	for ready := false; !ready; { // until all watches stand
		if _, ready, err = cycle(500 * time.Millisecond); err != nil {
			return nil, err
		}
		if !ready {
			sleep(ctx, 500*time.Millisecond) // what comes late must not count for the next change
		}
	}
	cycles := 50
	if l.quick {
		cycles = 10
	}
	var all, last []time.Duration
	d, err := l.spend(ctx, p, func() error {
		for range cycles {
			both, ok, err := cycle(10 * time.Second)
			if err != nil {
				return err
			}
			for _, c := range both {
				if !ok {
					return fmt.Errorf("%d of %d watchers heard of a change within 10 s", c.heard.Load(), watchers)
				}
				all, last = append(all, c.late...), append(last, c.late[watchers-1])
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	s := sample{}
	s.latencies(last)
	s["last"] = s["p50"]
	d.perOp(s, float64(len(all)))
	s.latencies(all)
	s["ops"] = 1 / s["p50"] // so that "x floor" is how many times faster than the floor
	return s, nil
}
