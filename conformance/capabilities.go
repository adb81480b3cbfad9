package conformance

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

var capabilityClauses = []Clause{
	{
		ID: "P1", Group: "capabilities", Slug: "undeclared-is-unsupported", run: undeclaredIsUnsupported,
		Rule: "the use of an undeclared capability returns ErrUnsupported and changes nothing",
	},
	{
		ID: "P2", Group: "capabilities", Slug: "declaration-is-consistent", run: declarationIsConsistent,
		Rule: "Describe is complete and cheap, and the driver implements the interface of each declared capability",
	},
	{
		ID: "P3", Group: "capabilities", Slug: "minimum-keeps-it-closed", caps: backend.CapMinHold,
		needs: needLink, run: minimumKeepsItClosed,
		Rule: "a minimum hold keeps the name held for its duration, " +
			"whether the holder releases or dies, and then the name is free",
	},
	{
		ID: "P22", Group: "capabilities", Slug: "unused-minimum-is-dropped", caps: backend.CapMinHold,
		run:  unusedMinimumIsDropped,
		Rule: "a grant that no caller received, released by its request alone, leaves no minimum hold, even after its TTL",
	},
	{
		ID: "P4", Group: "capabilities", Slug: "holder-is-shown", caps: backend.CapInspect, run: holderIsShown,
		Rule: "Look shows the owner, HoldID, token, metadata, times and waiters of a hold, " +
			"and reports a free name as not held",
	},
	{
		ID: "P5", Group: "capabilities", Slug: "list-yields-what-is-held", caps: backend.CapList,
		run:  listYieldsWhatIsHeld,
		Rule: "List yields each held name with the prefix exactly once, and no other name",
	},
	{
		ID: "P6", Group: "capabilities", Slug: "force-release-ends-the-hold", caps: backend.CapForceRelease,
		run: forceReleaseEndsTheHold,
		Rule: "ForceRelease frees the name, the former holder's calls return ErrNotHeld with the reason, " +
			"and ForceRelease of a free name returns ErrNotHeld",
	},
	{
		ID: "P7", Group: "capabilities", Slug: "loss-is-pushed", caps: backend.CapPushLoss | backend.CapForceRelease,
		run:  lossIsPushed,
		Rule: "the driver calls Request.Lost within a second of a loss that the service can detect, and not for a live hold",
	},
	{
		ID: "P8", Group: "capabilities", Slug: "what-is-declared-has-a-clause", run: declaredHasAClause,
		Rule: "no driver declares a capability that this version of the suite does not test",
	},
	{
		ID: "P15", Group: "capabilities", Slug: "exclusion-is-declared", run: exclusionIsDeclared,
		Rule: "Describe declares the basis of exclusion, " +
			"and fencing is not declared over a service that may forget its state",
	},
	{
		ID: "P16", Group: "capabilities", Slug: "texts-come-back-whole", caps: backend.CapInspect,
		run:  textsComeBackWhole,
		Rule: "name, owner, HoldID and metadata of the maximum length are shown unchanged",
	},
}

func undeclaredIsUnsupported(t *trial) {
	d := t.client()
	caps := t.desc.Capabilities
	for what, c := range map[string]struct {
		need   backend.Capabilities
		change func(*backend.Request)
	}{
		"a shared hold": {backend.CapShared, func(r *backend.Request) { r.Kind = backend.KindShared }},
		"permits": {backend.CapPermits, func(r *backend.Request) {
			r.Kind, r.Permits, r.Limit = backend.KindPermits, 1, 2
		}},
		"a minimum hold": {backend.CapMinHold, func(r *backend.Request) { r.MinHold = time.Second }},
		"metadata":       {backend.CapMetadata, func(r *backend.Request) { r.Metadata = map[string]string{"k": "v"} }},
		"a path":         {backend.CapHierarchy, func(r *backend.Request) { r.Hierarchical = true }},
		"an unknown kind": {1 << 31, func(r *backend.Request) {
			r.Kind = backend.KindPermits + 1
		}},
	} {
		if caps.Has(c.need) {
			continue
		}
		r := t.request(t.name())
		c.change(&r)
		for _, wait := range []bool{false, true} {
			r.Wait = wait
			if _, err := d.Acquire(t.within(ample), r); !errors.Is(err, backend.ErrUnsupported) {
				t.Errorf("acquire with %s, undeclared (wait %v) = %v, want ErrUnsupported", what, wait, err)
			}
		}
		t.mustBeFree(d, r.Name, "after an acquire with "+what)
	}

	name := t.name()
	g := t.take(d, t.request(name), "of a free name")
	ctx := t.within(2 * slack)
	if i, ok := backend.As[backend.Inspector](d); ok && !caps.Has(backend.CapInspect) {
		_, err := i.Look(ctx, name)
		t.unsupported("Look", err)
	}
	if l, ok := backend.As[backend.Lister](d); ok && !caps.Has(backend.CapList) {
		var err error
		for _, err = range l.List(ctx, name) {
			break
		}
		t.unsupported("List", err)
	}
	if w, ok := backend.As[backend.Watcher](d); ok && !caps.Has(backend.CapWatch) {
		var err error
		for _, err = range w.Watch(ctx, name, 0) {
			break
		}
		t.unsupported("Watch", err)
	}
	if f, ok := backend.As[backend.ForceReleaser](d); ok && !caps.Has(backend.CapForceRelease) {
		t.unsupported("ForceRelease", f.ForceRelease(ctx, backend.ForceRequest{Name: name, Reason: "conformance"}))
		t.mustBeHeld(d, name, "after an unsupported ForceRelease")
	}
	if m, ok := backend.As[backend.MultiAcquirer](d); ok && !caps.Has(backend.CapMultiAcquire) {
		r := t.request(t.name())
		_, err := m.AcquireAll(ctx, []backend.Request{r})
		t.unsupported("AcquireAll", err)
		t.mustBeFree(d, r.Name, "after an unsupported AcquireAll")
	}
	if !caps.Has(backend.CapFencing) && g.Token.Valid() {
		t.Errorf("a driver that does not declare fencing granted token %v: a guard would trust it", g.Token)
	}
	t.release(d, g, "by the holder")
}

