package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/machine"
)

// restarts is what locks that are held cost the bundled server: memory, snapshots, and the time that it needs to come
// back. The figures of the state alone are those of the server's state machine in this process; the others are those of
// a server of one member that is started for it.
func restarts() scenario {
	return scenario{
		name:  "restart",
		about: "locks held on one durable server: memory, snapshots, kill (SIGKILL) and start until the next grant",
		columns: columns("live-kb=state KB/lock; server-kb=server's resident KB/lock; pause-ms=snapshot pause ms; " +
			"call-ms=longest call meanwhile ms; write-ms=write ms; mb=snapshot MB; read-ms=read ms; " +
			"restart-s=start from snapshot s; replay-s=start from log s; gone=locks gone>"),
		targets: map[string][]target{"builtin": {
			atMost("server-kb", 1, "KB per lock, of the server's resident memory"),
			atMost("pause-ms", 10, "snapshot pause, ms"),
			atMost("restart-s", 2, "start from a snapshot to the next grant, s"),
			atMost("gone", 0, "locks that the restart lost"),
		}},
		rounds: 1, quickRounds: 1,
		suits: func(_ system, p peer) bool { return p.role == roleOurs },
		all:   runRestarts,
	}
}

func runRestarts(ctx context.Context, l *lab, _ []peer, rounds int) []row {
	sizes := []int{1000, 10_000, 100_000}
	var rows []row
	for _, n := range sizes {
		r := row{name: fmt.Sprintf("%s, %d held", ours, n), role: roleVariant}
		if n == sizes[len(sizes)-1] {
			r.role = roleOurs
		}
		for range rounds {
			s := sample{}
			err := measureState(s, n)
			if err == nil {
				err = runRestart(ctx, l, s, n, r.role == roleOurs && !l.quick)
			}
			r.add(s, err)
		}
		rows = append(rows, r)
	}
	return rows
}

// measureState holds n locks in a state machine, in one session, as a client does.
func measureState(s sample, n int) error {
	before := takeFootprint()
	m := machine.New(1)
	id := machine.SessionID{1}
	now := time.Now().UnixNano()
	m.Apply(now, &machine.Command{Op: machine.OpOpenSession, Session: id, TTL: time.Minute})
	for i := range n {
		seq := uint64(i + 1)
		r, _ := m.Apply(now, &machine.Command{
			Op: machine.OpAcquire, Session: id, Seq: seq, Acked: seq - 1, Requests: []machine.Request{{
				Name: fmt.Sprint("bench/restart/", i), ID: backend.NewRequestID(), Owner: "host.example/12345/0123456789abcdef",
			}},
		})
		if r.Code != machine.CodeGranted {
			return fmt.Errorf("the state machine answers %d to acquire %d", r.Code, i)
		}
	}
	takeFootprint().each(s, before, n)
	s["live-kb"] = s["kb"]

	var pauses []time.Duration
	var frozen *machine.Frozen
	for range 5 {
		began := time.Now()
		frozen = m.Freeze()
		pauses = append(pauses, time.Since(began))
	}
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	pauseTimes := sample{}
	pauseTimes.latencies(pauses)
	s["pause-ms"] = pauseTimes["p50"] / 1000
	var snapshot bytes.Buffer
	began := time.Now()
	size, err := frozen.WriteTo(&snapshot)
	if err != nil {
		return err
	}
	s["write-ms"], s["mb"] = ms(time.Since(began)), float64(size)/(1<<20)
	began = time.Now()
	err = machine.New(1).Restore(io.Reader(&snapshot))
	s["read-ms"] = ms(time.Since(began))
	return err
}

// runRestart holds n locks on a server, kills it and starts it again. With snapshot set it waits for a snapshot first,
// which the server makes by itself, at most once in half a minute.
func runRestart(ctx context.Context, l *lab, s sample, n int, snapshot bool) error {
	b, ok := l.system.(*builtinSystem)
	if !ok {
		return errors.ErrUnsupported
	}
	one := &fencelockSystem{size: 1}
	err := one.start(ctx, b.binary)
	if err == nil {
		err = measureRestart(ctx, l, one, s, n, snapshot)
	}
	return errors.Join(err, one.close())
}

