package conformance

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

var sharedClauses = []Clause{
	{
		ID: "R1", Group: "shared", Slug: "readers-hold-together", caps: backend.CapShared, run: readersHoldTogether,
		Rule: "shared holds of several clients coexist, and an exclusive request waits until the last is released",
	},
	{
		ID: "R2", Group: "shared", Slug: "writer-keeps-readers-out", caps: backend.CapShared,
		run: writerKeepsReadersOut,
		Rule: "during an exclusive hold a shared attempt returns ErrHeld, " +
			"and afterwards the shared waiters are granted together",
	},
	{
		ID: "R3", Group: "shared", Slug: "waiting-writer-stops-readers", caps: backend.CapShared,
		run: waitingWriterStopsReaders,
		Rule: "a shared request that arrives while an exclusive request waits is not granted before it, " +
			"unless the exclusive request stops waiting",
	},
	{
		ID: "R4", Group: "shared", Slug: "neither-side-starves", caps: backend.CapShared, run: neitherSideStarves,
		Rule: "a writer is granted despite a stream of readers, and a reader despite a stream of writers",
	},
	{
		ID: "R5", Group: "shared", Slug: "readers-and-writers-never-meet", caps: backend.CapShared,
		run:  readersAndWritersNeverMeet,
		Rule: "of many readers and writers, no other request holds while a writer holds",
	},
	{
		ID: "R6", Group: "shared", Slug: "dead-reader-lets-go", caps: backend.CapShared, needs: needLink,
		run: deadReaderLetsGo,
		Rule: "a shared hold of a client that no longer responds excludes writers for at most its TTL, " +
			"and other shared holds remain",
	},
	{
		ID: "R7", Group: "shared", Slug: "tokens-are-marked", caps: backend.CapShared | backend.CapFencing,
		run:  sharedTokensAreMarked,
		Rule: "tokens of shared holds are marked as not exclusive and follow the order of all grants of the name",
	},
	{
		ID: "R8", Group: "shared", Slug: "each-hold-is-its-own", caps: backend.CapShared,
		run:  func(t *trial) { eachHoldIsItsOwn(t, t.reader) },
		Rule: "each of several shared holds is renewed, released and repeated by its own request alone",
	},
	{
		ID: "R9", Group: "shared", Slug: "hundreds-of-readers", crowd: true, caps: backend.CapShared,
		run:  hundredsOfReaders,
		Rule: "hundreds of readers hold together, and a writer is granted only after the last has released",
	},
}

// reader returns a fresh request for a shared hold.
func (t *trial) reader(name string) backend.Request {
	r := t.request(name)
	r.Kind = backend.KindShared
	return r
}

func readersHoldTogether(t *trial) {
	name := t.name()
	const n = 4
	drivers, grants := make([]backend.Driver, n), make([]backend.Grant, n)
	for i := range drivers {
		drivers[i] = t.client()
		grants[i] = t.take(drivers[i], t.reader(name), "beside other readers")
		if grants[i].Kind != backend.KindShared {
			t.Errorf("the grant's kind is %v, want shared", grants[i].Kind)
		}
	}
	t.mustBeHeld(drivers[0], name, "beside readers")
	w := t.wait(t.within(10*slack), drivers[0], t.request(name))
	t.queued(drivers[1], name, 1)
	for i := n - 1; i > 0; i-- {
		t.release(drivers[i], grants[i], "by a reader")
	}
	if w.ended(200 * time.Millisecond) {
		t.Errorf("a writer returned %v while a reader held", w.err)
	}
	t.release(drivers[0], grants[0], "by the last reader")
	t.release(drivers[0], t.got(w, t.ttl+slack, "after the last reader"), "by the writer")
}

func writerKeepsReadersOut(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	for _, d := range []backend.Driver{a, b} {
		if _, err := t.try(d, t.reader(name)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("a shared attempt beside a writer = %v, want ErrHeld", err)
		}
	}
	one := t.wait(t.within(10*slack), a, t.reader(name))
	two := t.wait(t.within(10*slack), b, t.reader(name))
	t.queued(a, name, 2)
	t.release(a, g, "by the writer")
	first := t.got(one, t.ttl+slack, "after the writer")
	second := t.got(two, t.ttl+slack, "beside another reader")
	t.release(a, first, "by a reader")
	t.release(b, second, "by a reader")
}