func (t *trial) unsupported(call string, err error) {
	if !errors.Is(err, backend.ErrUnsupported) {
		t.Errorf("%s, undeclared = %v, want ErrUnsupported", call, err)
	}
}

func declarationIsConsistent(t *trial) {
	d := t.client()
	t.warm(d)
	s := d.Describe()
	if s.Name == "" || s.MinTTL <= 0 || s.MaxTTL < 0 || s.TTLGranularity < 0 || s.Margin < 0 || s.Polling < 0 {
		t.Errorf("Describe = %+v, want a name and bounds that are not negative", s)
	}
	if s.Polling > time.Second {
		t.Errorf("waiters poll every %v, want at least once a second", s.Polling)
	}
	if s.MaxTTL > 0 && s.MaxTTL < s.MinTTL {
		t.Errorf("MaxTTL %v is below MinTTL %v", s.MaxTTL, s.MinTTL)
	}
	if s.Validity(s.MinTTL) <= 0 {
		t.Errorf("a grant of MinTTL %v is valid for %v: too short to hold anything", s.MinTTL, s.Validity(s.MinTTL))
	}
	// The core calls Describe on every acquire.
	began := time.Now()
	for range 100 {
		d.Describe()
	}
	if took := time.Since(began); took > time.Second {
		t.Latef("Describe takes %v, and every acquire calls it", (took / 100).Round(time.Microsecond))
	}
	_, promises := d.(backend.FencingDriver)
	switch fences := s.Capabilities.Has(backend.CapFencing); {
	case fences && !promises:
		t.Errorf("fencing is declared by a driver that is no FencingDriver")
	case fences && s.TokenSpace == "":
		t.Errorf("TokenSpace is empty after a grant, so guards cannot tell this cluster from another")
	case !fences && s.NoFencing == "":
		t.Errorf("NoFencing is empty: the tier error would not say why this configuration does not fence")
	}
	for c, there := range map[backend.Capabilities]bool{
		backend.CapInspect:      has[backend.Inspector](d),
		backend.CapList:         has[backend.Lister](d),
		backend.CapWatch:        has[backend.Watcher](d),
		backend.CapForceRelease: has[backend.ForceReleaser](d),
		backend.CapMultiAcquire: has[backend.MultiAcquirer](d),
	} {
		if s.Capabilities.Has(c) && !there {
			t.Errorf("%v is declared without its interface", c)
		}
	}
}

func exclusionIsDeclared(t *trial) {
	d := t.client()
	t.warm(d)
	s := d.Describe()
	switch {
	case s.Exclusion == backend.ExclusionUndeclared || s.Exclusion > backend.ExclusionAsyncReplica:
		t.Errorf("Describe().Exclusion is %v, want a value that package backend declares", s.Exclusion)
	case s.Exclusion == backend.ExclusionVolatileServer && s.Capabilities.Has(backend.CapFencing):
		t.Errorf("fencing is declared over a %v, which repeats tokens when it forgets", s.Exclusion)
	}
}

func has[I any](d backend.Driver) bool {
	_, ok := backend.As[I](d)
	return ok
}

