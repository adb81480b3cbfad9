package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"
)

// failover ends the member that leads, at once or politely, and asks for the next grant.
func failover(kill bool) scenario {
	sc := scenario{
		name:  "failover",
		about: "the leader's process is killed (SIGKILL): ms until the next acquire returns",
		columns: columns("grant-ms=next grant ms, min<; grant-ms=median; grant-ms=max>; leader-ms=new leader ms, median; " +
			"leader-ms=max>; tries=failed calls before>; end-ms=process ended ms, max>"),
		targets: map[string][]target{"builtin": {
			atMost("grant-ms", 2000, "next grant, ms after the kill, worst"),
			atMost("tries", 0, "failed calls"),
		}},
		rounds: 5, quickRounds: 1,
		suits: func(s system, p peer) bool {
			c, ok := p.at.(cluster)
			return ok && p.contends() && len(c.processes()) > 1
		},
		all: interleaved(func(ctx context.Context, l *lab, p peer) (sample, error) {
			return runFailover(ctx, l, p, kill)
		}),
	}
	if !kill {
		sc.name, sc.about = "handover", "the leader is asked to end (SIGTERM): ms until the next acquire returns"
		sc.targets = map[string][]target{"builtin": {
			atMost("grant-ms", 100, "next grant, ms after the signal, worst"),
			atMost("tries", 0, "failed calls"),
		}}
	}
	return sc
}

func runFailover(ctx context.Context, l *lab, p peer, kill bool) (sample, error) {
	c := l.at(p).(cluster)
	clients, closeAll, err := l.open(ctx, p, 1, clientOptions{addr: c.endpoints(), ttl: 10 * time.Second})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	leader, err := c.leader(ctx)
	if err != nil {
		return nil, err
	}
	server := c.processes()[leader]
	sleep(ctx, rand.N(100*time.Millisecond)) // somewhere between two heartbeats
	ended := make(chan time.Time, 1)
	began := time.Now()
	if kill {
		server.kill()
		ended <- time.Now()
	} else {
		if err := server.terminate(); err != nil {
			return nil, err
		}
		go func() {
			server.awaitEnd()
			ended <- time.Now()
		}()
	}
	s := sample{"tries": 0}
	var others sync.WaitGroup
	var succeeded time.Time
	others.Go(func() {
		for next := leader; next == leader && ctx.Err() == nil; succeeded = time.Now() {
			next, _ = c.leader(ctx)
		}
	})
	granted, err := grantOne(ctx, l, clients[0], s)
	s["grant-ms"] = float64(granted.Sub(began).Microseconds()) / 1000
	others.Wait()
	s["leader-ms"] = float64(succeeded.Sub(began).Microseconds()) / 1000
	s["end-ms"] = float64((<-ended).Sub(began).Microseconds()) / 1000
	return s, errors.Join(err, server.start(), c.serving(ctx, leader))
}

// grantOne acquires a free name, and returns when it had it. Calls that fail are repeated, and counted.
func grantOne(ctx context.Context, l *lab, c client, s sample) (time.Time, error) {
	name := l.fresh("failover")
	for {
		h, err := c.lock(ctx, name)
		at := time.Now()
		if err == nil {
			return at, h.unlock(ctx)
		}
		if ctx.Err() != nil {
			return at, err
		}
		s["tries"]++
		sleep(ctx, 10*time.Millisecond)
	}
}
