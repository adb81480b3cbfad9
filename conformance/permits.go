package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
)

var permitsClauses = []Clause{
	{
		ID: "Q1", Group: "permits", Slug: "never-more-than-there-are", caps: backend.CapPermits,
		run: neverMoreThanThereAre,
		Rule: "many contenders for several permits each never hold more permits together " +
			"than the limit, and all of them acquire",
	},
	{
		ID: "Q2", Group: "permits", Slug: "what-is-left-is-granted", caps: backend.CapPermits, run: whatIsLeftIsGranted,
		Rule: "an attempt acquires permits that are left, returns ErrHeld for more, and released permits are available again",
	},
	{
		ID: "Q3", Group: "permits", Slug: "limit-is-agreed", caps: backend.CapPermits, run: limitIsAgreed,
		Rule: "a request with another limit or another kind returns ErrLimitMismatch " +
			"while the name is in use, and not afterwards",
	},
	{
		ID: "Q4", Group: "permits", Slug: "dead-holder-gives-them-back", caps: backend.CapPermits, needs: needLink,
		run:  deadHolderGivesThemBack,
		Rule: "the permits of a client that no longer responds are available after its TTL, and other holders keep theirs",
	},
	{
		ID: "Q5", Group: "permits", Slug: "big-request-gets-its-turn", caps: backend.CapPermits,
		run:  bigRequestGetsItsTurn,
		Rule: "a request for all permits is granted despite a stream of requests for one permit",
	},
	{
		ID: "Q6", Group: "permits", Slug: "tokens-are-marked", caps: backend.CapPermits | backend.CapFencing,
		run:  permitTokensAreMarked,
		Rule: "tokens of permits are marked as not exclusive",
	},
	{
		ID: "Q7", Group: "permits", Slug: "each-hold-is-its-own", caps: backend.CapPermits,
		run: func(t *trial) {
			eachHoldIsItsOwn(t, func(name string) backend.Request { return t.permits(name, 1, 3) })
		},
		Rule: "each of several holds of permits is renewed, released and repeated by its own request alone",
	},
	{
		ID: "Q8", Group: "permits", Slug: "great-limits-are-counted", caps: backend.CapPermits,
		run:  greatLimitsAreCounted,
		Rule: "large limits, up to 2^31-1, are counted exactly",
	},
}

// permits returns a fresh request for n of limit permits.
func (t *trial) permits(name string, n, limit int) backend.Request {
	r := t.request(name)
	r.Kind, r.Permits, r.Limit = backend.KindPermits, n, limit
	return r
}

func neverMoreThanThereAre(t *trial) {
	const clients, contenders, rounds, limit = 4, 16, 4, 5
	name := t.name()
	drivers := make([]backend.Driver, clients)
	for i := range drivers {
		drivers[i] = t.client()
	}
	ctx := t.within(20 * slack)
	var inside, most atomic.Int64
	var all sync.WaitGroup
	for i := range contenders {
		all.Go(func() {
			d, n := drivers[i%clients], 1+i%3
			for range rounds {
				r := t.permits(name, n, limit)
				r.Wait = true
				g, err := d.Acquire(ctx, r)
				if err != nil {
					t.Errorf("contender %d: %v", i, err)
					return
				}
				if g.Kind != backend.KindPermits || g.Permits != n || g.Limit != limit {
					t.Errorf("asked for %d of %d and granted %v, %d of %d", n, limit, g.Kind, g.Permits, g.Limit)
				}
				held := inside.Add(int64(n))
				if held > limit {
					t.Violatedf("%d of %d permits were held at once", held, limit)
				}
				most.Store(max(most.Load(), held))
				pause(ctx, time.Millisecond)
				inside.Add(int64(-n))
				if err := d.Release(ctx, g); err != nil {
					t.Errorf("contender %d: release: %v", i, err)
				}
			}
		})
	}
	all.Wait()
	t.Logf("at most %d of %d permits were held at once", most.Load(), limit)
}

func whatIsLeftIsGranted(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	two := t.take(a, t.permits(name, 2, 3), "of a free name")
	if _, err := t.try(b, t.permits(name, 2, 3)); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("two permits where one is left = %v, want ErrHeld", err)
	}
	one := t.take(b, t.permits(name, 1, 3), "of what is left")
	if _, err := t.try(a, t.permits(name, 1, 3)); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("a permit while 0 are free = %v, want ErrHeld", err)
	}
	w := t.wait(t.within(10*slack), b, t.permits(name, 2, 3))
	t.queued(a, name, 1)
	t.release(a, two, "of two permits")
	again := t.got(w, t.ttl+slack, "after as many were released")
	t.release(b, one, "of one permit")
	t.release(b, again, "of two permits")
	all := t.take(a, t.permits(name, 3, 3), "of all permits")
	t.release(a, all, "of all permits")
}

func limitIsAgreed(t *trial) {
	a, b := t.client(), t.client()
	mismatch := func(d backend.Driver, r backend.Request, when string) {
		t.Helper()
		for _, wait := range []bool{false, true} {
			r.Wait = wait
			g, err := d.Acquire(t.within(ample), r)
			if !errors.Is(err, backend.ErrLimitMismatch) {
				t.Errorf("%s (wait %v) = %v, want ErrLimitMismatch", when, wait, err)
			}
			if err == nil {
				t.release(d, g, "of what should have been refused")
			}
		}
	}
	name := t.name()
	g := t.take(a, t.permits(name, 1, 3), "of a free name")
	for _, d := range []backend.Driver{a, b} {
		mismatch(d, t.permits(name, 1, 4), "permits of another limit")
		mismatch(d, t.request(name), "an exclusive hold beside permits")
		if t.desc.Capabilities.Has(backend.CapShared) {
			mismatch(d, t.reader(name), "a shared hold beside permits")
		}
	}
	t.release(a, g, "of a permit")
	other := t.take(b, t.permits(name, 1, 4), "with another limit, of a free name")
	t.release(b, other, "of a permit")

	name = t.name()
	g = t.take(a, t.request(name), "of a free name")
	mismatch(b, t.permits(name, 1, 3), "permits beside an exclusive hold")
	t.release(a, g, "by the holder")
	t.release(b, t.take(b, t.permits(name, 1, 3), "of a free name"), "of a permit")
}