func waitingWriterStopsReaders(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.reader(name), "of a free name")
	ctx, cancel := context.WithCancel(t.within(10 * slack))
	w := t.wait(ctx, b, t.request(name))
	t.queued(a, name, 1)
	if got, err := t.try(a, t.reader(name)); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("a shared attempt while a writer waits = %v, want ErrHeld", err)
		if err == nil {
			t.release(a, got, "by the barger")
		}
	}
	reader := t.wait(t.within(10*slack), a, t.reader(name))
	if reader.ended(200 * time.Millisecond) {
		t.Errorf("a reader returned %v while a writer waited", reader.err)
	}
	cancel() // the writer leaves the queue
	<-w.done
	second := t.got(reader, t.ttl+slack, "after the writer gave up")
	t.release(a, second, "by the second reader")
	t.release(a, g, "by the first reader")

	g = t.take(a, t.reader(name), "of a free name")
	w = t.wait(t.within(10*slack), b, t.request(name))
	t.queued(a, name, 1)
	late := t.wait(t.within(10*slack), a, t.reader(name))
	t.queued(a, name, 2)
	t.release(a, g, "by the reader")
	written := t.got(w, t.ttl+slack, "after the reader")
	if late.ended(0) {
		t.Errorf("a reader queued behind the writer returned %v while the writer held", late.err)
	}
	t.release(b, written, "by the writer")
	t.release(a, t.got(late, t.ttl+slack, "after the writer"), "by the late reader")
}

// stream keeps a name busy with overlapping holds of new clients, until stop is called. It returns once each client
// has had its first hold, or after slack.
func (t *trial) stream(name string, clients int, request func(string) backend.Request) (stop func()) {
	ctx, cancel := context.WithCancel(t.within(20 * slack))
	var all sync.WaitGroup
	first := make(chan struct{}, clients)
	for range clients {
		d := t.client()
		all.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				r := request(name)
				r.Wait = true
				g, err := d.Acquire(ctx, r)
				if n == 0 {
					first <- struct{}{}
				}
				if err != nil {
					if ctx.Err() == nil {
						t.Errorf("client of a stream: %v", err)
					}
					break
				}
				pause(ctx, 5*time.Millisecond+rand.N(time.Millisecond)) // out of step with the others
				t.release(d, g, "by one of a stream")
			}
		})
	}
	patience := t.within(slack)
	for range clients {
		select {
		case <-first:
		case <-patience.Done():
		}
	}
	return func() {
		cancel()
		all.Wait()
	}
}

func neitherSideStarves(t *trial) {
	d := t.client()
	for what, side := range map[string]struct{ many, one func(string) backend.Request }{
		"a writer under a stream of readers": {t.reader, t.request},
		"a reader under a stream of writers": {t.request, t.reader},
	} {
		name := t.name()
		stop := t.stream(name, 3, side.many)
		r := side.one(name)
		r.Wait = true
		if g, err := d.Acquire(t.within(5*slack), r); err != nil {
			t.Errorf("%s = %v, want a grant", what, err)
		} else {
			t.release(d, g, "by "+what)
		}
		stop()
	}
}

func readersAndWritersNeverMeet(t *trial) {
	const clients, contenders, rounds = 4, 24, 4
	name := t.name()
	drivers := make([]backend.Driver, clients)
	for i := range drivers {
		drivers[i] = t.client()
	}
	ctx := t.within(20 * slack)
	var readers, writers, together atomic.Int64
	var all sync.WaitGroup
	for i := range contenders {
		all.Go(func() {
			d := drivers[i%clients]
			for range rounds {
				r, count := t.reader(name), &readers
				if i%4 == 0 {
					r, count = t.request(name), &writers
				}
				r.Wait = true
				g, err := d.Acquire(ctx, r)
				if err != nil {
					t.Errorf("contender %d: %v", i, err)
					return
				}
				count.Add(1)
				if r, w := readers.Load(), writers.Load(); w > 1 || w == 1 && r > 0 {
					t.Violatedf("%d writers and %d readers held at once", w, r)
				} else if r > 1 {
					together.Add(1)
				}
				pause(ctx, time.Millisecond)
				count.Add(-1)
				if err := d.Release(ctx, g); err != nil {
					t.Errorf("contender %d: release: %v", i, err)
				}
			}
		})
	}
	all.Wait()
	t.Logf("readers met other readers %d times", together.Load())
}

