package conformance

import (
	"errors"

	"github.com/fencelock/fencelock/backend"
)

var ownershipClauses = []Clause{
	{
		ID: "O1", Group: "ownership", Slug: "only-the-holder-releases", run: onlyTheHolderReleases,
		Rule: "a release by another request returns ErrNotHeld and changes nothing",
	},
	{
		ID: "O2", Group: "ownership", Slug: "second-release-is-not-held", run: secondReleaseIsNotHeld,
		Rule: "a release of a hold that was already released, or never existed, returns ErrNotHeld",
	},
	{
		ID: "O3", Group: "ownership", Slug: "request-ids-compare-whole", run: requestIDsCompareWhole,
		Rule: "a request id that is a prefix or an extension of the holder's, or differs in case, is another request",
	},
	{
		ID: "O4", Group: "ownership", Slug: "stale-release-keeps-the-successor", run: staleReleaseKeepsTheSuccessor,
		Rule: "a release repeated after another request acquired the name returns " +
			"ErrNotHeld and does not affect the successor",
	},
	{
		ID: "O5", Group: "ownership", Slug: "incarnation-is-compared", run: incarnationIsCompared,
		Rule: "a grant of an earlier hold neither releases nor renews a later hold of the same request id",
	},
	{
		ID: "O6", Group: "ownership", Slug: "same-request-is-the-same-hold", run: sameRequestIsTheSameHold,
		Rule: "an acquire with the request id of a live hold returns that hold with its token; one release ends it",
	},
	{
		ID: "O7", Group: "ownership", Slug: "release-by-request", run: releaseByRequest,
		Rule: "Release(Request.Grant()) ends the hold or the wait of that request and nothing else",
	},
	{
		ID: "O8", Group: "ownership", Slug: "owner-decides-nothing", run: ownerDecidesNothing,
		Rule: "two requests with the same Owner exclude each other; Owner is for display only",
	},
	{
		ID: "O9", Group: "ownership", Slug: "what-is-shown-moves-nothing", run: whatIsShownMovesNothing,
		Rule: "inspections and refusals show a hold's HoldID unchanged and never its request id, " +
			"and no call acts on the hold with the HoldID",
	},
}

func onlyTheHolderReleases(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	forged := g
	forged.RequestID = backend.NewRequestID()
	for _, d := range []backend.Driver{a, b} {
		t.notHeld(d.Release(t.within(slack), forged), "release with another request id")
		t.notHeld(d.Release(t.within(slack), t.request(name).Grant()), "release of a request that never came")
	}
	t.notHeld(t.renew(b, forged).Err, "renewal with another request id")
	t.mustBeHeld(b, name, "after releases by others")
	t.release(a, g, "by the holder")
}

func secondReleaseIsNotHeld(t *trial) {
	d := t.client()
	name := t.name()
	g := t.take(d, t.request(name), "of a free name")
	t.release(d, g, "by the holder")
	t.notHeld(d.Release(t.within(slack), g), "second release")
	t.notHeld(t.renew(d, g).Err, "renewal after the release")
	never := t.request(t.name())
	t.notHeld(d.Release(t.within(slack), never.Grant()), "release of what was never held")
	t.mustBeFree(d, name, "after the second release")
	t.mustBeFree(d, never.Name, "after the release of what was never held")
}

func requestIDsCompareWhole(t *trial) {
	a, b := t.client(), t.client()
	id := "Abcdefghijklmnop-" + backend.NewRequestID()
	for what, other := range map[string]string{
		"a prefix of it":     id[:len(id)-1],
		"its first half":     id[:17],
		"an extension of it": id + "0",
		"it in another case": "a" + id[1:],
	} {
		r := t.request(t.name())
		r.RequestID = id
		g := t.take(a, r, "of a free name")
		if t.comparesWhole(b, g, what, other) { // otherwise the hold may have ended
			t.release(a, g, "by the holder")
		}
	}
}

