package conformance

import (
	"context"
	"errors"
	"maps"
	"math"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

// many calls f for 0 to n−1, concurrently.
func many(n int, f func(i int)) {
	const workers = 16
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			for i := w; i < n; i += workers {
				f(i)
			}
		})
	}
	all.Wait()
}

// fit rounds d down to a TTL that the driver accepts, within MinTTL and MaxTTL.
func (t *trial) fit(d time.Duration) time.Duration {
	if step := t.desc.TTLGranularity; step > 0 {
		d -= d % step
	}
	d = max(d, t.desc.MinTTL)
	if t.desc.MaxTTL > 0 {
		d = min(d, t.desc.MaxTTL)
	}
	return d
}

// opensNotBefore makes attempts at the name of g until one is granted, which must not be before end.
func (t *trial) opensNotBefore(rival backend.Driver, g backend.Grant, end backend.Instant) {
	ctx := t.within(g.TTL + 2*slack)
	for {
		got, err := t.try(rival, t.request(g.Name))
		if err == nil {
			if at := t.now(); at < end {
				t.Violatedf("granted to a rival %v before SentAt + validity, of a TTL of %v", end.Sub(at), g.TTL)
			}
			t.release(rival, got, "by the rival")
			return
		}
		if !errors.Is(err, backend.ErrHeld) || ctx.Err() != nil {
			t.Errorf("attempt by a rival = %v, want ErrHeld and, after the end, a grant", err)
			return
		}
		pause(ctx, t.ttl/50)
	}
}

func renewalsNeverShorten(t *trial) {
	long, short := t.times(3), t.ttl
	if short >= long {
		short = t.desc.MinTTL
	}
	if short >= long {
		t.inapplicable("the driver accepts only one TTL")
	}
	d, link := t.linked()
	rival := t.client()
	r := t.request(t.name())
	r.TTL = long
	g := t.take(d, r, "of a free name")
	less := g
	less.TTL = short
	if renewal := t.renew(d, less); renewal.Err != nil {
		t.Fatalf("renewal with a TTL of %v of a hold for %v = %v", short, long, renewal.Err)
	}
	link.Drop(fault.Both)
	t.opensNotBefore(rival, g, g.SentAt.Add(t.desc.Validity(g.TTL)))
}

func hundredsOutliveOneRenew(t *trial) {
	const n, batch = 300, 60
	d, rival := t.client(), t.client()
	ttl := t.times(3)
	grants := make([]backend.Grant, n)
	renew := func(grants []backend.Grant) {
		for i, r := range d.Renew(t.within(slack), grants) {
			if r.Err != nil {
				t.Fatalf("renewal %d of %d = %v", i, len(grants), r.Err)
			}
			grants[i].SentAt = r.SentAt
		}
	}
	for from := 0; from < n; from += batch {
		many(batch, func(i int) {
			r := t.request(t.name())
			r.TTL = ttl
			g, err := t.try(d, r)
			if err != nil {
				t.Errorf("grant %d of %d = %v", from+i, n, err)
			}
			grants[from+i] = g
		})
		if t.Failed() {
			return
		}
		renew(grants[:from+batch])
	}
	ctx := t.within(2*ttl + 2*slack)
	for end := t.now().Add(ttl * 5 / 4); t.now() < end; {
		pause(ctx, ttl/6)
		renew(grants)
	}
	many(n, func(i int) {
		got, err := t.try(rival, t.request(grants[i].Name))
		if err == nil {
			if left := grants[i].SentAt.Add(t.desc.Validity(ttl)).Sub(t.now()); left > 0 {
				t.Violatedf("hold %d of %d, whose renewal was confirmed, went to a rival %v before its end", i, n, left)
			}
			t.release(rival, got, "by the rival")
		}
	})
	many(n, func(i int) { _ = d.Release(t.within(slack), grants[i]) })
}