func minimumKeepsItClosed(t *trial) {
	rival := t.client()
	for what, end := range map[string]func(backend.Driver, fault.Link, backend.Grant){
		"the release": func(a backend.Driver, _ fault.Link, g backend.Grant) {
			t.release(a, g, "before the minimum has passed")
		},
		"the end of the TTL": func(_ backend.Driver, link fault.Link, g backend.Grant) {
			link.Drop(fault.Both)
			pause(t.within(g.TTL+slack), g.TTL)
		},
	} {
		a, link := t.linked()
		r := t.brief(t.name())
		r.MinHold = 3 * t.ttl
		before := t.now()
		g := t.take(a, r, "with a minimum hold")
		took := t.now().Sub(before)
		// The driver may have repeated the request after the service executed it.
		if got := g.MinHoldUntil.Sub(before); got < r.MinHold-time.Millisecond || got > r.MinHold+2*slack {
			t.Latef("MinHoldUntil is %v after the acquire, want about %v", got, r.MinHold)
		}
		end(a, link, g)
		next := t.request(r.Name)
		got, err := t.try(rival, next)
		switch {
		case err == nil:
			t.Latef("after %s an attempt within the minimum = nil, %v after the acquire", what, t.now().Sub(before))
		case !errors.Is(err, backend.ErrHeld):
			t.Errorf("within the minimum, after %s: an attempt by another request = %v, want ErrHeld", what, err)
		default:
			next = t.request(r.Name)
			next.Wait = true
			if got, err = rival.Acquire(t.within(r.MinHold+2*slack), next); err != nil {
				t.Latef("after %s the name did not open %v after the minimum: %v", what, slack, err)
			}
		}
		if err != nil {
			continue
		}
		// The clocks of client and service may drift by that much, as for every lease. A driver may count from the answer,
		// and the service from the request.
		if early := g.MinHoldUntil.Sub(t.now()); early > took+r.MinHold/100+50*time.Millisecond {
			t.Violatedf("after %s the name opened %v before the minimum", what, early)
		}
		t.release(rival, got, "by the rival")
	}
}

func unusedMinimumIsDropped(t *trial) {
	rival := t.client()
	for _, late := range []time.Duration{0, t.ttl + t.ttl/2} {
		a := t.client()
		r := t.brief(t.name())
		r.MinHold = t.long()
		g := t.take(a, r, "with a minimum hold")
		pause(t.within(late+slack), late)
		t.mustBeHeld(rival, r.Name, "within the minimum")
		if err := t.releaseSettled(a, r.Grant()); err != nil && (late == 0 || !errors.Is(err, backend.ErrNotHeld)) {
			t.Errorf("release by the request alone, %v after the grant = %v, want nil", t.now().Sub(g.SentAt), err)
		}
		t.mustBeFree(rival, r.Name, "after a release by the request alone")
	}
}

func holderIsShown(t *trial) {
	a, b := t.client(), t.client()
	inspector, _ := backend.As[backend.Inspector](b)
	name := t.name()
	ctx := t.within(10 * slack)
	if info, err := inspector.Look(ctx, name); err != nil || info.Held || len(info.Holders) != 0 || info.Name != name {
		t.Errorf("Look at a free name = %+v, %v; want not held", info, err)
	}
	r := t.request(name)
	if t.desc.Capabilities.Has(backend.CapMetadata) {
		r.Metadata = map[string]string{"job": "nightly {x}:1", "世": "界"}
	}
	g := t.take(a, r, "of a free name")
	w := t.wait(ctx, b, t.request(name))
	t.queued(a, name, 1)
	info, err := inspector.Look(ctx, name)
	if err != nil || !info.Held || len(info.Holders) != 1 {
		t.Fatalf("Look at a held name = %+v, %v; want one holder", info, err)
	}
	h := info.Holders[0]
	if h.Owner != g.Owner || h.HoldID != g.HoldID || h.Kind != g.Kind || h.Token != g.Token {
		t.Errorf("Holder = %+v, want the grant %+v", h, g)
	}
	if h.ExpiresIn < 0 || h.ExpiresIn > g.TTL+time.Second {
		t.Latef("ExpiresIn = %v with a TTL of %v", h.ExpiresIn, g.TTL)
	}
	if age := time.Since(h.Since).Abs(); !h.Since.IsZero() && age > 24*time.Hour { // clocks differ
		t.Errorf("Since is %v, which is %v from now", h.Since, age)
	}
	if t.desc.Capabilities.Has(backend.CapFair) && info.Waiters != 1 {
		t.Errorf("Look shows %d waiters, want 1", info.Waiters)
	}
	if len(r.Metadata) > 0 && !maps.Equal(h.Metadata, r.Metadata) {
		t.Errorf("Metadata = %v, want %v", h.Metadata, r.Metadata)
	}
	t.release(a, g, "by the holder")
	t.release(b, t.got(w, t.ttl+slack, "after the release"), "by the waiter")
}

