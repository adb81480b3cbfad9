package conformance

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

var multiClauses = []Clause{
	{
		ID: "M1", Group: "multi", Slug: "all-or-none", caps: backend.CapMultiAcquire, run: allOrNone,
		Rule: "AcquireAll grants every name, each with its own hold, in the order of the requests; " +
			"or it returns ErrHeld and holds nothing",
	},
	{
		ID: "M2", Group: "multi", Slug: "waits-without-keeping", caps: backend.CapMultiAcquire,
		run: waitsWithoutKeeping,
		Rule: "an AcquireAll that waits acquires all names together when the last is free; " +
			"if it ends earlier, it holds nothing",
	},
	{
		ID: "M3", Group: "multi", Slug: "same-requests-same-holds", caps: backend.CapMultiAcquire,
		run:  sameRequestsSameHolds,
		Rule: "AcquireAll with the requests of live holds returns the same holds",
	},
	{
		ID: "M4", Group: "multi", Slug: "lost-reply-leaves-nothing", caps: backend.CapMultiAcquire, needs: needLink,
		run: lostReplyOfAllLeavesNothing,
		Rule: "AcquireAll without an answer returns ErrUnknown, " +
			"and a release of each request releases every name that was granted",
	},
	{
		ID: "M5", Group: "multi", Slug: "ended-context-leaves-no-trace", caps: backend.CapMultiAcquire,
		run:  endedContextLeavesNoneOfAll,
		Rule: "AcquireAll with a context that has ended returns the context's error and changes nothing",
	},
}

// all calls AcquireAll. A driver may return ErrUnsupported only for a set that waits.
func (t *trial) all(ctx context.Context, d backend.Driver, rs []backend.Request, wait bool) ([]backend.Grant, error) {
	m, _ := backend.As[backend.MultiAcquirer](d)
	rs = slices.Clone(rs)
	for i := range rs {
		rs[i].Wait = wait
	}
	return m.AcquireAll(ctx, rs)
}

// three returns requests for three names, out of order.
func (t *trial) three() []backend.Request {
	rs := make([]backend.Request, 3)
	base := t.name()
	for i, part := range []string{"b", "a", "c"} {
		rs[i] = t.request(base + "/" + part)
	}
	return rs
}

func (t *trial) releaseAll(d backend.Driver, grants []backend.Grant, when string) {
	for _, g := range grants {
		t.release(d, g, when)
	}
}

func (t *trial) freeAll(d backend.Driver, rs []backend.Request, when string) {
	for _, r := range rs {
		t.mustBeFree(d, r.Name, when)
	}
}

func allOrNone(t *trial) {
	a, b := t.client(), t.client()
	rs := t.three()
	grants, err := t.all(t.within(2*slack), a, rs, false)
	if err != nil || len(grants) != len(rs) {
		t.Fatalf("AcquireAll of free names = %d grants, %v; want %d", len(grants), err, len(rs))
	}
	for i, g := range grants {
		if g.Name != rs[i].Name || g.RequestID != rs[i].RequestID {
			t.Errorf("grant %d is of %q, want %q", i, g.Name, rs[i].Name)
		}
		if t.desc.Capabilities.Has(backend.CapFencing) && !g.Token.Exclusive() {
			t.Errorf("grant %d has the token %v", i, g.Token)
		}
		t.mustBeHeld(b, g.Name, "after AcquireAll")
	}
	for _, r := range a.Renew(t.within(2*slack), grants) {
		if r.Err != nil {
			t.Errorf("renewal = %v", r.Err)
		}
	}
	t.release(a, grants[1], "of one of several")
	t.mustBeHeld(b, grants[0].Name, "after the release of another")
	t.mustBeFree(b, grants[1].Name, "after its own release")
	others := t.three()
	others[2].Name = rs[2].Name // held
	if _, err := t.all(t.within(2*slack), b, others, false); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("AcquireAll with a held name = %v, want ErrHeld", err)
	}
	t.freeAll(a, others[:2], "after AcquireAll that was refused")
	t.release(a, grants[0], "of one of several")
	t.release(a, grants[2], "of one of several")
}

