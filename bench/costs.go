package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fencelock/fencelock/conformance/fault"
)

// meter counts and times the operations of callers, after a warm-up that does not count.
type meter struct {
	phase   atomic.Int32 // 0: warm-up, 1: counted, 2: over
	ended   time.Time    // when phase 2 began; valid then
	stop    func()       // ends the callers' waits at the end; nil: they end without it
	failed  atomic.Pointer[error]
	callers sync.WaitGroup

	mu        sync.Mutex
	latencies []time.Duration
}

func (m *meter) running() bool  { return m.phase.Load() < 2 && m.failed.Load() == nil }
func (m *meter) counting() bool { return m.phase.Load() == 1 }

// note ends all loops after an error.
func (m *meter) note(err error) {
	if err != nil {
		m.failed.CompareAndSwap(nil, &err)
	}
}

// repeat starts a caller in a closed loop.
func (m *meter) repeat(op func() error) {
	m.callers.Go(func() {
		mine := make([]time.Duration, 0, 1<<14)
		for m.running() {
			began := time.Now()
			m.note(op())
			if m.counting() {
				mine = append(mine, time.Since(began))
			}
		}
		m.add(mine...)
	})
}

func (m *meter) add(latencies ...time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.latencies = append(m.latencies, latencies...)
}

// once starts one operation of an open loop. It counts if it began while the measurement ran.
func (m *meter) once(op func() error) {
	m.callers.Go(func() {
		counts, began := m.counting(), time.Now()
		m.note(op())
		if counts {
			m.add(time.Since(began))
		}
	})
}

// measure lets the callers run for a warm-up, and then for length, or for a quarter of it in a quick run, and notes
// the operations after the warm-up.
func (r *round) measure(m *meter, length time.Duration) usage {
	defer m.phase.Store(2) // also if the counters cannot be read
	sleep(r.ctx, r.length(200*time.Millisecond, 100*time.Millisecond))
	d := r.spend(func() {
		m.phase.Store(1)
		sleep(r.ctx, r.length(length, length/4))
		m.ended = time.Now()
		m.phase.Store(2)
	})
	if m.stop != nil {
		m.stop()
	}
	m.callers.Wait()
	if err := m.failed.Load(); err != nil {
		r.must(*err)
	}
	r.s["ops"] = float64(len(m.latencies)) / d.wall.Seconds()
	d.perOp(r.s, float64(len(m.latencies)))
	r.s.latencies(m.latencies)
	return d
}

const longTTL = 30 * time.Second // no lock is renewed during a measurement

// cycle is the uncontended cost: callers that share one client, each with its own name, acquire and release.
func cycle(r *round) {
	c, m := r.client(longTTL), &meter{}
	for range r.size {
		name := r.name("cycle")
		m.repeat(func() error { return c.cycle(r.ctx, name) })
	}
	r.measure(m, 500*time.Millisecond)
}

// distance is the latency over a network: callers come at random, independently of earlier ones (an open loop), each
// takes and releases its own name, and every message takes half of a round trip of 1.2 ms.
func distance(r *round) {
	proxy, o := r.proxy()
	proxy.Delay(fault.Both, 600*time.Microsecond)
	o.ttl = longTTL
	c, m := r.open(1, o)[0], &meter{}
	m.callers.Go(func() {
		for next := time.Now(); m.running(); {
			next = next.Add(time.Duration(rand.ExpFloat64() * float64(time.Second) / float64(r.size)))
			time.Sleep(time.Until(next))
			name := r.fresh("distance")
			m.once(func() error { return c.cycle(r.ctx, name) })
		}
	})
	r.measure(m, 2*time.Second)
}

// growth is the cost of a name that was held often before, in a store without compaction: the median of acquires and
// releases by one caller, after 0 to 100,000 of them by ten clients one after the other. A store that remembers
// deleted entries may become slower and slower, for all its users.
func growth(r *round) {
	c, name := r.client(longTTL), r.name("growth")
	done, first, worst := 0, 0.0, 0.0
	for _, size := range []int{0, 10_000, 30_000, 100_000} {
		if size < 100_000 {
			r.row(fmt.Sprint(r.peer.name, " after ", size), roleFloor)
		} else {
			r.row(r.peer.name, r.peer.role) // the row of the targets
		}
		if r.quick {
			size /= 100
		}
		for range 10 {
			before := r.client(longTTL)
			for range (size - done) / 10 {
				r.must(before.cycle(r.ctx, name))
			}
			before.end()
		}
		m := &meter{}
		m.repeat(func() error { return c.cycle(r.ctx, name) })
		r.measure(m, 2*time.Second)
		if size == 0 {
			first = r.s["p50"]
		}
		done, worst = size, max(worst, r.s["p50"]/first)
		r.s["before"], r.s["ratio"], r.s["worst"] = float64(size), r.s["p50"]/first, worst
	}
}

