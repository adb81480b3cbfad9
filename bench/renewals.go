package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// besideRenewals is how many acquires and releases a second go on while sessions are renewed.
const besideRenewals = 10_000

// renewals is how many sessions a service can keep alive: so many callers renew one each, again and again, while other
// callers acquire and release.
func renewals(callers int) scenario {
	sc := scenario{
		name: fmt.Sprint("renew", callers),
		about: fmt.Sprintf("%d callers on 4 clients renew a session each; 64 callers acquire and release beside them, %d a second "+
			"in all", callers, besideRenewals),
		columns: columns("x=x floor; ops=renewals/s; lock-ops=lock operations/s; p50=renewal p50 us; p95=p95 us; " +
			"p99=p99 us; commands=entries/renewal; client-us=client CPU us/renewal; " +
			"server-us=server CPU us/renewal"),
		floor:  "etcd raw",
		rounds: 3, quickRounds: 1,
		suits: func(_ system, p peer) bool { return p.sessions != nil },
		all: interleaved(func(ctx context.Context, l *lab, p peer) (sample, error) {
			return runRenewals(ctx, l, p, callers)
		}),
	}
	if callers >= 1024 {
		sc.targets = map[string][]target{"builtin": {
			atLeast("ops", 100_000, "renewals/s, each proved by a quorum"),
			atLeast("lock-ops", 0.95*besideRenewals, "lock operations/s beside them"),
		}}
	}
	return sc
}

func runRenewals(ctx context.Context, l *lab, p peer, callers int) (sample, error) {
	const ttl = 30 * time.Second
	lockers, closeLockers, err := l.open(ctx, p, 1, clientOptions{ttl: ttl})
	if err != nil {
		return nil, err
	}
	defer closeLockers()
	all := make([]sessions, 4)
	for i := range all {
		if all[i], err = p.sessions(ctx, clientOptions{addr: l.at(p).addr(), ttl: ttl}, callers/len(all)); err != nil {
			return nil, err
		}
		defer all[i].close()
	}

	m := newMeter()
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			m.repeat(func() error { return all[i%len(all)].renew(ctx, i/len(all)) })
		})
	}
	var locked atomic.Int64
	const lockCallers = 64
	for range lockCallers {
		name := l.fresh("renew")
		wg.Go(func() {
			pace := time.NewTicker(2 * lockCallers * time.Second / besideRenewals)
			defer pace.Stop()
			for m.running() {
				h, err := lockers[0].lock(ctx, name)
				if err == nil {
					err = h.unlock(ctx)
				}
				if err != nil {
					m.fail(err)
					return
				}
				if m.counting() {
					locked.Add(2)
				}
				<-pace.C
			}
		})
	}
	d, err := m.measure(ctx, l, p, l.length(300*time.Millisecond, 200*time.Millisecond), l.length(2*time.Second, 500*time.Millisecond))
	wg.Wait()
	if err := errors.Join(m.err(), err); err != nil {
		return nil, err
	}
	s := m.sample(d)
	s["lock-ops"] = float64(locked.Load()) / d.wall.Seconds()
	return s, nil
}
