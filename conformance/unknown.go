package conformance

import (
	"context"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

// doubtClauses are about possible leftovers of a client that has other holds.
var doubtClauses = []Clause{
	{
		ID: "A8", Group: "ambiguity", Slug: "first-of-its-ttl-in-doubt", needs: needLink, run: firstOfItsTTLInDoubt,
		Rule: "the first acquire with a TTL, for which a driver may have to open a session, " +
			"has an unknown outcome if its reply is lost, like any other acquire",
	},
	{
		ID: "A9", Group: "ambiguity", Slug: "late-request-beside-a-living-hold", needs: needLink,
		run: lateRequestBesideALivingHold,
		Rule: "a request that arrives late holds the name for at most one TTL, " +
			"even while another hold of the client with the same TTL is renewed",
	},
}

func firstOfItsTTLInDoubt(t *trial) {
	d, link := t.linked()
	rival := t.client()
	t.warm(d)
	r := t.request(t.name())
	r.TTL = t.fit(t.ttl * 7 / 3)
	link.Drop(fault.Replies)
	t.unanswered(d, link, r, "the first request of its TTL, and a lost reply")
	link.Pass()
	_ = t.releaseSettled(d, r.Grant())
	t.opensWithin(rival, r.Name, r.TTL+slack, "after the release by request")
}

func lateRequestBesideALivingHold(t *trial) {
	d, link := t.linked()
	rival := t.client()
	t.warm(d)
	kept := t.brief(t.name())
	kept.TTL = t.times(3) // outlasts the held-back request
	hold := t.take(d, kept, "of a free name")
	late := t.request(t.name())
	late.TTL = kept.TTL
	link.Hold(fault.Requests)
	t.unanswered(d, link, late, "a request that is held back")
	link.Pass()

	ctx, cancel := context.WithCancel(t.Context())
	var renewals sync.WaitGroup
	renewals.Go(func() {
		for ; ctx.Err() == nil; pause(ctx, kept.TTL/8) {
			if r := t.renewIn(ctx, d, hold); r.Err == nil {
				hold.SentAt = r.SentAt
			}
		}
	})
	t.opensWithin(rival, late.Name, late.TTL+slack, "after the late delivery, beside a living hold")
	cancel()
	renewals.Wait()
	if end := hold.SentAt.Add(t.desc.Validity(hold.TTL)); t.now() < end {
		t.release(d, hold, "of the living hold")
	}
}

// closeClauses are about goroutines that outlive Close.
var closeClauses = []Clause{
	{
		ID: "K4", Group: "leftovers", Slug: "goroutines-end-after-a-short-close", serial: true,
		run:  goroutinesEndAfterAShortClose,
		Rule: "Close with a context that has ended returns promptly, and soon no goroutine of the driver runs",
	},
}

func goroutinesEndAfterAShortClose(t *trial) {
	t.noneLeft(func(a, b backend.Driver) {
		t.use(a, b)
		name := t.name()
		g := t.take(a, t.brief(name), "of a free name")
		w := t.wait(t.within(20*slack), b, t.brief(name))
		t.queued(a, g.Name, 1)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for _, d := range []backend.Driver{b, a} {
			began := time.Now()
			_ = d.Close(ended)
			if took := time.Since(began); took > grace {
				t.Latef("Close with a context that has ended took %v", took)
			}
		}
		if !w.ended(slack) {
			t.FatalLatef("Close with a context that has ended did not end a waiter")
		}
	})
}
