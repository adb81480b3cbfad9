package simulation

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/conformance/check"
	"github.com/fencelock/fencelock/fencing"
)

// world is one run: one service, its clients, their callers, and the weather, all drawn from one seed.
type world struct {
	t    *testing.T
	seed chance
	how

	start  time.Time
	length time.Duration
	ttl    time.Duration // roughly
	think  time.Duration // between two pieces of work of one caller, on average
	fine   time.Duration // between two faults of one client, on average
	names  []name
	nodes  []*node
	single bool // one caller for each client: see the package comment

	store    *memory.Store
	admin    *memory.Driver // close to the service, and without faults
	register *fencing.Memory
	rec      record
	history  *check.Recorder // nil unless checked
	over     context.Context
}

// name is one lock.
type name struct {
	text   string
	index  int
	shared bool // readers and writers
	limit  int  // of permits, or zero
}

// draw draws the use of the name.
func (n name) draw(d dice) (kind backend.Kind, limit, permits int) {
	switch {
	case n.limit > 0:
		return backend.KindPermits, n.limit, 1 + d.IntN(n.limit)
	case n.shared && d.one(2):
		return backend.KindShared, 0, 0
	}
	return backend.KindExclusive, 0, 0
}

// outcome is the result of one world.
type outcome struct {
	seed   uint64
	length time.Duration
	single bool
	log    []event
	past   check.History

	violations []string
	closest    time.Duration // the shortest time from a notified loss to a rival's grant

	operations, acquires, renewals, losses, refused, faults int
}

// how has the options of a world.
type how struct {
	corrupt func(*port) // makes it a mutant
	logged  bool        // the outcome has a log
	traced  bool        // and every message is in it
	checked bool        // the outcome has a history for package check, of a short world with plain locks only
}

// simulate runs the world of a seed, in simulated time. If it left a goroutine running, synctest would fail the test.
func simulate(t *testing.T, seed uint64, h how) outcome {
	var o outcome
	defer func() {
		if p := recover(); p != nil {
			panic(fmt.Sprintf("%v\n%s", p, replay(seed)))
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, seed: chance(seed), how: h}
		w.rec.w = w
		w.build()
		w.live()
		w.heal()
		r := &w.rec
		o = outcome{
			seed: seed, length: w.now(), single: w.single, violations: r.verify(),
			closest: r.closest, operations: r.operations,
			acquires: len(r.holds), renewals: r.renewals, losses: r.losses, refused: r.refused, faults: r.faults,
		}
		if h.logged {
			o.log = r.sorted()
		}
		if h.checked {
			o.past = w.history.History()
		}
	})
	return o
}

// replay returns the command that runs one seed again and logs its events.
func replay(seed uint64) string {
	return fmt.Sprintf("FENCELOCK_SEED=%d go test -v -run 'TestSimulation$' ./conformance/simulation", seed)
}