func deadHolderGivesThemBack(t *trial) {
	a, link := t.linked()
	b := t.client()
	name := t.name()
	r := t.permits(name, 2, 3)
	r.TTL = t.ttl
	dead := t.take(a, r, "of a free name")
	living := t.take(b, t.permits(name, 1, 3), "of what is left")
	link.Drop(fault.Both)
	pause(t.within(dead.TTL+slack), dead.TTL)
	w := t.wait(t.within(dead.TTL+2*slack), b, t.permits(name, 2, 3))
	back := t.got(w, dead.TTL+2*slack, "after the TTL of the client that is gone")
	if r := t.renew(b, living); r.Err != nil {
		t.Errorf("renewal of the living holder = %v", r.Err)
	}
	t.release(b, living, "by the living holder")
	t.release(b, back, "of what came back")
}

func bigRequestGetsItsTurn(t *trial) {
	d := t.client()
	name := t.name()
	stop := t.stream(name, 4, func(name string) backend.Request { return t.permits(name, 1, 3) })
	r := t.permits(name, 3, 3)
	r.Wait = true
	if g, err := d.Acquire(t.within(5*slack), r); err != nil {
		t.Errorf("request for all permits under a stream of requests for one = %v, want a grant", err)
	} else {
		t.release(d, g, "of all permits")
	}
	stop()
}

func permitTokensAreMarked(t *trial) {
	d := t.client()
	name := t.name()
	var last uint64
	var grants []backend.Grant
	for range 3 {
		g := t.take(d, t.permits(name, 1, 3), "of what is left")
		grants = append(grants, g)
		if !g.Token.Valid() || g.Token.Exclusive() || g.Token.Order() <= last {
			t.Violatedf("the token of permits is %v after order %d, want it marked and greater", g.Token, last)
		}
		last = g.Token.Order()
	}
	for _, g := range grants {
		t.release(d, g, "of a permit")
	}
}

// AsPermits returns h with every exclusive request made one for n of limit permits, where 2n > limit: still a mutex,
// which must meet every clause that does not need fencing. It runs the suite over that kind, too.
func AsPermits(h Harness, n, limit int) Harness {
	wrap := func(d backend.Driver) backend.Driver { return &asPermits{Driver: d, n: n, limit: limit} }
	inner := h
	h.New = func(t testing.TB) backend.Driver { return wrap(inner.New(t)) }
	if inner.Linked != nil {
		h.Linked = func(t testing.TB) (backend.Driver, fault.Link) {
			d, link := inner.Linked(t)
			return wrap(d), link
		}
	}
	return h
}

// asPermits is a driver that implements exclusive holds by permits. The token travels in the incarnation, since the
// holds do not fence.
type asPermits struct {
	backend.Driver
	n, limit int
}

func (d *asPermits) Describe() backend.Description {
	s := d.Driver.Describe()
	const kept = backend.CapFair | backend.CapMinHold | backend.CapMetadata | backend.CapInspect
	s.Capabilities &= kept
	if !has[backend.Inspector](d.Driver) {
		s.Capabilities &^= backend.CapInspect
	}
	s.NoFencing = "its holds are permits"
	return s
}

func (d *asPermits) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	if r.Kind != backend.KindExclusive || r.Permits != 0 || r.Limit != 0 {
		return backend.Grant{}, fmt.Errorf("kinds within a kind: %w", backend.ErrUnsupported)
	}
	r.Kind, r.Permits, r.Limit = backend.KindPermits, d.n, d.limit
	g, err := d.Driver.Acquire(ctx, r)
	if err != nil {
		return g, err
	}
	g.Kind, g.Permits, g.Limit = backend.KindExclusive, 0, 0
	g.Incarnation = g.Token.String() + " " + g.Incarnation
	g.Token = 0
	return g, nil
}

func (d *asPermits) below(g backend.Grant) backend.Grant {
	g.Kind, g.Permits, g.Limit = backend.KindPermits, d.n, d.limit
	if token, incarnation, ok := strings.Cut(g.Incarnation, " "); ok {
		g.Token, _ = fencing.ParseToken(token) // written by Acquire
		g.Incarnation = incarnation
	}
	return g
}

func (d *asPermits) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	below := make([]backend.Grant, len(grants))
	for i, g := range grants {
		below[i] = d.below(g)
	}
	return d.Driver.Renew(ctx, below)
}

func (d *asPermits) Release(ctx context.Context, g backend.Grant) error {
	return d.Driver.Release(ctx, d.below(g))
}

func (d *asPermits) Look(ctx context.Context, name string) (backend.State, error) {
	inspector, ok := backend.As[backend.Inspector](d.Driver)
	if !ok {
		return backend.State{}, backend.ErrUnsupported
	}
	info, err := inspector.Look(ctx, name)
	for i := range info.Holders {
		h := &info.Holders[i]
		h.Kind, h.Permits, h.Limit, h.Token = backend.KindExclusive, 0, 0, 0
	}
	for i := range info.Queue {
		w := &info.Queue[i]
		w.Kind, w.Permits, w.Limit = backend.KindExclusive, 0, 0
	}
	return info, err
}
