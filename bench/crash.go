package main

import (
	"context"
	"math/rand/v2"
	"time"
)

// crash kills the holder's process while another process waits.
func crash() scenario {
	soon := []target{atMost("beyond-ms", 300, "ms beyond one TTL after the kill, worst")}
	return scenario{
		name:    "crash",
		about:   "the holder's process is killed (SIGKILL) while it holds, TTL 3 s: seconds to the next grant",
		columns: columns("grant-s=grant s, min<; grant-s=median; grant-s=max>; beyond-ms=beyond TTL ms, worst>"),
		targets: map[string][]target{"redis": soon, "etcd": soon, "builtin": soon},
		rounds:  5, quickRounds: 2,
		suits: func(s system, p peer) bool { return p.contends() && s.addr() != "" },
		all:   together(runCrash),
	}
}

func runCrash(ctx context.Context, l *lab, p peer) (sample, error) {
	name, ttl := l.fresh("crash"), l.ttl()
	holder, err := startChild(part{l.system.name(), p.name, l.at(p).addr(), ttl.String(), name, "0"})
	if err != nil {
		return nil, err
	}
	defer holder.end()

	clients, closeAll, err := l.open(ctx, p, 1, clientOptions{ttl: ttl})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	granted := granting(ctx, clients[0], name)
	sleep(ctx, ttl/6+rand.N(ttl/2))
	killed := time.Now()
	holder.end()
	g := <-granted
	if g.err != nil {
		return nil, g.err
	}
	took := g.at.Sub(killed)
	return sample{"grant-s": took.Seconds(), "beyond-ms": float64((took - ttl).Microseconds()) / 1000}, nil
}
