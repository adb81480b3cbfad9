package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// watchClauses belong to the group capabilities. They have a file of their own for the types below.
var watchClauses = []Clause{
	{
		ID: "P9", Group: "capabilities", Slug: "watch-tells-in-order", caps: backend.CapWatch, run: watchTellsInOrder,
		Rule: "Watch yields each grant and end of its name in order, with owner and token, and no changes of other names",
	},
	{
		ID: "P10", Group: "capabilities", Slug: "watch-replays-without-a-gap",
		caps: backend.CapWatchReplay | backend.CapInspect, run: watchReplaysWithoutAGap,
		Rule: "Watch since the revision of a Look or of a change yields every later change, and none twice",
	},
	{
		ID: "P11", Group: "capabilities", Slug: "watch-tells-why-by-force",
		caps: backend.CapWatch | backend.CapForceRelease, run: watchTellsWhyByForce,
		Rule: "Watch yields force-released, with the reason, for a hold that ForceRelease ended",
	},
	{
		ID: "P12", Group: "capabilities", Slug: "watch-tells-of-expiry", caps: backend.CapWatch, needs: needLink,
		run:  watchTellsOfExpiry,
		Rule: "Watch yields expired for the hold of a holder that no longer responds, and not before the hold ends",
	},
	{
		ID: "P13", Group: "capabilities", Slug: "watch-ends", caps: backend.CapWatch, run: watchEnds,
		Rule: "Watch ends with the loop, with its context and with Close; the context's error or ErrClosed comes last",
	},
	{
		ID: "P14", Group: "capabilities", Slug: "compaction-is-reported", caps: backend.CapWatchReplay | backend.CapInspect,
		needs: needCompact, serial: true, run: compactionIsTold,
		Rule: "Watch since a revision whose changes are no longer kept yields ErrCompacted, and never skips changes",
	},
}

// watched is a watch in another goroutine.
type watched struct {
	t      *trial
	events chan backend.Change
	end    chan error // one value: the last error
	cancel context.CancelFunc
}

// watch starts to watch name. The end of the clause waits for the watch.
func (t *trial) watch(d backend.Driver, name string, since uint64) *watched {
	watcher, _ := backend.As[backend.Watcher](d)
	ctx, cancel := context.WithCancel(t.Context())
	w := &watched{t: t, events: make(chan backend.Change, 1024), end: make(chan error, 1), cancel: cancel}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		var last error
		for e, err := range watcher.Watch(ctx, name, since) {
			if last != nil {
				t.Errorf("Watch went on after the error %v with %+v, %v", last, e, err)
				break
			}
			if last = err; err == nil {
				w.events <- e
			}
		}
		w.end <- last
	}()
	t.Cleanup(func() {
		cancel()
		// A watch that ignores its context ends when its driver is closed, after this.
		select {
		case <-gone:
		case <-time.After(slack):
		}
	})
	return w
}

// await returns the first event within d that pick accepts, or ends the clause.
func (w *watched) await(d time.Duration, what string, pick func(backend.Change) bool) backend.Change {
	patience := time.NewTimer(d)
	defer patience.Stop()
	for {
		select {
		case e := <-w.events:
			if pick(e) {
				return e
			}
		case err := <-w.end:
			w.end <- err
			w.t.Fatalf("the watch ended with %v before %s", err, what)
		case <-patience.C:
			w.t.FatalLatef("the watch did not yield %s within %v", what, d)
		}
	}
}

// next returns the next n events, each of which must come within d, or ends the clause.
func (w *watched) next(n int, d time.Duration) []backend.Change {
	var all []backend.Change
	for i := range n {
		all = append(all, w.await(d, fmt.Sprintf("event %d of %d", i+1, n), func(backend.Change) bool { return true }))
	}
	return all
}

// ended returns the last error of the watch, or ends the clause if the watch goes on after d.
func (w *watched) ended(d time.Duration, when string) error {
	patience := time.NewTimer(d)
	defer patience.Stop()
	select {
	case err := <-w.end:
		return err
	case <-patience.C:
		w.t.FatalLatef("%s: the watch has not ended after %v", when, d)
		return nil
	}
}

// follow starts to watch name from now on, and returns after the first event: a watch does not announce its beginning.
// Events of the passer-by may still arrive before other events.
func (t *trial) follow(d, passerBy backend.Driver, name string) *watched {
	w := t.watch(d, name, 0)
	patience := t.within(2 * slack)
	for len(w.events) == 0 {
		if patience.Err() != nil {
			t.FatalLatef("the watch yielded nothing within %v", 2*slack)
		}
		r := t.request(name)
		r.Owner = "passer-by"
		t.release(passerBy, t.take(passerBy, r, "of a free name"), "by a passer-by")
		pause(patience, 20*time.Millisecond)
	}
	return w
}

