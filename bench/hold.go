package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// held is what keeping locks costs: one client holds n locks over several renewal intervals.
func held(n int) scenario {
	ttl, window := 3*time.Second, 6*time.Second
	if n >= 100_000 {
		ttl, window = 10*time.Second, 10*time.Second
	}
	targets := []target{
		atMost("goroutines", 0.01, "goroutines per lock"),
		atMost("kb", 2, "KB per lock"),
		atMost("unnoticed", 0, "locks that expired unnoticed"),
	}
	if n <= 10_000 {
		targets = append(targets, atMost("turns", 5, "round trips per renewal interval, the same for 1,000 and 10,000 locks"))
	}
	return scenario{
		name:  fmt.Sprintf("hold%dk", n/1000),
		about: fmt.Sprintf("one client holds %d locks, TTL %v; round trips and commands per renewal interval", n, ttl),
		columns: columns("turns=round trips/interval; per-interval=commands/interval; per-lock=commands/lock/interval; " +
			"interval-ms=interval ms; client-cpu=client CPU %; server-cpu=server CPU %; " +
			"goroutines=goroutines/lock>; kb=KB/lock>; acquires=acquires/s; releases=releases/s; expired>; " +
			"unnoticed>"),
		targets: map[string][]target{"redis": targets, "etcd": targets, "builtin": targets},
		curve:   &curve{name: "locks held", at: n, keys: []string{"kb", "turns", "client-cpu", "server-cpu", "acquires", "releases"}},

		rounds: 1, quickRounds: 1,
		suits: func(_ system, p peer) bool {
			switch {
			case p.key == nil || p.role == roleVariant || n >= 100_000 && p.role != roleOurs:
				return false
			case n > 1000:
				return p.renewEvery != nil // the others do nothing but expire: once is enough to see it
			}
			return true
		},
		all: interleaved(func(ctx context.Context, l *lab, p peer) (sample, error) {
			if l.quick {
				return runHeld(ctx, l, p, n, lossTTL, lossTTL/3)
			}
			return runHeld(ctx, l, p, n, ttl, window)
		}),
	}
}

func runHeld(ctx context.Context, l *lab, p peer, n int, ttl, window time.Duration) (sample, error) {
	var t traffic
	clients, closeAll, err := l.open(ctx, p, 1, clientOptions{ttl: ttl, dial: t.dial})
	if err != nil {
		return nil, err
	}
	defer closeAll()
	names, keys := make([]string, n), make([]string, n)
	for i := range names {
		names[i] = l.fresh("hold")
		keys[i] = p.key(names[i])
	}
	holds := make([]hold, n)
	foot := takeFootprint()

	began := time.Now()
	err = each(n, func(i int) (err error) {
		holds[i], err = clients[0].lock(ctx, names[i])
		if err == nil {
			holds[i].lost() // a user wants to be told: what that takes counts
		}
		return err
	})
	acquired := time.Since(began)
	if err != nil {
		return nil, err
	}
	now := takeFootprint()
	turnsBefore := t.turns.Load()
	d, err := l.spend(ctx, p, func() error { sleep(ctx, window); return nil })
	turned := t.turns.Load() - turnsBefore
	expired, err2 := l.at(p).missing(ctx, keys)
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	unnoticed := expired
	if expired > 0 {
		for _, h := range holds {
			if over(h) && unnoticed > 0 {
				unnoticed--
			}
		}
	}
	began = time.Now()
	err = each(n, func(i int) error { return holds[i].unlock(ctx) })
	released := time.Since(began)
	if err != nil && expired == 0 {
		return nil, err
	}

	s := sample{
		"acquires": float64(n) / acquired.Seconds(), "releases": float64(n) / released.Seconds(),
		"expired": float64(expired), "unnoticed": float64(unnoticed),
	}
	d.perSecond(s)
	if p.renewEvery != nil {
		interval := p.renewEvery(ttl)
		intervals := d.wall.Seconds() / interval.Seconds()
		s["interval-ms"] = float64(interval.Milliseconds())
		s["turns"] = float64(turned) / intervals
		if turned == 0 { // the client dials by itself: what the server received
			s["turns"] = d.trips / intervals
		}
		s["per-interval"] = d.commands / intervals
		s["per-lock"] = d.commands / intervals / float64(n)
	}
	now.each(s, foot, n)
	return s, nil
}

// over reports whether the library has told that h is lost.
func over(h hold) bool {
	select {
	case <-h.lost(): // nil blocks: never told
		return true
	default:
		return false
	}
}

// each runs f for 0 to n-1 in 64 goroutines and returns the first error.
func each(n int, f func(i int) error) error {
	var next atomic.Int64
	var first atomic.Pointer[error]
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for first.Load() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if err := f(i); err != nil {
					first.CompareAndSwap(nil, &err)
				}
			}
		})
	}
	wg.Wait()
	if err := first.Load(); err != nil {
		return *err
	}
	return nil
}

// traffic is what passes over connections: round trips, which are writes that follow a read, and bytes. The server's
// counter of read events does not show the former, because it reads one large pipeline in pieces of 16 KB.
type traffic struct{ turns, bytes atomic.Int64 }

func (t *traffic) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &countedConn{Conn: c, t: t}, nil
}

type countedConn struct {
	net.Conn
	t     *traffic
	wrote atomic.Bool // more recently than read
}

func (c *countedConn) Write(p []byte) (int, error) {
	if !c.wrote.Swap(true) {
		c.t.turns.Add(1)
	}
	n, err := c.Conn.Write(p)
	c.t.bytes.Add(int64(n))
	return n, err
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.wrote.Store(false)
	c.t.bytes.Add(int64(n))
	return n, err
}