func oddTTLsAreKept(t *trial) {
	d, link := t.linked()
	rival := t.client()
	odd := t.request(t.name())
	odd.TTL = t.fit(t.ttl*17/10 + 7*time.Millisecond)
	g := t.take(d, odd, "of a free name")
	link.Drop(fault.Both)
	t.opensNotBefore(rival, g, g.SentAt.Add(t.desc.Validity(g.TTL)))

	a, b := t.client(), t.client()
	most := t.desc.MaxTTL
	if most == 0 {
		most = 30 * 24 * time.Hour
	}
	odd1, odd2 := t.fit(t.ttl*13/10+time.Millisecond), t.fit(90*time.Second+17*time.Millisecond)
	for _, ttl := range []time.Duration{t.desc.MinTTL, odd1, odd2, most} {
		r := t.request(t.name())
		r.TTL = ttl
		g := t.takeShort(a, r, "of a free name")
		if g.TTL < ttl {
			t.Errorf("TTL granted = %v, want %v", g.TTL, ttl)
		}
		rival, err := t.try(b, t.request(r.Name))
		var held *backend.HeldError
		switch {
		case errors.As(err, &held):
			t.showsRest("HeldError.RetryAfter", held.RetryAfter, g)
		case t.now() < g.SentAt.Add(t.desc.Validity(g.TTL)):
			t.Errorf("attempt beside a hold with a TTL of %v = %v, want a *HeldError", ttl, err)
		case err == nil: // the shortest hold may have ended
			t.release(b, rival, "by the rival")
			continue
		}
		if inspector, ok := backend.As[backend.Inspector](b); ok && t.desc.Capabilities.Has(backend.CapInspect) {
			state, err := inspector.Look(t.within(slack), r.Name)
			if err != nil {
				t.Errorf("Look = %v", err)
			}
			for _, h := range state.Holders {
				t.showsRest("Holder.ExpiresIn", h.ExpiresIn, g)
			}
		}
		_ = a.Release(t.within(slack), g)
	}
}

// showsRest compares a shown remaining time, if any, with the actual remaining time of a hold.
func (t *trial) showsRest(what string, left time.Duration, g backend.Grant) {
	if left == 0 {
		return // not known
	}
	// Services may round to whole seconds, up or down.
	least, most := g.SentAt.Add(t.desc.Validity(g.TTL)).Sub(t.now())-time.Second, g.TTL+g.TTL/100+time.Second
	if left < least || left > most {
		t.Latef("%s of a hold with a TTL of %v = %v, want between %v and %v", what, g.TTL, left, least, most)
	}
}

func textsComeBackWhole(t *trial) {
	a, b := t.client(), t.client()
	r := t.request(stretch(t.name()+"/世界 {x}:%2F*", backend.MaxNameBytes))
	r.Owner = stretch("host:1 {a} \"q\" 世界/", backend.MaxOwnerBytes)
	r.HoldID = stretch("Hold_id-", 64)
	r.RequestID = stretch(backend.NewRequestID()+"_-", 128)
	if t.desc.Capabilities.Has(backend.CapMetadata) {
		r.Metadata = map[string]string{"": "empty", "job": "nightly {x}:1\n\"q\"", "世": "界", "none": "",
			"Job": "other", "JOB_ID": "capital"}
		size := len("big")
		for k, v := range r.Metadata {
			size += len(k) + len(v)
		}
		r.Metadata["big"] = stretch("界", fencelock.MaxMetadataBytes-size)
	}
	given := maps.Clone(r.Metadata)
	g := t.take(a, r, "with texts of the greatest length")
	for k := range r.Metadata { // a driver must not keep the caller's map
		r.Metadata[k] = "changed after the acquire"
	}
	if g.Name != r.Name || g.Owner != r.Owner || g.HoldID != r.HoldID || g.RequestID != r.RequestID {
		t.Errorf("grant = %+v, want the texts of the request", g)
	}
	inspector, _ := backend.As[backend.Inspector](b)
	state, err := inspector.Look(t.within(slack), r.Name)
	if err != nil || len(state.Holders) != 1 {
		t.Fatalf("Look = %+v, %v; want one holder", state, err)
	}
	h := state.Holders[0]
	for what, texts := range map[string][2]string{
		"name": {state.Name, r.Name}, "owner": {h.Owner, r.Owner}, "HoldID": {h.HoldID, r.HoldID},
	} {
		if texts[0] != texts[1] {
			t.Errorf("%s is shown as %q, want %q", what, texts[0], texts[1])
		}
	}
	if len(given) > 0 && !maps.Equal(h.Metadata, given) {
		t.Errorf("metadata of %d bytes is shown as %v, want %v", fencelock.MaxMetadataBytes, h.Metadata, given)
	}
	if renewal := t.renew(a, g); renewal.Err != nil {
		t.Errorf("renewal with texts of the greatest length = %v", renewal.Err)
	}
	t.release(a, g, "with texts of the greatest length")
}

