package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

var leaseClauses = []Clause{
	{
		ID: "L1", Group: "lease", Slug: "not-grantable-before-its-end", needs: needLink,
		run:  notGrantableBeforeItsEnd,
		Rule: "the name of a holder that no longer responds is not granted again before SentAt + validity",
	},
	{
		ID: "L2", Group: "lease", Slug: "silent-holder-loses-it", needs: needLink, run: silentHolderLosesIt,
		Rule: "the name of a holder that no longer responds is free within its TTL, for waiters and for attempts",
	},
	{
		ID: "L3", Group: "lease", Slug: "renewal-prolongs", run: renewalProlongs,
		Rule: "renewals keep a hold for longer than three times its TTL",
	},
	{
		ID: "L4", Group: "lease", Slug: "no-renewal-after-a-rival", needs: needLink, run: noRenewalAfterARival,
		Rule: "renewing a hold that ended and whose name a rival holds returns ErrNotHeld and does not affect the rival",
	},
	{
		ID: "L5", Group: "lease", Slug: "renewal-creates-nothing", needs: needLink, run: renewalCreatesNothing,
		Rule: "renewing a hold that ended returns ErrNotHeld even if the name is free, and leaves it free",
	},
	{
		ID: "L6", Group: "lease", Slug: "grant-tells-the-truth", run: grantTellsTheTruth,
		Rule: "a grant matches its request, and its TTL is not shorter than requested; the same applies to a renewal",
	},
	{
		ID: "L7", Group: "lease", Slug: "validity-counts-from-sending", needs: needLink,
		run:  validityCountsFromSending,
		Rule: "SentAt of acquires and renewals precedes the first byte of the request, however slow the link",
	},
	{
		ID: "L8", Group: "lease", Slug: "renewals-answer-in-order", run: renewalsAnswerInOrder,
		Rule: "Renew returns one renewal per grant, in order, including grants that have ended",
	},
	{
		ID: "L9", Group: "lease", Slug: "renewals-share-round-trips", needs: needLink, run: renewalsShareRoundTrips,
		Rule: "the number of round trips of Renew does not grow with the number of grants",
	},
	{
		ID: "L10", Group: "lease", Slug: "renewals-never-shorten", needs: needLink, run: renewalsNeverShorten,
		Rule: "a renewal with a shorter TTL does not shorten the hold",
	},
	{
		ID: "L11", Group: "lease", Slug: "hundreds-outlive-one-renew", crowd: true, run: hundredsOutliveOneRenew,
		Rule: "of hundreds of grants in one Renew, each hold whose renewal is confirmed outlives its TTL",
	},
	{
		ID: "L12", Group: "lease", Slug: "odd-ttls-are-kept", needs: needLink, run: oddTTLsAreKept,
		Rule: "a hold with a TTL that is not a round number lasts to its end, " +
			"and the holder and rivals see a TTL at either bound unchanged",
	},
}

// silent takes name with the short TTL on a client, and then makes its link drop all bytes.
func (t *trial) silent(name string) (backend.Driver, fault.Link, backend.Grant) {
	d, link := t.linked()
	g := t.take(d, t.brief(name), "of a free name")
	link.Drop(fault.Both)
	return d, link, g
}

func notGrantableBeforeItsEnd(t *trial) {
	name := t.name()
	rival := t.client()
	_, _, g := t.silent(name)
	end := g.SentAt.Add(t.desc.Validity(g.TTL))
	t.opensNotBefore(rival, g, end)
}

func silentHolderLosesIt(t *trial) {
	waitedFor, tried := t.name(), t.name()
	rival := t.client()
	_, _, g := t.silent(waitedFor)
	t.silent(tried)
	if !t.opensWithin(rival, waitedFor, g.TTL+slack, "to a waiter, after the holder went silent") {
		return
	}
	ctx := t.within(g.TTL + slack)
	for {
		got, err := t.try(rival, t.request(tried))
		if err == nil {
			t.release(rival, got, "by the rival")
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("attempt %v after the holder went silent = %v, want a grant", g.TTL+slack, err)
		}
		pause(ctx, 20*time.Millisecond)
	}
}

func renewalProlongs(t *trial) {
	a, b := t.client(), t.client()
	// If the machine stalled for a TTL, the hold was not renewed in time, and the round proves no failure.
	for range 3 {
		if t.outlivesItsTTL(a, b) {
			return
		}
	}
	t.Latef("renewals every quarter of %v were not confirmed within the TTL, in three attempts", t.ttl)
}