// story is the expected sequence of events: a grant and its end for each hold.
type story struct {
	grants []backend.Grant
	ends   []backend.ChangeType
}

func (s *story) add(g backend.Grant, end backend.ChangeType) {
	s.grants = append(s.grants, g)
	s.ends = append(s.ends, end)
}

// events returns the number of events.
func (s *story) events() int { return 2 * len(s.grants) }

// check compares the events: one for each grant and one for each end, hold after hold.
func (s *story) check(t *trial, got []backend.Change) {
	var last uint64
	for i, e := range got {
		g, want := s.grants[i/2], backend.ChangeAcquired
		if i%2 == 1 {
			want = s.ends[i/2]
		}
		if e.Type != want || e.Name != g.Name || e.Owner != g.Owner || e.Token != g.Token {
			t.Errorf("event %d = %+v, want %q of %q with token %v of %q", i+1, e, want, g.Owner, g.Token, g.Name)
		}
		if e.Revision == 0 || e.Revision < last {
			t.Errorf("event %d has revision %d after %d, want a greater one", i+1, e.Revision, last)
		}
		last = e.Revision
	}
}

// live makes n successive holds of name, and some of similar names, and returns the expected events of name.
func (t *trial) live(d backend.Driver, name string, n int) *story {
	s := &story{}
	for i := range n {
		r := t.request(name)
		r.Owner = fmt.Sprintf("owner %d", i)
		g := t.take(d, r, "of a free name")
		for _, other := range []string{name + "/beside", name + "x", name[:len(name)-1]} {
			t.release(d, t.take(d, t.request(other), "of another name"), "of another name")
		}
		t.release(d, g, "by the holder")
		s.add(g, backend.ChangeReleased)
	}
	return s
}

func watchTellsInOrder(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	w := t.follow(b, a, name)
	s := t.live(a, name, 5)
	// A hold passes to a waiter: its end comes before the waiter's grant.
	r, heir := t.request(name), t.request(name)
	r.Owner, heir.Owner = "first", "heir"
	g := t.take(a, r, "of a free name")
	waiting := t.wait(t.within(10*slack), a, heir)
	t.queued(a, name, 1)
	t.release(a, g, "by the holder")
	s.add(g, backend.ChangeReleased)
	got := t.got(waiting, t.ttl+slack, "after the release")
	t.release(a, got, "by the heir")
	s.add(got, backend.ChangeReleased)
	first := w.await(slack, "the first hold", func(e backend.Change) bool { return e.Owner != "passer-by" })
	s.check(t, append([]backend.Change{first}, w.next(s.events()-1, slack)...))
}

func watchReplaysWithoutAGap(t *trial) {
	a, b := t.client(), t.client()
	inspector, _ := backend.As[backend.Inspector](b)
	name := t.name()
	info, err := inspector.Look(t.within(slack), name)
	if err != nil || info.Revision == 0 {
		t.Fatalf("Look at a free name = %+v, %v; want a revision", info, err)
	}
	s := t.live(a, name, 4)
	w := t.watch(b, name, info.Revision)
	got := w.next(4, slack)
	later := t.live(a, name, 4) // replayed and new events meet
	s.grants, s.ends = append(s.grants, later.grants...), append(s.ends, later.ends...)
	got = append(got, w.next(s.events()-4, slack)...)
	s.check(t, got)
	for i, e := range got {
		rest := got[i+1:]
		for len(rest) > 0 && rest[0].Revision == e.Revision {
			rest = rest[1:]
		}
		w := t.watch(b, name, e.Revision)
		again := w.next(len(rest), slack)
		w.cancel()
		if !slices.Equal(again, rest) {
			t.Errorf("a watch since the revision of event %d yielded\n%+v, want\n%+v", i+1, again, rest)
		}
	}
	held := t.take(a, t.request(name), "of a free name")
	if info, err = inspector.Look(t.within(slack), name); err != nil || !info.Held {
		t.Fatalf("Look at a held name = %+v, %v", info, err)
	}
	t.release(a, held, "by the holder")
	if e := t.watch(b, name, info.Revision).next(1, slack)[0]; e.Type != backend.ChangeReleased ||
		e.Token != held.Token {
		t.Errorf("the event after the revision at which %v held is %+v, want its release", held.Token, e)
	}
}