func listYieldsWhatIsHeld(t *trial) {
	d := t.client()
	lister, _ := backend.As[backend.Lister](d)
	base := t.name()
	want := []string{base + "/a", base + "/b*", base + "/{c}", base + "/é"}
	var grants []backend.Grant
	for _, name := range append(want, base+"x") {
		grants = append(grants, t.take(d, t.request(name), "of a free name"))
	}
	gone := t.take(d, t.request(base+"/gone"), "of a free name")
	t.release(d, gone, "before the list")
	var got []string
	for info, err := range lister.List(t.within(slack), base+"/") {
		if err != nil {
			t.Fatalf("List = %v", err)
		}
		got = append(got, info.Name)
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("List = %q, want %q", got, want)
	}
	if pager, ok := backend.As[backend.Pager](d); ok {
		var page []string
		for info, err := range pager.ListAfter(t.within(slack), base+"/", want[0]) {
			if err != nil {
				t.Fatalf("ListAfter = %v", err)
			}
			page = append(page, info.Name)
		}
		if !slices.Equal(page, want[1:]) {
			t.Errorf("ListAfter %q = %q, want %q in this order", want[0], page, want[1:])
		}
	}
	n := 0
	for range lister.List(t.within(slack), base) {
		n++
		break // stopping early is allowed
	}
	if n != 1 {
		t.Errorf("a loop over List that breaks after the first name received %d", n)
	}
	for _, g := range grants {
		t.release(d, g, "after the list")
	}
}

func forceReleaseEndsTheHold(t *trial) {
	a, b := t.client(), t.client()
	force, _ := backend.As[backend.ForceReleaser](b)
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	w := t.wait(t.within(10*slack), b, t.request(name))
	t.queued(a, name, 1)
	if err := force.ForceRelease(t.within(slack), backend.ForceRequest{Name: name, Reason: "conformance"}); err != nil {
		t.Fatalf("ForceRelease = %v", err)
	}
	next := t.got(w, t.ttl+slack, "after the force-release")
	renewal := t.renew(a, g)
	var gone *backend.NotHeldError
	if !errors.As(renewal.Err, &gone) {
		t.Errorf("renewal by the victim = %v, want a *NotHeldError", renewal.Err)
	} else if gone.Reason != backend.ReasonForceReleased && gone.Reason != "" {
		t.Errorf("reason of the victim = %q, want %q or none", gone.Reason, backend.ReasonForceReleased)
	}
	if err := a.Release(t.within(slack), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("release by the victim = %v, want ErrNotHeld", err)
	}
	t.release(b, next, "by the successor")
	if err := force.ForceRelease(t.within(slack), backend.ForceRequest{Name: name, Reason: "conformance"}); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("ForceRelease of a free name = %v, want ErrNotHeld", err)
	}
}

func lossIsPushed(t *trial) {
	a, b := t.client(), t.client()
	force, _ := backend.As[backend.ForceReleaser](b)
	told := make(chan backend.Loss, 8)
	var calls atomic.Int32
	taken := t.request(t.name())
	taken.Lost = func(r backend.Loss) {
		select {
		case told <- r:
		default:
		}
	}
	living := t.request(t.name())
	living.Lost = func(backend.Loss) { calls.Add(1) }
	t.take(a, taken, "of a free name")
	kept := t.take(a, living, "of a free name")
	if err := force.ForceRelease(t.within(slack), backend.ForceRequest{Name: taken.Name, Reason: "conformance"}); err != nil {
		t.Fatalf("ForceRelease = %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second+grace)
	defer cancel()
	select {
	case <-told:
	case <-ctx.Done():
		t.Latef("Request.Lost was not called within a second of the loss")
	}
	if calls.Load() != 0 {
		t.Errorf("Request.Lost of a living hold was called")
	}
	t.release(a, kept, "by the holder")
}

// tested are the capabilities that clauses apply to.
const tested = backend.CapFencing | backend.CapFair | backend.CapMinHold | backend.CapMetadata | backend.CapPushLoss |
	backend.CapInspect | backend.CapList | backend.CapWatch | backend.CapWatchReplay | backend.CapForceRelease |
	backend.CapShared | backend.CapPermits | backend.CapMultiAcquire | backend.CapHierarchy | backend.CapDeadlock

func declaredHasAClause(t *trial) {
	if more := tested.Missing(t.desc.Capabilities); more != 0 {
		t.Errorf("declared, and not tested by this version of the suite: %v", more)
	}
	caps := t.desc.Capabilities
	if caps.Has(backend.CapPushLoss) && !caps.Has(backend.CapForceRelease) {
		t.Errorf("push-loss can be tested only together with force-release")
	}
	if caps.Has(backend.CapMetadata) && !caps.Has(backend.CapInspect) {
		t.Errorf("metadata can be tested only together with inspect")
	}
	if caps.Has(backend.CapWatchReplay) && !caps.Has(backend.CapWatch|backend.CapInspect) {
		t.Errorf("watch-replay can be tested only together with watch and inspect")
	}
}
