package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// dead is what waiters who have died cost those behind them. listened has a stranger subscribe to everything, as
// monitoring tools do, so that the service sees messages to the dead received.
func dead(waiters int, listened bool) scenario {
	sc := scenario{
		name:    fmt.Sprint("dead", waiters),
		about:   fmt.Sprintf("%d waiters whose process was killed, a live one behind them, TTL 30 s: release to grant", waiters),
		columns: columns("grant-s=grant s, min<; grant-s=median; grant-s=max>"),
		targets: map[string][]target{"redis": {atMost("grant-s", 3, "s from the release to the grant")}},
		rounds:  3, quickRounds: 1,
		suits: func(_ system, p peer) bool { return p.contends() },
		all: interleaved(func(ctx context.Context, l *lab, p peer) (sample, error) {
			return runDead(ctx, l, p, waiters, listened)
		}),
	}
	sc.targets["redis-cluster"] = sc.targets["redis"]
	if listened {
		sc.name += "p"
		sc.about += ", beside PSUBSCRIBE *"
	}
	return sc
}

const deadTTL = 30 * time.Second

func runDead(ctx context.Context, l *lab, p peer, waiters int, listened bool) (sample, error) {
	if listened {
		deaf, err := listen(ctx, l.system)
		if err != nil {
			return nil, err
		}
		defer deaf()
	}
	clients, closeAll, err := l.open(ctx, p, 2, clientOptions{ttl: deadTTL})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	name := l.fresh("dead")
	held, err := clients[0].lock(ctx, name)
	if err != nil {
		return nil, err
	}
	child, err := startChild(part{
		l.system.name(), p.name, addresses(l.at(p)), deadTTL.String(), name, strconv.Itoa(waiters),
	})
	if err != nil {
		return nil, err
	}
	defer child.end()
	waiting, cancel := context.WithTimeout(ctx, 2*deadTTL)
	defer cancel()
	granted := granting(waiting, clients[1], name)
	sleep(ctx, time.Second) // until it stands in the queue
	child.end()
	released := time.Now()
	if err := held.unlock(ctx); err != nil {
		return nil, err
	}
	g := <-granted
	return sample{"grant-s": g.at.Sub(released).Seconds()}, g.err
}

// listen subscribes to everything on all servers of s.
func listen(ctx context.Context, s system) (deaf func(), err error) {
	var clients []*goredis.Client
	deaf = func() {
		for _, c := range clients {
			c.Close()
		}
	}
	for addr := range strings.SplitSeq(addresses(s), ",") {
		c := goredis.NewClient(&goredis.Options{Addr: addr})
		clients = append(clients, c)
		if _, err := c.PSubscribe(ctx, "*").Receive(ctx); err != nil {
			deaf()
			return nil, err
		}
	}
	return deaf, nil
}

// addresses returns where a service is, also one of several servers.
func addresses(s system) string {
	many, ok := s.(*redisCluster)
	if !ok {
		return s.addr()
	}
	var all []string
	for _, one := range many.redisSystems {
		all = append(all, one.address)
	}
	return strings.Join(all, ",")
}