// besideRenewals is the number of acquires and releases per second beside the renewals of sessions.
const besideRenewals = 10_000

// renewals measures the number of sessions that a service can keep alive: each of r.size callers keeps renewing one
// session, while other callers acquire and release.
func renewals(r *round) {
	const lockCallers, clients = 64, 4
	locker, m := r.client(longTTL), &meter{}
	for range clients {
		c := &client{scope: scope{ctx: r.ctx}}
		r.later(c.end)
		var renew renewal
		r.must(c.try(func() {
			renew = r.peer.sessions(c, clientOptions{addr: r.at.addr(), ttl: longTTL}, r.size/clients)
		}))
		for i := range r.size / clients {
			m.repeat(func() error { return renew(r.ctx, i) })
		}
	}
	var locked atomic.Int64
	for range lockCallers {
		name := r.name("renew")
		m.callers.Go(func() {
			pace := time.NewTicker(2 * lockCallers * time.Second / besideRenewals)
			defer pace.Stop()
			for ; m.running(); <-pace.C {
				m.note(locker.cycle(r.ctx, name))
				if m.counting() {
					locked.Add(2)
				}
			}
		})
	}
	d := r.measure(m, 2*time.Second)
	r.s["lock-ops"] = float64(locked.Load()) / d.wall.Seconds()
}

// wake is the latency of one hand-over on a quiet machine: a holder releases while one waiter with its own client has
// been waiting for 130 to 190 ms.
func wake(r *round) {
	clients, name := r.open(2, clientOptions{ttl: 10 * time.Second}), r.name("wake")
	var all []time.Duration
	d := r.spend(func() {
		for range r.length(10, 3) {
			h := r.lock(clients[0], name)
			granted := r.granting(clients[1], name)
			sleep(r.ctx, 130*time.Millisecond+rand.N(60*time.Millisecond))
			released := time.Now()
			r.must(h.Release(r.ctx))
			all = append(all, r.await(granted).Sub(released))
		}
	})
	d.perOp(r.s, float64(2*len(all)))
	r.s.latencies(all)
	r.s["ops"] = 1 / r.s["p50"] // so that "x floor" is the factor by which it is faster than the floor
}

// baton is the shared state of the workers of a hand-off. A latency is the time of a grant to another worker.
type baton struct {
	meter
	inside, last     atomic.Int32 // last: the number of the last holder
	released         atomic.Int64 // when the last holder began to release, in ns since start
	overlaps, errors atomic.Int64
	start            time.Time
}

// worker is one worker's record.
type worker struct {
	number  int32
	grants  int
	longest time.Duration // the longest wait
}

// handoff is contention: workers on n clients all want one name, release it immediately, and want it again. Only
// grants to another worker than the releaser count: a library that keeps granting the lock to the releaser is fast and
// starves the others.
func handoff(r *round, n int) {
	clients, name := r.open(n, clientOptions{ttl: 10 * time.Second}), r.name("handoff")
	waiting, cancel := context.WithCancel(r.ctx)
	defer cancel()
	b, workers := &baton{meter: meter{stop: cancel}, start: time.Now()}, make([]worker, r.size)
	for i := range workers {
		workers[i].number = int32(i + 1)
		b.callers.Go(func() {
			for b.running() {
				workers[i].try(waiting, b, clients[i%n], name)
			}
		})
	}
	d := r.measure(&b.meter, 2*time.Second)
	var grants, starved, most int
	var longest time.Duration
	least := workers[0].grants
	for _, w := range workers {
		grants, longest = grants+w.grants, max(longest, w.longest)
		least, most = min(least, w.grants), max(most, w.grants)
		if w.grants == 0 {
			starved++
		}
	}
	mean := float64(grants) / float64(r.size)
	r.s["all"], r.s["mean"], r.s["starved"] = float64(grants)/d.wall.Seconds(), mean, float64(starved)
	r.s["least"], r.s["most"], r.s["wait-ms"] = float64(least)/mean, float64(most)/mean, float64(longest.Milliseconds())
	r.s["overlaps"], r.s["errors"] = float64(b.overlaps.Load()), float64(b.errors.Load())
	d.perOp(r.s, float64(grants))
}