// outlivesItsTTL renews a hold for more than three of its TTLs. It returns false if a renewal took so long that the
// hold may rightly have ended.
func (t *trial) outlivesItsTTL(a, b backend.Driver) bool {
	name := t.name()
	g := t.take(a, t.brief(name), "of a free name")
	ctx := t.within(t.ttl*16/5 + slack)
	for end := g.SentAt.Add(t.ttl * 16 / 5); t.now() < end; {
		pause(ctx, t.ttl/4)
		r := t.renew(a, g)
		if errors.Is(r.Err, backend.ErrNotHeld) && t.now() >= g.SentAt.Add(g.TTL) {
			return false
		}
		if r.Err != nil {
			t.Fatalf("renewal of a living hold = %v", r.Err)
		}
		if r.SentAt < g.SentAt || r.SentAt > t.now() {
			t.Errorf("the renewal's SentAt lies outside the time of its call")
		}
		g.SentAt = r.SentAt
		_, err := t.try(b, t.brief(name))
		if err == nil && t.now() >= g.SentAt.Add(g.TTL) {
			return false
		}
		if !errors.Is(err, backend.ErrHeld) {
			t.Fatalf("while the hold is renewed: an attempt by another request = %v, want ErrHeld", err)
		}
	}
	if err := a.Release(t.within(2*slack), g); err != nil && t.now() < g.SentAt.Add(g.TTL) {
		t.Errorf("Release after renewals = %v, want nil", err)
	}
	return true
}

// gone waits until a silent holder's lease has ended, and heals its link.
func (t *trial) gone(link fault.Link, g backend.Grant, rival backend.Driver) bool {
	ok := t.opensWithin(rival, g.Name, g.TTL+slack, "after the holder went silent")
	link.Pass()
	return ok
}

// renewSettled renews until the outcome is known.
func (t *trial) renewSettled(d backend.Driver, g backend.Grant) error {
	return t.settled(func(ctx context.Context) error { return t.renewIn(ctx, d, g).Err })
}

// notHeld reports whether err is ErrNotHeld, for a call with a grant that has ended or never existed. A stall ends
// holds but revives no hold, so success of the call is a violation.
func (t *trial) notHeld(err error, format string, args ...any) bool {
	call := fmt.Sprintf(format, args...)
	switch {
	case errors.Is(err, backend.ErrNotHeld):
		return true
	case err == nil && !t.Failed(): // the hold may have outlived a release that failed
		t.Violatedf("%s = nil, want ErrNotHeld", call)
	default:
		t.Errorf("%s = %v, want ErrNotHeld", call, err)
	}
	return false
}

// releaseSettled releases until the outcome is known.
func (t *trial) releaseSettled(d backend.Driver, g backend.Grant) error {
	return t.settled(func(ctx context.Context) error { return d.Release(ctx, g) })
}

func noRenewalAfterARival(t *trial) {
	name := t.name()
	rival := t.client()
	d, link, g := t.silent(name)
	if !t.gone(link, g, rival) {
		return
	}
	successor := t.take(rival, t.request(name), "after the first hold ended")
	t.notHeld(t.renewSettled(d, g), "renewal after the name went to a rival")
	t.notHeld(t.releaseSettled(d, g), "release after the name went to a rival")
	if r := t.renew(rival, successor); errors.Is(r.Err, backend.ErrNotHeld) &&
		t.now() < successor.SentAt.Add(t.desc.Validity(successor.TTL)) {
		t.Violatedf("renewal by the rival within its TTL = %v, want nil", r.Err)
	} else if r.Err != nil {
		t.Errorf("renewal by the rival = %v, want nil", r.Err)
	}
	t.mustBeHeld(t.client(), name, "while the rival holds")
	t.release(rival, successor, "by the rival")
}

func renewalCreatesNothing(t *trial) {
	name := t.name()
	rival := t.client()
	d, link, g := t.silent(name)
	if !t.gone(link, g, rival) {
		return
	}
	t.notHeld(t.renewSettled(d, g), "renewal after the end")
	t.mustBeFree(rival, name, "after a renewal of what has ended")
}

