package conformance

import (
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// showsClauses compare Description.Shows with the results of inspections: declared fields are set, and other fields
// are zero.
var showsClauses = []Clause{
	{
		ID: "P23", Group: "capabilities", Slug: "look-shows-what-is-declared", caps: backend.CapInspect, run: lookShows,
		Rule: "Look returns time, expiry, waiters and the queue in order exactly where Describe declares them",
	},
	{
		ID: "P24", Group: "capabilities", Slug: "list-shows-what-is-declared", caps: backend.CapList, run: listShows,
		Rule: "List returns time, expiry and waiters exactly where Describe declares them",
	},
	{
		ID: "P25", Group: "capabilities", Slug: "permits-show-their-limit", caps: backend.CapPermits | backend.CapInspect,
		run: permitsShowTheirLimit,
		Rule: "Look and List return the limit of permits exactly where Describe declares it, " +
			"and the queue shows the permits that each waiter requests",
	},
	{
		ID: "P26", Group: "capabilities", Slug: "refusal-shows-when-to-retry", run: refusalShowsWhenToRetry,
		Rule: "a refused attempt returns RetryAfter exactly where Describe declares it",
	},
	{
		ID: "P27", Group: "capabilities", Slug: "change-shows-time-and-author",
		caps: backend.CapWatch | backend.CapForceRelease, run: changeShows,
		Rule: "Watch returns the time of a change and the author of a forced release exactly where Describe declares them",
	},
}

// declares compares one optional field with its declaration.
func (t *trial) declares(what string, declared, there bool) {
	switch {
	case declared && !there:
		t.Errorf("%s is declared but missing", what)
	case !declared && there:
		t.Errorf("%s is set but not declared", what)
	}
}

// dated compares a time with its declaration. Clocks differ.
func (t *trial) dated(what string, declared bool, at time.Time) {
	t.declares(what, declared, !at.IsZero())
	if !at.IsZero() && time.Since(at).Abs() > 24*time.Hour {
		t.Errorf("%s is %v, which is a day or more from now", what, at)
	}
}

// filled compares the fields of a name, and of its only holder.
func (t *trial) filled(call string, f backend.StateFields, s backend.State, g backend.Grant, waiters int) {
	if len(s.Holders) != 1 {
		t.Fatalf("%s = %+v, want one holder", call, s)
	}
	h := s.Holders[0]
	t.dated(call+": Since of a holder", f.Since, h.Since)
	t.declares(call+": ExpiresIn", f.ExpiresIn, h.ExpiresIn != 0)
	if h.ExpiresIn < 0 || h.ExpiresIn > g.TTL+time.Second {
		t.Errorf("%s: ExpiresIn is %v of %v", call, h.ExpiresIn, g.TTL)
	}
	if h.Limit != 0 {
		t.Errorf("%s: an exclusive hold has the limit %d", call, h.Limit)
	}
	if want := waiters; f.Waiters && s.Waiters != want || !f.Waiters && s.Waiters != 0 {
		t.Errorf("%s: %d waiters, want %d if that is declared: %t", call, s.Waiters, want, f.Waiters)
	}
}

// line compares the queue of a name with the waiting requests, in their order.
func (t *trial) line(f backend.StateFields, s backend.State, rs ...backend.Request) {
	if !f.Queue {
		if len(s.Queue) > 0 || f.QueueSince {
			t.Errorf("the queue is not declared, and is %+v; its times are declared: %t", s.Queue, f.QueueSince)
		}
		return
	}
	if len(s.Queue) != len(rs) {
		t.Errorf("the queue has %d places, want %d: %+v", len(s.Queue), len(rs), s.Queue)
		return
	}
	for i, w := range s.Queue {
		r := rs[i]
		if w.Owner != r.Owner || w.HoldID != r.HoldID || w.Kind != r.Kind || w.Permits != r.Permits || w.Limit != r.Limit {
			t.Errorf("place %d of the queue is %+v, want that of %+v", i+1, w, r)
		}
		t.dated("Since of a waiter", f.QueueSince, w.Since)
	}
}

func lookShows(t *trial) {
	a, b := t.client(), t.client()
	inspector, _ := backend.As[backend.Inspector](b)
	first, second := t.request(t.name()), t.request("")
	second.Name, second.Owner = first.Name, "conformance second"
	if t.desc.Capabilities.Has(backend.CapShared) {
		second.Kind = backend.KindShared
	}
	g := t.take(a, t.request(first.Name), "of a free name")
	ctx := t.within(20 * slack)
	w1 := t.wait(ctx, b, first)
	t.queued(a, first.Name, 1)
	w2 := t.wait(ctx, b, second)
	t.queued(a, first.Name, 2)
	s, err := inspector.Look(t.within(slack), first.Name)
	if err != nil {
		t.Fatalf("Look = %v", err)
	}
	f := t.desc.Shows.Look
	t.filled("Look", f, s, g, 2)
	t.line(f, s, first, second)
	t.release(a, g, "by the holder")
	t.release(b, t.got(w1, t.ttl+slack, "after the release"), "by the first waiter")
	t.release(b, t.got(w2, t.ttl+slack, "after the release"), "by the second waiter")
	if s, err := inspector.Look(t.within(slack), first.Name); err != nil || s.Held || s.Waiters != 0 || len(s.Queue) > 0 {
		t.Errorf("Look at a free name = %+v, %v", s, err)
	}
}

// listed returns the only name in a list.
func (t *trial) listed(d backend.Driver, name string) backend.State {
	lister, _ := backend.As[backend.Lister](d)
	var all []backend.State
	for s, err := range lister.List(t.within(slack), name) {
		if err != nil {
			t.Fatalf("List = %v", err)
		}
		all = append(all, s)
	}
	if len(all) != 1 {
		t.Fatalf("List = %+v, want one name", all)
	}
	return all[0]
}

func listShows(t *trial) {
	a, b := t.client(), t.client()
	r := t.request(t.name())
	g := t.take(a, t.request(r.Name), "of a free name")
	w := t.wait(t.within(20*slack), b, r)
	t.queued(a, r.Name, 1)
	f := t.desc.Shows.List
	s := t.listed(b, r.Name)
	t.filled("List", f, s, g, 1)
	t.line(f, s, r)
	t.release(a, g, "by the holder")
	t.release(b, t.got(w, t.ttl+slack, "after the release"), "by the waiter")
}

func permitsShowTheirLimit(t *trial) {
	a, b := t.client(), t.client()
	inspector, _ := backend.As[backend.Inspector](b)
	name := t.name()
	two, one, three := t.permits(name, 2, 5), t.permits(name, 1, 5), t.permits(name, 3, 5)
	g, h := t.take(a, two, "of a free name"), t.take(b, one, "of what is left")
	w := t.wait(t.within(20*slack), b, three)
	t.queued(a, name, 1)
	s, err := inspector.Look(t.within(slack), name)
	if err != nil || len(s.Holders) != 2 {
		t.Fatalf("Look = %+v, %v; want two holders", s, err)
	}
	limits := func(call string, declared bool, s backend.State) {
		for _, h := range s.Holders {
			t.declares(call+": Limit", declared, h.Limit != 0)
			if h.Limit != 0 && h.Limit != 5 {
				t.Errorf("%s: the limit is %d, want 5", call, h.Limit)
			}
		}
		if free, limit, ok := s.Remaining(); ok != declared || ok && (free != 2 || limit != 5) {
			t.Errorf("%s: %d of %d permits remain (%t), want 2 of 5 if the limit is declared: %t", call, free, limit, ok, declared)
		}
	}
	limits("Look", t.desc.Shows.Look.Limit, s)
	t.line(t.desc.Shows.Look, s, three)
	if t.desc.Capabilities.Has(backend.CapList) {
		limits("List", t.desc.Shows.List.Limit, t.listed(b, name))
	}
	t.release(a, g, "by a holder")
	t.release(b, h, "by a holder")
	t.release(b, t.got(w, t.ttl+slack, "after the releases"), "by the waiter")
}

func refusalShowsWhenToRetry(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	_, err := t.try(b, t.request(name))
	var held *backend.HeldError
	if !errors.As(err, &held) {
		t.Fatalf("an attempt on a held name = %v, want a *HeldError", err)
	}
	t.declares("RetryAfter", t.desc.Shows.RetryAfter, held.RetryAfter != 0)
	if held.RetryAfter < 0 || held.RetryAfter > g.TTL+time.Second {
		t.Errorf("RetryAfter is %v, and the hold lives for %v", held.RetryAfter, g.TTL)
	}
	t.release(a, g, "by the holder")
}

func changeShows(t *trial) {
	a, b := t.client(), t.client()
	force, _ := backend.As[backend.ForceReleaser](b)
	name := t.name()
	w := t.follow(b, a, name)
	g := t.take(a, t.request(name), "of a free name")
	r := backend.ForceRequest{Name: name, Reason: "conformance", By: "Ann", Principal: "certificate ann"}
	if err := force.ForceRelease(t.within(slack), r); err != nil {
		t.Fatalf("ForceRelease = %v", err)
	}
	of := func(typ backend.ChangeType) backend.Change {
		return w.await(slack, "the hold", func(c backend.Change) bool { return c.Owner == g.Owner && c.Type == typ })
	}
	shows := t.desc.Shows
	began := of(backend.ChangeAcquired)
	t.dated("Time of a grant", shows.ChangeTime, began.Time)
	if began.By != "" || began.Principal != "" {
		t.Errorf("a grant has the author %q, %q", began.By, began.Principal)
	}
	ended := of(backend.ChangeForceReleased)
	t.dated("Time of a forced release", shows.ChangeTime, ended.Time)
	t.declares("By", shows.ChangeAuthor, ended.By != "")
	// A service may know the caller's principal itself, or may have none for a client in its own process.
	if !shows.ChangeAuthor && ended.Principal != "" {
		t.Errorf("Principal is %q, but the author is not declared", ended.Principal)
	}
	if ended.By != "" && ended.By != r.By {
		t.Errorf("By is %q, want %q", ended.By, r.By)
	}
}