func deadReaderLetsGo(t *trial) {
	a, link := t.linked()
	b, c := t.client(), t.client()
	name := t.name()
	brief := t.reader(name)
	brief.TTL = t.ttl
	dead := t.take(a, brief, "of a free name")
	living := t.take(b, t.reader(name), "beside a reader")
	link.Drop(fault.Both)
	pause(t.within(dead.TTL+slack), dead.TTL)
	if r := t.renew(b, living); r.Err != nil {
		t.Errorf("renewal of the living reader = %v", r.Err)
	}
	t.mustBeHeld(c, name, "by the living reader")
	t.release(b, living, "by the living reader")
	t.opensWithin(c, name, t.ttl+slack, "after the last living reader")
}

func sharedTokensAreMarked(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	var last uint64
	for range 3 {
		w := t.take(a, t.request(name), "of a free name")
		if !w.Token.Exclusive() || w.Token.Order() <= last {
			t.Violatedf("a writer's token is %v after order %d", w.Token, last)
		}
		last = w.Token.Order()
		t.release(a, w, "by the writer")
		one, two := t.take(a, t.reader(name), "of a free name"), t.take(b, t.reader(name), "beside a reader")
		for _, g := range []backend.Grant{one, two} {
			if !g.Token.Valid() || g.Token.Exclusive() || g.Token.Order() <= last {
				t.Violatedf("a reader's token is %v after order %d, want it marked and greater", g.Token, last)
			}
			last = g.Token.Order()
		}
		t.release(a, one, "by a reader")
		t.release(b, two, "by a reader")
	}
}

// eachHoldIsItsOwn is the clause for kinds with several holders at once.
func eachHoldIsItsOwn(t *trial, request func(string) backend.Request) {
	a, b := t.client(), t.client()
	name := t.name()
	r := request(name)
	one, two := t.take(a, r, "of a free name"), t.take(b, request(name), "beside another")
	again, err := t.try(a, r)
	if err != nil || again.Token != one.Token || again.RequestID != one.RequestID {
		t.Fatalf("the same request again = %+v, %v; want the hold %+v", again, err, one)
	}
	mixed := one
	mixed.RequestID = two.RequestID
	if one.Token != two.Token || one.Incarnation != two.Incarnation {
		if err := a.Release(t.within(slack), mixed); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("release with one hold's request and another's incarnation = %v, want ErrNotHeld", err)
		}
	}
	t.release(a, again, "by the first")
	if r := t.renew(b, two); r.Err != nil {
		t.Errorf("renewal of the second after the release of the first = %v", r.Err)
	}
	if r := t.renew(a, again); !errors.Is(r.Err, backend.ErrNotHeld) {
		t.Errorf("renewal after the release = %v, want ErrNotHeld", r.Err)
	}
	if err := a.Release(t.within(slack), again); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("second release = %v, want ErrNotHeld", err)
	}
	if exclusive := t.request(name); r.Kind == backend.KindShared {
		_, err := t.try(a, exclusive)
		if !errors.Is(err, backend.ErrHeld) {
			t.Errorf("an exclusive attempt while the second holds = %v, want ErrHeld", err)
		}
	}
	byRequest := request(name)
	t.take(a, byRequest, "beside another")
	if err := a.Release(t.within(slack), byRequest.Grant()); err != nil {
		t.Errorf("release by request = %v", err)
	}
	t.release(b, two, "by the second")
	t.mustBeFree(a, name, "after the last of several")
}