func watchTellsWhyByForce(t *trial) {
	a, b := t.client(), t.client()
	force, _ := backend.As[backend.ForceReleaser](b)
	name := t.name()
	w := t.follow(b, a, name)
	const reason = "node 7f9c is gone: \"drained\" {1}"
	g := t.take(a, t.request(name), "of a free name")
	if err := force.ForceRelease(t.within(slack), backend.ForceRequest{Name: name, Reason: reason}); err != nil {
		t.Fatalf("ForceRelease = %v", err)
	}
	e := w.await(slack, "the end of the hold", func(e backend.Change) bool {
		return e.Token == g.Token && e.Owner == g.Owner && e.Type != backend.ChangeAcquired
	})
	if e.Type != backend.ChangeForceReleased || e.Reason != reason {
		t.Errorf("the end by force = %+v, want %q with the reason %q", e, backend.ChangeForceReleased, reason)
	}
}

func watchTellsOfExpiry(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	w := t.follow(b, a, name)
	_, _, g := t.silent(name)
	e := w.await(g.TTL+2*slack, "the end of the hold", func(e backend.Change) bool {
		return e.Owner == g.Owner && e.Type != backend.ChangeAcquired
	})
	if early := g.SentAt.Add(t.desc.Validity(g.TTL)).Sub(t.now()); early > 0 {
		t.Violatedf("the watch yielded the end of a silent holder %v before SentAt + validity", early)
	}
	if e.Type != backend.ChangeExpired || e.Token != g.Token {
		t.Errorf("the end of a silent holder = %+v, want %q with token %v", e, backend.ChangeExpired, g.Token)
	}
}

func watchEnds(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()

	w := t.follow(b, a, name)
	w.cancel()
	if err := w.ended(grace+promptly, "after its context"); !errors.Is(err, context.Canceled) {
		t.Errorf("the end of a watch whose context was cancelled = %v, want the context's error", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	watcher, _ := backend.As[backend.Watcher](b)
	var last error
	for _, err := range watcher.Watch(ended, name, 0) {
		last = err
	}
	if !errors.Is(last, context.Canceled) {
		t.Errorf("the end of a watch whose context had ended before = %v, want the context's error", last)
	}

	// A loop that breaks ends its watch, and does not obstruct the next watch.
	live := t.within(4 * slack)
	n := 0
	busy := t.busy(live, a, name)
	for range 3 {
		for _, err := range watcher.Watch(live, name, 0) {
			if err != nil {
				t.Fatalf("Watch beside others = %v", err)
			}
			n++
			break
		}
	}
	busy()
	if n != 3 {
		t.Errorf("three loops that broke after one event received %d", n)
	}

	c := t.client()
	w = t.follow(c, a, name)
	if err := closeWithin(c, slack); err != nil {
		t.Errorf("Close under a watch = %v", err)
	}
	if err := w.ended(promptly, "after Close"); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("the end of a watch whose driver was closed = %v, want ErrClosed", err)
	}
}

// busy acquires and releases name repeatedly until stop, its result, is called.
func (t *trial) busy(ctx context.Context, d backend.Driver, name string) func() {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if g, err := t.try(d, t.request(name)); err != nil {
				t.Errorf("acquire by the only contender = %v", err)
			} else {
				t.release(d, g, "by the only contender")
			}
			pause(ctx, 10*time.Millisecond)
		}
	}()
	stop := func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}

func compactionIsTold(t *trial) {
	a, b := t.client(), t.client()
	inspector, _ := backend.As[backend.Inspector](b)
	name := t.name()
	revision := func() uint64 {
		info, err := inspector.Look(t.within(slack), name)
		if err != nil || info.Revision == 0 {
			t.Fatalf("Look = %+v, %v; want a revision", info, err)
		}
		return info.Revision
	}
	since := revision()
	t.release(a, t.take(a, t.request(name), "of a free name"), "by the holder")
	t.h.Server.Compact(t, name)
	w := t.watch(b, name, since)
	if err := w.ended(slack, "since a revision that is compacted"); !errors.Is(err, backend.ErrCompacted) {
		t.Errorf("the end of a watch since a revision that is compacted = %v, want ErrCompacted", err)
	}
	if n := len(w.events); n > 0 {
		t.Errorf("a watch since a revision that is compacted yielded %d events before that", n)
	}
	s := &story{}
	w = t.watch(b, name, revision())
	g := t.take(a, t.request(name), "of a free name")
	t.release(a, g, "by the holder")
	s.add(g, backend.ChangeReleased)
	s.check(t, w.next(2, slack))
}