func grantTellsTheTruth(t *trial) {
	d := t.client()
	r := t.brief(t.name())
	before := t.now()
	g := t.take(d, r, "of a free name")
	after := t.now()
	if g.Name != r.Name || g.RequestID != r.RequestID || g.Owner != r.Owner || g.Kind != r.Kind {
		t.Errorf("grant = %+v, want name, request id, owner and kind of the request %+v", g, r)
	}
	if g.TTL < r.TTL {
		t.Errorf("TTL granted = %v, want at least %v", g.TTL, r.TTL)
	}
	if g.SentAt < before || g.SentAt > after {
		t.Errorf("SentAt lies %v after the call and %v before its return", g.SentAt.Sub(before), after.Sub(g.SentAt))
	}
	if !g.MinHoldUntil.IsZero() {
		t.Errorf("MinHoldUntil is set without a minimum")
	}
	renewal := t.renew(d, g)
	if renewal.Err != nil || renewal.TTL < g.TTL {
		t.Errorf("renewal = %+v, want a TTL of at least %v", renewal, g.TTL)
	}
	t.release(d, g, "by the holder")
}

func validityCountsFromSending(t *trial) {
	d, link := t.linked()
	t.mustBeFree(d, t.name(), "before the link is slowed down")
	slow := max(t.ttl/10, 50*time.Millisecond)
	link.Delay(fault.Both, slow)
	r := t.request(t.name())
	g := t.take(d, r, "over a slow link")
	// After SentAt, the request took one delay, and the reply another.
	if age := t.now().Sub(g.SentAt); age < 2*slow {
		t.Errorf("SentAt of the grant is %v old over a link that takes %v: it was read after sending", age, 2*slow)
	}
	renewal := t.renew(d, g)
	if renewal.Err != nil {
		t.Fatalf("renewal over a slow link = %v", renewal.Err)
	}
	if age := t.now().Sub(renewal.SentAt); age < 2*slow {
		t.Errorf("SentAt of the renewal is %v old over a link that takes %v: it was read after sending", age, 2*slow)
	}
	t.release(d, g, "over a slow link")
}

func renewalsAnswerInOrder(t *trial) {
	d := t.client()
	const n = 12
	grants := make([]backend.Grant, n)
	for i := range grants {
		grants[i] = t.take(d, t.request(t.name()), "of a free name")
	}
	gone := map[int]bool{0: true, 4: true, 5: true, n - 1: true}
	for i := range gone {
		t.release(d, grants[i], "before the renewal")
	}
	renewals := d.Renew(t.within(slack), grants)
	if len(renewals) != n {
		t.Fatalf("Renew of %d grants answered %d renewals", n, len(renewals))
	}
	for i, r := range renewals {
		switch {
		case gone[i] && !errors.Is(r.Err, backend.ErrNotHeld):
			t.Errorf("renewal %d, of a released hold = %v, want ErrNotHeld", i, r.Err)
		case !gone[i] && r.Err != nil:
			t.Errorf("renewal %d, of a living hold = %v, want nil", i, r.Err)
		}
	}
	for i, g := range grants {
		if !gone[i] {
			t.release(d, g, "after the renewal")
		}
	}
	if renewals := d.Renew(t.within(slack), nil); len(renewals) != 0 {
		t.Errorf("Renew of nothing answered %d renewals", len(renewals))
	}
}

func renewalsShareRoundTrips(t *trial) {
	d, link := t.linked()
	const n, slow = 64, 40 * time.Millisecond
	grants := make([]backend.Grant, n)
	for i := range grants {
		grants[i] = t.take(d, t.request(t.name()), "of a free name")
	}
	for _, r := range d.Renew(t.within(slack), grants) { // opens the driver's session or connection
		if r.Err != nil {
			t.Fatalf("renewal = %v", r.Err)
		}
	}
	link.Delay(fault.Both, slow)
	began := time.Now()
	for _, r := range d.Renew(t.within(n*4*slow), grants) {
		if r.Err != nil {
			t.Errorf("renewal over a slow link = %v", r.Err)
		}
	}
	// Separate round trips take four times as long, so that this leaves much room on a busy machine.
	if took, most := time.Since(began), n*2*slow/4; took > most {
		t.Latef("renewing %d grants over a link of %v took %v, want less than %v", n, 2*slow, took, most)
	}
	link.Pass()
	for _, g := range grants {
		t.release(d, g, "after the renewals")
	}
}
