package conformance

import (
	"fmt"
	"slices"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// nonceClauses cover the obligation of backend.Grant.Nonce to guards and to ForceRelease: it names exactly one hold.
var nonceClauses = []Clause{
	{
		ID: "O10", Group: "ownership", Slug: "every-hold-has-its-nonce", run: everyHoldHasItsNonce,
		Rule: "every grant has a nonce, of any kind, immediate, after a wait or in a set; " +
			"no two holds have the same nonce, even with the same request id",
	},
	{
		ID: "O11", Group: "ownership", Slug: "nonce-of-a-repeat", run: nonceOfARepeat,
		Rule: "an acquire with the request id of a live hold returns the hold's nonce, through any client",
	},
	{
		ID: "O12", Group: "ownership", Slug: "nonce-is-kept-and-shown", caps: backend.CapInspect,
		run: nonceIsKeptAndShown,
		Rule: "a hold keeps its nonce through renewals, including those with a longer TTL; " +
			"Look and List show it as Holder.Nonce",
	},
}

// nonces collects the nonces of a clause's holds.
type nonces map[fencing.Nonce]string

// add notes the nonce of one more hold.
func (seen nonces) add(t *trial, g backend.Grant, what string) {
	switch other, dup := seen[g.Nonce]; {
	case g.Nonce == fencing.Nonce{}:
		t.Errorf("the grant %s has no nonce", what)
	case dup:
		t.Errorf("the grants %s and %s have the same nonce %v", other, what, g.Nonce)
	default:
		seen[g.Nonce] = what
	}
}

func everyHoldHasItsNonce(t *trial) {
	a, b := t.client(), t.client()
	seen := nonces{}
	r := t.request(t.name())
	for _, what := range []string{"of a free name", "of the next hold with the same request id"} {
		g := t.take(a, r, what)
		seen.add(t, g, what)
		t.release(a, g, "by the holder")
	}
	front := t.take(a, t.request(r.Name), "of a free name")
	seen.add(t, front, "of another request")
	w := t.wait(t.within(10*slack), b, t.request(r.Name))
	t.queued(b, r.Name, 1)
	t.release(a, front, "before a waiter")
	after := t.got(w, 5*slack, "after the release")
	seen.add(t, after, "after a wait")
	t.release(b, after, "by the waiter")
	for i, use := range []struct {
		cap  backend.Capabilities
		with func(*backend.Request)
	}{
		{backend.CapShared, func(r *backend.Request) { r.Kind = backend.KindShared }},
		{backend.CapPermits, func(r *backend.Request) { r.Kind, r.Permits, r.Limit = backend.KindPermits, 1, 2 }},
		{backend.CapHierarchy, func(r *backend.Request) { r.Hierarchical = true }},
	} {
		if t.desc.Capabilities.Has(use.cap) {
			r := t.request(t.name())
			use.with(&r)
			seen.add(t, t.take(a, r, use.cap.String()), fmt.Sprintf("%d, %v", i, use.cap))
		}
	}
	if multi, ok := backend.As[backend.MultiAcquirer](a); ok && t.desc.Capabilities.Has(backend.CapMultiAcquire) {
		rs := []backend.Request{t.request(t.name()), t.request(t.name())}
		grants, err := multi.AcquireAll(t.within(ample), rs)
		if err != nil {
			t.Fatalf("AcquireAll of two free names = %v, want grants", err)
		}
		for i, g := range grants {
			seen.add(t, g, fmt.Sprintf("%d of a set", i))
		}
	}
}

func nonceOfARepeat(t *trial) {
	a, b := t.client(), t.client()
	r := t.request(t.name())
	first := t.take(a, r, "of a free name")
	nonces{}.add(t, first, "of a free name")
	for i, d := range []backend.Driver{a, b, a} {
		if again := t.take(d, r, "with the id of a living hold"); again.Nonce != first.Nonce {
			t.Errorf("repeat %d of the request: nonce %v, want %v as before", i, again.Nonce, first.Nonce)
		}
	}
}

func nonceIsKeptAndShown(t *trial) {
	a, b := t.client(), t.client()
	r := t.request(t.name())
	r.TTL = t.times(10)
	g := t.take(a, r, "of a free name")
	nonces{}.add(t, g, "of a free name")
	t.shows(b, g, "after the grant")
	if renewal := t.renew(a, g); renewal.Err != nil {
		t.Errorf("renewal = %v, want nil", renewal.Err)
	}
	t.shows(b, g, "after a renewal")
	g.TTL = t.long()
	if renewal := t.renew(a, g); renewal.Err != nil {
		t.Errorf("renewal for a longer TTL = %v, want nil", renewal.Err)
	}
	t.shows(b, g, "after a renewal for a longer TTL")
	if again := t.take(a, r, "with the id of a living hold"); again.Nonce != g.Nonce {
		t.Errorf("repeat after renewals: nonce %v, want %v as before", again.Nonce, g.Nonce)
	}
}

// shows checks that Look and List show the nonce of g, the only hold of its name.
func (t *trial) shows(d backend.Driver, g backend.Grant, when string) {
	inspector, _ := backend.As[backend.Inspector](d)
	state, err := inspector.Look(t.within(slack), g.Name)
	states := []backend.State{state}
	if t.desc.Capabilities.Has(backend.CapList) {
		lister, _ := backend.As[backend.Lister](d)
		for listed, failed := range lister.List(t.within(slack), g.Name) {
			if err == nil {
				err = failed
			}
			states = append(states, listed)
		}
	}
	if err != nil {
		t.Errorf("%s: Look and List = %v, want nil", when, err)
		return
	}
	for _, state := range states {
		if !slices.ContainsFunc(state.Holders, func(h backend.Holder) bool { return h.Nonce == g.Nonce }) {
			t.Errorf("%s: Look and List show %+v, want a holder with nonce %v", when, state, g.Nonce)
		}
	}
}