// stretch fills s up to n bytes.
func stretch(s string, n int) string { return s + strings.Repeat("x", max(0, n-len(s))) }

func hundredsOfReaders(t *trial) {
	const n, clients = 200, 4
	name := t.name()
	drivers, grants := make([]backend.Driver, clients), make([]backend.Grant, n)
	for i := range drivers {
		drivers[i] = t.client()
	}
	many(n, func(i int) {
		g, err := t.try(drivers[i%clients], t.reader(name))
		if err != nil {
			t.Errorf("reader %d of %d = %v, want a grant", i, n, err)
		}
		grants[i] = g
	})
	if t.Failed() {
		return
	}
	w := t.wait(t.within(20*slack), drivers[0], t.request(name))
	t.queued(drivers[1], name, 1)
	many(n-1, func(i int) { t.release(drivers[i%clients], grants[i], "by a reader") })
	switch ended := w.ended(200 * time.Millisecond); {
	case ended && w.err == nil:
		t.Violatedf("a writer was granted while one of %d readers held", n)
	case ended:
		t.Errorf("a writer returned %v while one of %d readers held", w.err, n)
	}
	t.release(drivers[(n-1)%clients], grants[n-1], "by the last reader")
	t.release(drivers[0], t.got(w, t.ttl+slack, "after the last reader"), "by the writer")
}

func greatLimitsAreCounted(t *trial) {
	a, b := t.client(), t.client()
	for _, limit := range []int{512, 65536 + 256, math.MaxInt32} {
		name := t.name()
		rest := t.take(a, t.permits(name, limit-256, limit), "of all permits but 256")
		few := t.take(b, t.permits(name, 255, limit), "of 255 of 256 permits")
		if _, err := t.try(b, t.permits(name, 2, limit)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("two permits where one of %d is left = %v, want ErrHeld", limit, err)
		}
		last := t.take(a, t.permits(name, 1, limit), "of the last permit")
		if _, err := t.try(b, t.permits(name, 1, limit)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("a permit while 0 of %d are free = %v, want ErrHeld", limit, err)
		}
		for d, grants := range map[backend.Driver][]backend.Grant{a: {rest, last}, b: {few}} {
			t.releaseAll(d, grants, "of permits")
		}
		t.release(a, t.take(a, t.permits(name, limit, limit), "of all permits at once"), "of all permits")
	}
}

func oneTokenSpace(t *trial) {
	var first string
	name := t.name()
	for range 3 {
		d := t.client()
		t.release(d, t.take(d, t.request(name), "of a free name"), "by the holder")
		space := d.Describe().TokenSpace
		if first == "" {
			first = space
		}
		if space == "" || space != first {
			t.Errorf("after a grant one client names the token space %q, and another one %q", space, first)
		}
	}
}

func waitDoesNotEndEarly(t *trial) {
	long := max(5*time.Second, t.ttl*5/2)
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	began := t.now()
	bounded, stop := context.WithTimeout(t.Context(), long)
	defer stop()
	endless, cancel := context.WithCancel(t.Context())
	defer cancel()
	waiters := map[string]*waiter{
		"a wait with a deadline":    t.wait(bounded, a, t.brief(name)),
		"a wait without a deadline": t.wait(endless, b, t.brief(name)),
	}
	pause(bounded, 2*long)
	cancel()
	for what, w := range waiters {
		if !w.ended(promptly) {
			t.Latef("%s did not end with its context", what)
			continue
		}
		// Contexts and the driver use different clocks.
		if took := w.at.Sub(began); took < long-10*time.Millisecond {
			t.Errorf("%s ended after %v of %v: %v", what, took, long, w.err)
		}
		if w.err == nil {
			t.Violatedf("%s was granted a name that another request holds", what)
		} else if !errors.Is(w.err, context.DeadlineExceeded) && !errors.Is(w.err, context.Canceled) {
			t.Errorf("%s = %v, want its context's error", what, w.err)
		}
	}
	t.release(a, g, "by the holder")
}