// try waits for the lock once, and releases it.
func (w *worker) try(ctx context.Context, b *baton, c *client, name string) {
	began := time.Now()
	h, err := c.lock(ctx, name)
	if err != nil && ctx.Err() == nil {
		b.errors.Add(1)
		sleep(ctx, time.Millisecond)
		return
	}
	now := time.Now()
	switch b.phase.Load() { // a call cut short by the end of the counted phase counts with its time until then
	case 1:
		w.longest = max(w.longest, now.Sub(began))
	case 2:
		w.longest = max(w.longest, b.ended.Sub(began))
	}
	if err != nil {
		return
	}
	if b.inside.Add(1) != 1 {
		b.overlaps.Add(1)
	}
	other := b.last.Swap(w.number) != w.number
	if b.counting() {
		w.grants++
		if from := b.released.Load(); other && from > 0 {
			b.add(now.Sub(b.start) - time.Duration(from))
		}
	}
	b.inside.Add(-1)
	b.released.Store(int64(time.Since(b.start)))
	if err := h.Release(ctx); err != nil && ctx.Err() == nil {
		b.errors.Add(1)
	}
}

// keep is the cost of keeping locks: one client holds many over several renewal intervals.
func keep(r *round, ttl, window time.Duration) {
	if r.quick {
		ttl, window = lossTTL, lossTTL/3
	}
	var t traffic
	c := r.open(1, clientOptions{ttl: ttl, dial: t.over(nil)})[0]
	names, keys, holds := make([]string, r.size), make([]string, r.size), make([]hold, r.size)
	for i := range names {
		names[i] = r.name("hold")
		keys[i] = r.peer.key(names[i])
	}
	kept := r.keeping()
	r.s["acquires"] = r.rate(func(i int) (err error) {
		if holds[i], err = c.lock(r.ctx, names[i]); err == nil {
			holds[i].Context() // a user needs the notification of a loss: its cost counts
		}
		return err
	})
	kept(r.size)

	turned := t.turns.Load()
	d := r.spend(func() { sleep(r.ctx, window) })
	turned = t.turns.Load() - turned
	expired := r.at.missing(&r.scope, keys)
	unnoticed := expired
	for _, h := range holds {
		if unnoticed > 0 && h.Context().Err() != nil {
			unnoticed--
		}
	}
	r.s["releases"] = r.rate(func(i int) error {
		if err := holds[i].Release(r.ctx); expired == 0 {
			return err
		}
		return nil // some holds have ended already
	})
	r.s["expired"], r.s["unnoticed"] = float64(expired), float64(unnoticed)
	d.perSecond(r.s)
	if r.peer.renewEvery == nil {
		return
	}
	interval := r.peer.renewEvery(ttl)
	intervals := d.wall.Seconds() / interval.Seconds()
	r.s["interval-ms"], r.s["turns"] = float64(interval.Milliseconds()), float64(turned)/intervals
	if turned == 0 { // the client makes its own connections, so use the server's count
		r.s["turns"] = d.trips / intervals
	}
	r.s["per-interval"], r.s["per-lock"] = d.commands/intervals, d.commands/intervals/float64(r.size)
}

// rate runs do for each piece of the round, and returns the number of pieces per second.
func (r *round) rate(do func(i int) error) float64 {
	began := time.Now()
	r.must(each(r.size, do))
	return float64(r.size) / time.Since(began).Seconds()
}

