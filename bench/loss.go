package main

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
)

// lossTTL is the TTL where a scenario waits for it to pass.
const lossTTL = 3 * time.Second

// ttl is lossTTL, or two seconds in a quick run.
func (l *lab) ttl() time.Duration { return l.length(lossTTL, 2*time.Second) }

// partition cuts the holder off while a rival on a good network waits. The holder must be told before the rival holds.
func partition() scenario {
	return scenario{
		name:  "partition",
		about: "the holder's network falls silent, a rival waits; TTL 3 s; margin = rival holds - holder told",
		columns: columns("rival-s=rival holds s, min<; rival-s=max>; told-s=told s, min<; told-s=max>; " +
			"margin-ms=margin ms, worst<; margin-ms=median; late=told late or never>"),
		targets: everywhere(atLeast("margin-ms", 0, "worst margin in ms: told before the rival holds")),
		rounds:  5, quickRounds: 2,
		suits: func(s system, p peer) bool { return p.contends() && s.addr() != "" },
		all:   together(runPartition),
	}
}

func runPartition(ctx context.Context, l *lab, p peer) (sample, error) {
	ttl := l.ttl()
	proxy, err := fault.NewProxy(l.at(p).addr())
	if err != nil {
		return nil, err
	}
	defer proxy.Close()
	cut, closeCut, err := l.open(ctx, p, 1, clientOptions{addr: proxy.Addr(), proxied: true, ttl: ttl})
	if err != nil {
		return nil, err
	}
	defer closeCut()
	rivals, closeRivals, err := l.open(ctx, p, 1, clientOptions{ttl: ttl})
	if err != nil {
		return nil, err
	}
	defer closeRivals()

	name := l.fresh("partition")
	h, err := cut[0].lock(ctx, name)
	if err != nil {
		return nil, err
	}
	lost := h.lost()
	granted := granting(ctx, rivals[0], name)
	phase := ttl / 2 // somewhere between two renewals
	if p.renewEvery != nil {
		phase = p.renewEvery(ttl)
	}
	sleep(ctx, 200*time.Millisecond+rand.N(phase))
	proxy.Drop(fault.Both)
	began := time.Now()

	var told, rival time.Time
	timeout := time.After(2*ttl + time.Second)
	for told.IsZero() || rival.IsZero() {
		select {
		case <-lost:
			told, lost = time.Now(), nil
		case g := <-granted:
			if g.err != nil {
				return nil, g.err
			}
			rival = g.at
		case <-timeout:
			if rival.IsZero() {
				return nil, errors.New("the rival did not get the lock")
			}
			return sample{"rival-s": rival.Sub(began).Seconds(), "told-s": never, "margin-ms": -never, "late": 1}, nil
		}
	}
	margin := rival.Sub(told)
	s := sample{"rival-s": rival.Sub(began).Seconds(), "told-s": told.Sub(began).Seconds(),
		"margin-ms": float64(margin.Microseconds()) / 1000, "late": 0}
	if margin < 0 {
		s["late"] = 1
	}
	return s, nil
}

// never is a time that did not come.
var never = math.Inf(1)

// wipe deletes the holder's record behind the library, as a failover that lost data does.
func wipe() scenario {
	return scenario{
		name:    "wipe",
		about:   "the record is deleted behind the library, TTL 3 s: seconds until the holder is told",
		columns: columns("told-s=told s, min<; told-s=median; told-s=max>"),
		targets: everywhere(atMost("told-s", ourRenewal(lossTTL).Seconds()*1.05, "told after s, worst: within one renewal interval")),
		rounds:  5, quickRounds: 2,
		suits: func(_ system, p peer) bool { return p.key != nil && p.contends() },
		all:   together(runWipe),
	}
}

func runWipe(ctx context.Context, l *lab, p peer) (sample, error) {
	ttl := l.ttl()
	clients, closeAll, err := l.open(ctx, p, 1, clientOptions{ttl: ttl})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	name := l.fresh("wipe")
	h, err := clients[0].lock(ctx, name)
	if err != nil {
		return nil, err
	}
	lost := h.lost()
	sleep(ctx, 200*time.Millisecond+rand.N(ttl/3))
	began := time.Now()
	if err := l.at(p).erase(ctx, p.key(name)); err != nil {
		return nil, err
	}
	select {
	case <-lost:
		return sample{"told-s": time.Since(began).Seconds()}, nil
	case <-time.After(2 * ttl):
		return sample{"told-s": never}, nil
	}
}