func waitsWithoutKeeping(t *trial) {
	a, b := t.client(), t.client()
	rs := t.three()
	held := t.take(a, t.request(rs[2].Name), "of a free name")
	ctx, cancel := context.WithCancel(t.within(10 * slack))
	type outcome struct {
		grants []backend.Grant
		err    error
	}
	start := func(ctx context.Context) chan outcome {
		done := make(chan outcome, 1)
		go func() {
			grants, err := t.all(ctx, b, rs, true)
			done <- outcome{grants, err}
		}()
		return done
	}
	first := start(ctx)
	t.queued(a, rs[2].Name, 1)
	cancel()
	out := <-first
	if errors.Is(out.err, backend.ErrUnsupported) {
		t.release(a, held, "by the holder")
		return // the driver acquires sets only without waiting
	}
	if !errors.Is(out.err, context.Canceled) {
		t.Errorf("AcquireAll with a cancelled context = %v, want the context's error", out.err)
	}
	t.releaseUnknown(b, out.err, rs...)
	for _, r := range rs[:2] {
		t.opensWithin(a, r.Name, promptly, "after AcquireAll with a cancelled context") // its places may leave in the background
	}
	second := start(t.within(10 * slack))
	t.queued(a, rs[2].Name, 1)
	t.release(a, held, "by the holder")
	select {
	case out = <-second:
	case <-time.After(t.ttl + slack):
		t.FatalLatef("AcquireAll did not get the names although the last is free")
	}
	if out.err != nil || len(out.grants) != len(rs) {
		t.Fatalf("AcquireAll that waited = %d grants, %v", len(out.grants), out.err)
	}
	for _, r := range rs {
		t.mustBeHeld(a, r.Name, "after AcquireAll that waited")
	}
	t.releaseAll(b, out.grants, "of all")
}

func sameRequestsSameHolds(t *trial) {
	d := t.client()
	rs := t.three()
	grants, err := t.all(t.within(2*slack), d, rs, false)
	if err != nil {
		t.Fatalf("AcquireAll of free names = %v", err)
	}
	again, err := t.all(t.within(2*slack), d, rs, false)
	if err != nil {
		t.Fatalf("AcquireAll with the same requests = %v", err)
	}
	for i := range again {
		if again[i].Token != grants[i].Token || again[i].RequestID != grants[i].RequestID {
			t.Errorf("%q is held as %+v, before as %+v", rs[i].Name, again[i], grants[i])
		}
	}
	t.releaseAll(d, again, "of all")
	t.freeAll(d, rs, "after the release")
}

func lostReplyOfAllLeavesNothing(t *trial) {
	rival := t.client()
	for what, direction := range map[string]fault.Direction{"reply": fault.Replies, "request": fault.Requests} {
		d, link := t.linked()
		t.warm(d)
		rs := t.three()
		link.Drop(direction)
		err := t.sends(link, "AcquireAll with a lost "+what, func(ctx context.Context) error {
			_, err := t.all(ctx, d, rs, false)
			return err
		})
		if err == nil || errors.Is(err, backend.ErrHeld) || !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("AcquireAll with a lost %s = %v, want ErrUnknown", what, err)
		}
		link.Pass()
		for _, r := range rs {
			if err := t.releaseSettled(d, r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
				t.Errorf("release by request after a lost %s = %v", what, err)
			}
		}
		t.freeAll(rival, rs, "after a lost "+what+" and the releases")
	}
}

func endedContextLeavesNoneOfAll(t *trial) {
	d := t.client()
	rs := t.three()
	for _, wait := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := t.all(ctx, d, rs, wait); !errors.Is(err, context.Canceled) &&
			!(wait && errors.Is(err, backend.ErrUnsupported)) {
			t.Errorf("AcquireAll with an ended context (wait %v) = %v, want its error", wait, err)
		}
	}
	t.freeAll(d, rs, "after AcquireAll with an ended context")
}
