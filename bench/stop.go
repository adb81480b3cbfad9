package main

import (
	"context"
	"errors"
	"sync"
	"time"
)

// stop asks how long calls take whose context ends after 1 s, while the server is stopped with its sockets open.
func stop() scenario {
	return scenario{
		name:    "stop",
		about:   "the server is stopped (SIGSTOP), contexts of 1 s: seconds until the calls return",
		columns: columns("lock-s=Lock returned s>; unlock-s=Unlock returned s>; unlock-ok=Unlock said ok>"),
		targets: everywhere(
			atMost("lock-s", 1.05, "Lock, s: within 50 ms of the context's end"),
			atMost("unlock-s", 1.55, "Unlock, s: within 50 ms of the half second that Release goes on after it"),
		),
		rounds: 2, quickRounds: 1,
		suits: func(s system, p peer) bool { return p.contends() && s.addr() != "" },
		all:   runStops,
	}
}

func runStops(ctx context.Context, l *lab, peers []peer, rounds int) []row {
	rows := newRows(peers)
	for range rounds {
		if err := l.system.reset(ctx); err != nil {
			for i := range rows {
				rows[i].add(nil, err)
			}
			continue
		}
		runStop(ctx, l, peers, rows)
	}
	return rows
}

// runStop stops the server once for all peers.
func runStop(ctx context.Context, l *lab, peers []peer, rows []row) {
	clients, holds := make([]client, len(peers)), make([]hold, len(peers))
	errs := make([]error, len(peers))
	for i, p := range peers {
		opened, closeAll, err := l.open(ctx, p, 1, clientOptions{ttl: 30 * time.Second})
		if err == nil {
			defer closeAll()
			clients[i] = opened[0]
			holds[i], err = clients[i].lock(ctx, l.fresh("stop"))
		}
		errs[i] = err
	}
	if !l.system.pause() {
		for i := range rows {
			rows[i].add(nil, errors.New("the server was not started here, so it cannot be stopped"))
		}
		return
	}
	defer l.system.resume() // before the clients are closed
	limit := l.length(8*time.Second, 4*time.Second)
	samples := make([]sample, len(peers))
	var wg sync.WaitGroup
	for i := range peers {
		if errs[i] != nil {
			continue
		}
		samples[i] = sample{}
		var mu sync.Mutex
		timed := func(key string, call func(ctx context.Context) error) {
			bounded, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			began := time.Now()
			done := make(chan error, 1)
			go func() { done <- call(bounded) }()
			took, ok := never, 0.0
			select {
			case err := <-done:
				took = time.Since(began).Seconds()
				if err == nil {
					ok = 1
				}
			case <-time.After(limit):
			}
			mu.Lock()
			defer mu.Unlock()
			samples[i][key+"-s"], samples[i][key+"-ok"] = took, ok
		}
		wg.Go(func() {
			timed("lock", func(ctx context.Context) error {
				_, err := clients[i].lock(ctx, l.fresh("stop"))
				return err
			})
		})
		wg.Go(func() { timed("unlock", holds[i].unlock) })
	}
	wg.Wait()
	for i := range rows {
		rows[i].add(samples[i], errs[i])
	}
}
