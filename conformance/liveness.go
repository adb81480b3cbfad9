package conformance

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

// contender is a waiter with its driver.
type contender struct {
	driver backend.Driver
	w      *waiter
}

// oneAfterTheOther checks that both are granted the name, the second only after the first has released it.
func (t *trial) oneAfterTheOther(both []contender, when string) {
	bound := 3*t.ttl + 3*slack
	first, second := both[0], both[1]
	select {
	case <-first.w.done:
	case <-second.w.done:
		first, second = second, first
	case <-t.within(bound).Done():
		t.FatalLatef("%s: neither waiter got the lock within %v", when, bound)
	}
	g := t.got(first.w, promptly, when)
	if second.w.ended(max(t.ttl, promptly)) && second.w.err == nil {
		t.Violatedf("%s: two waiters hold the lock", when)
		return
	}
	t.mustBeHeld(t.client(), g.Name, "while the first of two waiters holds, "+when)
	t.release(first.driver, g, "by the first of two waiters")
	t.release(second.driver, t.got(second.w, bound, when+" and the release of the first"),
		"by the second of two waiters")
}

func evictedWaiterDoesNotHold(t *trial) {
	a, b, c := t.client(), t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	ctx := t.within(20 * slack)
	both := []contender{{b, t.wait(ctx, b, t.request(name))}}
	t.queued(a, name, 1)
	both = append(both, contender{c, t.wait(ctx, c, t.request(name))})
	t.queued(a, name, 2)
	if t.h.Server.EvictWaiter(t, name) == 0 {
		t.inapplicable("the service keeps no queue entry that could be deleted")
	}
	t.release(a, g, "by the holder")
	t.oneAfterTheOther(both, "after the places of both in the queue were deleted")
}

func overtakenWaiterDoesNotHold(t *trial) {
	a, c := t.client(), t.client()
	b, link := t.linked()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	ctx := t.within(20 * slack)
	cut := t.wait(ctx, b, t.brief(name))
	t.queued(a, name, 1)
	link.Hold(fault.Both)
	w := t.wait(ctx, c, t.request(name))
	t.queued(a, name, 2)
	pause(ctx, 2*t.ttl+time.Second) // until the cut-off waiter has no entry left
	t.release(a, g, "by the holder")
	next := t.got(w, t.ttl+slack, "behind a waiter that was cut off")
	link.Pass()
	if cut.ended(max(t.ttl, promptly)) && cut.err == nil {
		t.Violatedf("a waiter that was cut off was granted a name that another request holds")
		return
	}
	t.mustBeHeld(a, name, "while the one behind the waiter that was cut off holds")
	t.release(c, next, "by the one behind")
	if !cut.ended(3*t.ttl + 3*slack) {
		t.Latef("a waiter that was reconnected did not return after the name was released")
		return
	}
	if cut.err == nil {
		t.release(b, cut.grant, "by the waiter that was cut off")
	} else if !vague(cut.err) {
		t.Errorf("a waiter that was reconnected = %v, want a grant or an unknown outcome", cut.err)
	}
}

func grantsOutliveARestart(t *trial) {
	const n = 8
	a, rival := t.client(), t.client()
	grants := make([]backend.Grant, 0, 2*n)
	take := func() {
		for range n {
			grants = append(grants, t.take(a, t.request(t.name()), "of a free name"))
		}
	}
	take()
	pause(t.Context(), t.ttl/2)
	take() // the last ones just before the restart
	t.h.Server.Restart(t)
	t.recovers(rival, "a restart")
	ctx := t.within(max(t.ttl, promptly))
	for ctx.Err() == nil {
		for _, g := range grants {
			got, err := t.try(rival, t.request(g.Name))
			if err == nil && t.now() < g.SentAt.Add(t.desc.Validity(g.TTL)) {
				t.Violatedf("a hold granted before a restart went to a rival before the end of its TTL of %v",
					g.TTL)
				_ = rival.Release(t.within(slack), got)
				return
			}
		}
		pause(ctx, t.ttl/10)
	}
	for i, g := range grants {
		if err := t.renewSettled(a, g); err != nil {
			t.Errorf("renewal of hold %d of %d after a restart = %v, want nil", i, len(grants), err)
		}
		if err := t.releaseSettled(a, g); err != nil && !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("release after a restart = %v", err)
		}
	}
}

// acquires makes n acquires of each kind for goroutinesDoNotPileUp: granted, refused, and cancelled while waiting.
func (t *trial) acquires(d backend.Driver, held string, n int) {
	many(n, func(int) {
		g, err := t.try(d, t.request(t.name()))
		if err != nil {
			t.Errorf("acquire of a free name = %v", err)
			return
		}
		t.release(d, g, "by the holder")
		_, _ = t.try(d, t.request(held))
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		r := t.request(held)
		r.Wait = true
		_, _ = d.Acquire(ctx, r)
	})
}