func measureRestart(ctx context.Context, l *lab, one *fencelockSystem, s sample, n int, snapshot bool) error {
	server, p := one.servers[0], one.peers()[0]
	clients, closeAll, err := l.open(ctx, p, 1, clientOptions{ttl: time.Minute})
	if err != nil {
		return err
	}
	defer closeAll()
	before, err := server.resident()
	if err != nil {
		return err
	}
	names := make([]string, n)
	if err := each(n, func(i int) (err error) {
		names[i] = fmt.Sprint("bench/restart/", i)
		_, err = clients[0].lock(ctx, names[i])
		return err
	}); err != nil {
		return err
	}
	after, err := server.resident()
	if err != nil {
		return err
	}
	s["server-kb"] = (after - before) / 1024 / float64(n)
	if snapshot {
		if err := awaitSnapshot(ctx, l, clients[0], filepath.Join(server.dir, "data", "snapshots"), s); err != nil {
			return err
		}
	}

	server.kill()
	began := time.Now()
	if err := server.start(); err != nil {
		return err
	}
	fresh, err := p.open(clientOptions{addr: one.endpoints(), ttl: time.Minute})
	if err != nil {
		return err
	}
	defer fresh.close()
	granted, err := grantOne(ctx, l, fresh, sample{})
	if took := granted.Sub(began).Seconds(); snapshot {
		s["restart-s"] = took
	} else {
		s["replay-s"] = took
	}
	gone, err2 := one.missing(ctx, names)
	s["gone"] = float64(gone)
	return errors.Join(err, err2)
}

// awaitSnapshot acquires and releases, which fills the log, until the server has made a snapshot, and notes the longest
// call while it did.
func awaitSnapshot(ctx context.Context, l *lab, c client, dir string, s sample) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute) // the server looks every 30 to 60 s whether it is time
	defer cancel()
	type call struct{ began, ended time.Time }
	var calls []call
	var failed error
	filling, stop := context.WithCancel(ctx)
	var filler sync.WaitGroup
	filler.Go(func() {
		name := l.fresh("snapshot")
		for filling.Err() == nil && failed == nil {
			began := time.Now()
			h, err := c.lock(ctx, name)
			if err == nil {
				err = h.unlock(ctx)
			}
			failed = err
			calls = append(calls, call{began, time.Now()})
		}
	})
	began, ended, err := watchSnapshots(ctx, dir)
	stop()
	filler.Wait()
	if err := errors.Join(err, failed); err != nil {
		return err
	}
	var longest time.Duration
	for _, c := range calls {
		if c.ended.After(began) && c.began.Before(ended) {
			longest = max(longest, c.ended.Sub(c.began))
		}
	}
	s["call-ms"] = float64(longest.Microseconds()) / 1000
	return nil
}

// watchSnapshots returns when the next snapshot appeared in dir, and when it was complete. The state is frozen just
// before it appears: 100 ms are taken off.
func watchSnapshots(ctx context.Context, dir string) (began, ended time.Time, err error) {
	const unfinished = ".tmp"
	var old []string
	for ctx.Err() == nil {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return began, ended, err
		}
		var now []string
		for _, e := range entries {
			now = append(now, e.Name())
		}
		if old == nil {
			old = append(now, "")
		}
		for _, name := range now {
			switch {
			case slices.Contains(old, name):
			case strings.HasSuffix(name, unfinished) && began.IsZero():
				began = time.Now().Add(-100 * time.Millisecond)
			case !strings.HasSuffix(name, unfinished):
				if ended = time.Now(); began.IsZero() {
					began = ended.Add(-100 * time.Millisecond)
				}
				return began, ended, nil
			}
		}
		sleep(ctx, 5*time.Millisecond)
	}
	return began, ended, fmt.Errorf("there is no snapshot in %s: %w", dir, ctx.Err())
}
