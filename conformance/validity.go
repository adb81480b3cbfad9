package conformance

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

// sentClauses state, for every kind of grant and renewal, the start of its validity.
var sentClauses = []Clause{
	{
		ID: "L13", Group: "lease", Slug: "every-validity-counts-from-sending", needs: needLink,
		run: everyValidityCountsFromSending,
		Rule: "SentAt precedes the first byte of the request for every grant, after a wait, in a set, " +
			"to a repeated request, after a reconnection, of every kind, and for renewals at any time in the life of a hold",
	},
	{
		ID: "L14", Group: "lease", Slug: "crash-at-any-ttl", needs: needLink, run: crashAtAnyTTL,
		Rule: "if a client with holds of a dozen TTLs stops responding, each name is free after its own TTL",
	},
	{
		ID: "L15", Group: "lease", Slug: "a-proof-is-dated-by-its-request", needs: needLink,
		run: aProofIsDatedByItsRequest,
		Rule: "the validity of a renewal with a delayed answer counts from its sending, " +
			"or from that of the keepalive on which it is based, even if the driver sends more requests afterwards",
	},
}

// everyValidityCountsFromSending makes every kind of grant and renewal over a slow link. The ledger checks the
// answers.
func everyValidityCountsFromSending(t *trial) {
	d, link := t.linked()
	other := t.client()
	t.warm(d)
	slow := max(t.ttl/40, 25*time.Millisecond)
	link.Delay(fault.Both, slow)

	kept := t.request(t.name())
	kept.TTL = t.times(2)
	hold := t.take(d, kept, "over a slow link")
	// A session's keepalive comes on its own schedule: some of these renewals immediately follow its answer.
	for end := t.now().Add(kept.TTL); t.now() < end; pause(t.Context(), slow/4) {
		if r := t.renew(d, hold); r.Err != nil {
			t.Fatalf("renewal over a slow link = %v", r.Err)
		}
	}
	t.release(d, t.take(d, kept, "with the id of a living hold"), "of a repeated request")

	name := t.name()
	front := t.take(other, t.request(name), "of a free name")
	w := t.wait(t.within(ample), d, t.request(name))
	t.queued(other, name, 1)
	t.release(other, front, "before a waiter")
	t.release(d, t.got(w, t.ttl+2*slack, "over a slow link"), "by the waiter")

	for _, use := range t.kinds() {
		r := t.request(t.name())
		use(&r)
		t.release(d, t.take(d, r, "of another kind"), "of another kind")
	}
	if multi, ok := backend.As[backend.MultiAcquirer](d); ok && t.desc.Capabilities.Has(backend.CapMultiAcquire) {
		grants, err := multi.AcquireAll(t.within(ample), []backend.Request{t.request(t.name()), t.request(t.name())})
		if err != nil {
			t.Fatalf("AcquireAll of two free names over a slow link = %v", err)
		}
		t.releaseAll(d, grants, "of a set")
	}

	link.Reset()
	link.Delay(fault.Both, slow)
	r := t.request(t.name())
	if err := t.settled(func(ctx context.Context) error {
		_, err := d.Acquire(ctx, r)
		return err
	}); err != nil {
		t.Fatalf("acquire after a reconnection = %v", err)
	}
	t.release(d, r.Grant(), "of a hold after a reconnection")
}

// aProofIsDatedByItsRequest holds replies back during a renewal. By then the proof has been sent, unless the driver
// sends another request first, which it cannot do in all of its renewals.
func aProofIsDatedByItsRequest(t *trial) {
	const enough, most = 8, 16 // on a busy machine a driver may send two requests, several times in a row
	d, link := t.linked()
	t.warm(d)
	r := t.request(t.name())
	r.TTL = t.times(2)
	hold := t.take(d, r, "of a free name")
	kept := min(250*time.Millisecond, r.TTL/6)
	proofs := 0
	for range most {
		pause(t.Context(), r.TTL/4) // so that an earlier proof is too old
		held := t.now()
		link.Hold(fault.Replies)
		answer := make(chan backend.Renewal, 1)
		go func() { answer <- t.renew(d, hold) }()
		pause(t.Context(), kept)
		passed := t.now()
		link.Pass()
		renewal := <-answer
		switch {
		case renewal.Err != nil && !vague(renewal.Err):
			t.Fatalf("renewal whose answer was held back for %v of a TTL of %v = %v", kept, r.TTL, renewal.Err)
		case renewal.Err != nil || renewal.SentAt < held: // an earlier proof
			continue
		case renewal.SentAt < passed:
			t.release(d, hold, "after a renewal whose answer was held back")
			return
		}
		if proofs++; proofs == enough {
			t.Violatedf("each of %d renewals whose answers were held back for %v has a SentAt after that time", proofs,
				kept)
			break
		}
	}
	_ = t.releaseSettled(d, hold)
}

// kinds returns functions that turn a request into one of each other kind that the driver declares.
func (t *trial) kinds() (all []func(*backend.Request)) {
	for _, k := range []struct {
		cap backend.Capabilities
		use func(*backend.Request)
	}{
		{backend.CapShared, func(r *backend.Request) { r.Kind = backend.KindShared }},
		{backend.CapPermits, func(r *backend.Request) { r.Kind, r.Permits, r.Limit = backend.KindPermits, 1, 2 }},
		{backend.CapHierarchy, func(r *backend.Request) { r.Hierarchical = true }},
	} {
		if t.desc.Capabilities.Has(k.cap) {
			all = append(all, k.use)
		}
	}
	return all
}

func crashAtAnyTTL(t *trial) {
	const n = 12
	d, link := t.linked()
	rival := t.client()
	ttls := make([]time.Duration, 0, n)
	for i := range n {
		ttls = append(ttls, t.fit(t.ttl+t.ttl*time.Duration(i)/n))
	}
	grants := make([]backend.Grant, n)
	for i, ttl := range ttls {
		r := t.request(t.name())
		r.TTL = ttl
		grants[i] = t.takeShort(d, r, "of a free name")
	}
	link.Drop(fault.Both)
	many(n, func(i int) {
		g := grants[i]
		if t.opensNotBefore(rival, g, g.SentAt.Add(t.desc.Validity(g.TTL))); t.now().Sub(g.SentAt) > g.TTL+slack {
			t.Latef("the name of a silent holder with a TTL of %v opened after %v", g.TTL, t.now().Sub(g.SentAt))
		}
	})
}