// comparesWhole makes each call on a hold with another request id, and reports whether all of them are refused.
func (t *trial) comparesWhole(d backend.Driver, g backend.Grant, what, id string) bool {
	other := t.request(g.Name)
	other.RequestID = id
	if !t.notHeld(d.Release(t.within(slack), other.Grant()), "release with %s", what) {
		return false
	}
	forged := g
	forged.RequestID = id
	if !t.notHeld(t.renew(d, forged).Err, "renewal with %s", what) {
		return false
	}
	if !t.notHeld(d.Release(t.within(slack), forged), "release of the grant with %s", what) {
		return false
	}
	// The acquire comes last: if refused, it may leave an entry that a release with its id removes.
	if _, err := t.try(d, other); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("acquire with %s = %v, want ErrHeld", what, err)
		return false
	}
	return true
}

func staleReleaseKeepsTheSuccessor(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	first := t.take(a, t.request(name), "of a free name")
	t.release(a, first, "by the first holder")
	second := t.take(b, t.request(name), "after the release")
	t.notHeld(a.Release(t.within(slack), first), "stale release")
	t.mustBeHeld(a, name, "after a stale release")
	if r := t.renew(b, second); r.Err != nil {
		t.Errorf("renewal by the successor after a stale release = %v, want nil", r.Err)
	}
	t.release(b, second, "by the successor")
}

func incarnationIsCompared(t *trial) {
	a, b := t.client(), t.client()
	r := t.request(t.name())
	first := t.take(a, r, "of a free name")
	t.release(a, first, "of the first hold")
	second := t.take(a, r, "with the same request id")
	if first.Token == second.Token && first.Incarnation == second.Incarnation {
		t.Fatal("two holds one after the other have the same token and the same incarnation: nothing distinguishes them")
	}
	t.notHeld(a.Release(t.within(slack), first), "release with the grant of the earlier hold")
	t.notHeld(t.renew(a, first).Err, "renewal with the grant of the earlier hold")
	t.mustBeHeld(b, r.Name, "after a release with the earlier grant")
	t.release(a, second, "of the later hold")
}

func sameRequestIsTheSameHold(t *trial) {
	a, b := t.client(), t.client()
	r := t.request(t.name())
	first := t.take(a, r, "of a free name")
	for _, d := range []backend.Driver{a, b} {
		for _, wait := range []bool{false, true} {
			r.Wait = wait
			again, err := d.Acquire(t.within(ample), r)
			if err != nil {
				t.Fatalf("acquire with the id of a living hold (wait %v) = %v, want the same hold", wait, err)
			}
			if again.Token != first.Token {
				t.Errorf("acquire with the id of a living hold: token %v, want %v as before", again.Token, first.Token)
			}
			if again.SentAt < first.SentAt {
				t.Errorf("SentAt of the repeated grant is before that of the first grant")
			}
			first = again
		}
	}
	t.mustBeHeld(b, r.Name, "after repeated acquires")
	t.release(b, first, "of the one hold")
	t.mustBeFree(a, r.Name, "after one release")
}

func releaseByRequest(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	holder := t.request(name)
	t.take(a, holder, "of a free name")
	waiting := t.request(name)
	ctx := t.within(20 * slack)
	w := t.wait(ctx, b, waiting)
	t.queued(a, name, 1)
	t.release(b, holder.Grant(), "of a hold by its request alone, from another client")
	g := t.got(w, promptly, "after the release by request")
	t.notHeld(a.Release(t.within(slack), holder.Grant()), "second release by request")
	t.mustBeHeld(a, name, "after the second release by request")
	t.release(b, g, "by the successor")
}

func ownerDecidesNothing(t *trial) {
	a, b := t.client(), t.client()
	first := t.request(t.name())
	second := first
	second.RequestID = backend.NewRequestID()
	g := t.take(a, first, "of a free name")
	for _, d := range []backend.Driver{a, b} {
		if _, err := t.try(d, second); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("acquire by another request of the same owner = %v, want ErrHeld", err)
		}
	}
	// The owner may be long and need not be ASCII.
	odd := t.request(t.name())
	odd.Owner = "host:1 {a} \"q\" 世界/"
	for len(odd.Owner) < backend.MaxOwnerBytes {
		odd.Owner += "x"
	}
	h := t.take(b, odd, "with a long owner")
	if h.Owner != odd.Owner {
		t.Errorf("Grant.Owner = %q, want %q", h.Owner, odd.Owner)
	}
	t.release(b, h, "with a long owner")
	t.release(a, g, "by the holder")
}