func (w *world) build() {
	d := w.seed.dice(1)
	w.start = time.Now()
	w.ttl = d.scale(2*time.Second, time.Minute)
	w.length = min(max(60*w.ttl, 10*time.Minute), 30*time.Minute)
	w.think = d.scale(w.ttl/5, 4*w.ttl)
	w.fine = d.scale(time.Minute, 4*time.Minute)
	w.single = !d.one(5)
	w.store = memory.NewStore(&memory.Options{
		Clock: backend.GoClock(), Chance: func() float64 { return 0.999 }, // constant, as in port.Chance
	})
	w.admin = w.store.Driver()
	w.register = new(fencing.Memory)
	if w.checked {
		w.history = check.NewRecorder(check.Options{Clock: backend.GoClock()})
		w.length, w.fine, w.single = 15*w.ttl, 3*w.ttl, true
	}
	w.rec.taken = map[fencing.Token]time.Duration{}
	for i := range 1 + d.IntN(3) + boolInt(!w.single) {
		n := name{text: string(rune('a' + i)), index: i}
		switch d.IntN(6) {
		case 0, 1:
			n.shared = true
		case 2:
			n.limit = 1 + d.IntN(4)
		}
		w.names = append(w.names, n)
	}
	for i := range 2 + d.IntN(3) {
		n := &node{
			w: w, id: i, usual: d.scale(50*time.Microsecond, 50*time.Millisecond),
			clock: &clock{
				from: backend.GoClock().Now(), offset: d.between(-time.Hour, time.Hour),
			},
			options: fencelock.Options{TTL: w.ttl},
		}
		if w.checked {
			n.clock.offset = 0 // the recorder's clock is that of the leases
		}
		if ppm := int64(d.IntN(19_801)) - 9_900; !w.single {
			n.clock.ppm = ppm
		}
		if d.one(3) {
			n.options.StopEarly = d.scale(time.Millisecond, w.ttl/4)
		}
		if d.one(4) {
			n.options.LockDelay = d.scale(time.Millisecond, w.ttl/2)
		}
		n.options.Observer = n
		w.nodes = append(w.nodes, n)
		n.open()
		for j := range 1 + boolInt(!w.single) {
			a := &actor{dice: w.seed.dice(2, uint64(i), uint64(j)), w: w, node: n}
			for k, nm := range w.names {
				if w.single || k%2 == j {
					a.names = append(a.names, nm)
				}
			}
			n.actors = append(n.actors, a)
		}
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// live runs the actors and the weather until the time is over.
func (w *world) live() {
	var end context.CancelFunc
	w.over, end = context.WithTimeout(context.Background(), w.length)
	defer end()
	var all sync.WaitGroup
	for _, n := range w.nodes {
		for _, a := range n.actors {
			all.Go(a.run)
		}
		all.Go(func() { n.weather(w.seed.dice(3, uint64(n.id))) })
	}
	all.Go(func() { w.serverWeather(w.seed.dice(4)) })
	all.Wait()
}

// heal requires that every client gets every lock in turn after the faults, without delay once the leftovers of the
// faults have ended, and that no entry remains at the end.
func (w *world) heal() {
	for _, n := range w.nodes {
		n.awake()
	}
	w.rec.note(event{who: weather, what: "all is well"})
	// A lost hold closes its name for its TTL with the lock delay, which Extend may have doubled, after its last request
	// has arrived, which may take three TTLs.
	leftovers := 8*w.ttl + 30*time.Second
	w.turns(leftovers)
	time.Sleep(leftovers)
	w.turns(10 * time.Second)
	for _, n := range w.nodes {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if err := n.close(ctx, false); err != nil {
			w.rec.violation("client %d could not be closed although all was well: %v", n.id, err)
		}
		cancel()
	}
	if names := w.store.Names(); names != 0 {
		w.rec.violation("%d names are still in use after everybody has left", names)
	}
	w.admin.Close(context.Background())
}

// turns lets every client take every name once, all within the given time.
func (w *world) turns(within time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	var all sync.WaitGroup
	for _, n := range w.nodes {
		all.Go(func() {
			time.Sleep(time.Duration(n.id+1) * time.Millisecond)
			for _, nm := range w.names {
				h := n.actors[0].take(ctx, nm, nil, true)
				if h == nil {
					w.rec.violation("client %d had no turn with %s within %v after all was well", n.id, nm.text, within)
					return
				}
				n.actors[0].release(h)
			}
		})
	}
	all.Wait()
}

// now returns the age of the world.
func (w *world) now() time.Duration { return time.Since(w.start) }

// at returns the age of the world at t.
func (w *world) at(t time.Time) time.Duration { return t.Sub(w.start) }

// rest waits for d and reports whether the world continues.
func (w *world) rest(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-w.over.Done():
		return false
	}
}

// until waits until the world has the given age, or ctx ends.
func (w *world) until(ctx context.Context, age time.Duration) {
	t := time.NewTimer(age - w.now())
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// expired returns the instant at which h, past its deadline, counts as lost: a little later than any timer of the
// core, which has a random slack. It does not wait.
func (w *world) expired(h *hold) time.Duration {
	return tick(w.now() + w.nodes[h.node].clock.real(time.Until(h.lease.Deadline())))
}