// idle is the cost of waiting without events: the waiters share one client, and the holder is another client. Several
// names have so long TTLs that no hold is renewed.
func idle(r *round, names int) {
	var t traffic
	o := clientOptions{ttl: 12 * time.Second, dial: t.over(nil)}
	if names > 1 {
		o.ttl = time.Hour
	} else if r.peer.renewEvery == nil {
		o.ttl = time.Minute // the hold must outlive the window without a renewal
	}
	clients := r.open(2, o)
	all, holds := make([]string, names), make([]hold, names)
	for i := range all {
		all[i] = r.name("idle")
		holds[i] = r.lock(clients[0], all[i])
	}
	kept := r.keeping()
	waiting, cancel := context.WithCancel(r.ctx)
	defer cancel()
	var wg errgroup.Group
	var returned error
	for i := range r.size {
		wg.Go(func() error {
			if _, err := clients[1].lock(waiting, all[i%names]); waiting.Err() == nil {
				return fmt.Errorf("a waiter returned: %w", cmp.Or(err, errors.New("two holders of one lock")))
			}
			return nil
		})
	}
	// Wait until all are in the queue, and until clients have checked their places, which some do after up to 1.5 s.
	entered := r.length(1500*time.Millisecond, 500*time.Millisecond) * time.Duration(max(1, r.size/200))
	sleep(r.ctx, entered+r.length(2500*time.Millisecond, 0))
	kept(r.size) // before the window: collecting garbage uses CPU
	passed := t.bytes.Load()
	d := r.spend(func() { sleep(r.ctx, r.length(8*time.Second, time.Second)) })
	passed = t.bytes.Load() - passed
	began := time.Now()
	cancel()
	r.s["cancel-ms"] = never
	if patiently(waiting, 5*time.Second, func() { returned = wg.Wait() }) {
		r.s["cancel-ms"] = ms(time.Since(began))
		r.must(returned)
	} else { // it ignores contexts, and may not even end with its client
		clients[1].end()
	}
	d.perSecond(r.s)
	if passed > 0 { // the peer uses the given dialer
		r.s["kb/s"] = float64(passed) / 1024 / d.wall.Seconds()
	}
	for _, h := range holds {
		r.must(h.Release(r.ctx))
	}
}

// change is one change on its way to all watchers.
type change struct {
	began time.Time
	late  []time.Duration // the delays of the watchers, in the order in which they got it
	heard atomic.Int64
	all   chan struct{} // closed when all watchers have got it
}

// hear notes that one watcher has got the change.
func (c *change) hear() {
	n := int(c.heard.Add(1))
	if n > len(c.late) {
		return // a watcher got it twice, which the next change would show as too few watchers
	}
	c.late[n-1] = time.Since(c.began)
	if n == len(c.late) {
		close(c.all)
	}
}

// watching is the delay of a change for watchers of one name: from just before the call that changes it until each of
// them has the event.
func watching(r *round) {
	clients := r.open(min(r.size, 10), clientOptions{ttl: longTTL})
	holder, name := r.client(longTTL), r.name("watch")
	var present atomic.Pointer[change]
	present.Store(&change{}) // no call waits for it
	ctx, stop := context.WithCancel(r.ctx)
	var wg sync.WaitGroup
	r.later(wg.Wait)
	r.later(stop)
	failed := make(chan error, r.size)
	for i := range r.size {
		wg.Go(func() {
			heard := func() { present.Load().hear() }
			failed <- r.peer.watch(ctx, watched{clients[i%len(clients)], name, heard})
		})
	}
	// see makes a change and waits until all watchers have got it, or for limit at most.
	see := func(limit time.Duration, act func() error) (c *change, everybody bool) {
		c = &change{began: time.Now(), late: make([]time.Duration, r.size), all: make(chan struct{})}
		present.Store(c)
		r.must(act())
		select {
		case <-c.all:
			return c, true
		case err := <-failed:
			r.must(fmt.Errorf("a watch ended: %w", err))
		case <-time.After(limit):
		}
		return c, false
	}
	var h hold
	changes := []func() error{
		func() (err error) { h, err = holder.lock(r.ctx, name); return err },
		func() error { return h.Release(r.ctx) },
	}
	// Wait until all watches work. A late event must not count for the next change.
	for stand := false; !stand; sleep(r.ctx, 500*time.Millisecond) {
		r.must(r.ctx.Err())
		stand = true
		for _, act := range changes {
			_, everybody := see(500*time.Millisecond, act)
			stand = stand && everybody
		}
	}
	var all, last []time.Duration
	d := r.spend(func() {
		for range r.length(50, 10) {
			for _, act := range changes {
				c, everybody := see(10*time.Second, act)
				if !everybody {
					r.must(fmt.Errorf("%d of %d watchers heard of a change within 10 s", c.heard.Load(), r.size))
				}
				all, last = append(all, c.late...), append(last, c.late[r.size-1])
			}
		}
	})
	r.s.latencies(last)
	r.s["last"] = r.s["p50"]
	d.perOp(r.s, float64(len(all)))
	r.s.latencies(all)
	r.s["ops"] = 1 / r.s["p50"] // so that "x floor" is the factor by which it is faster than the floor
}
