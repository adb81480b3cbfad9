package conformance

import (
	"context"
	"errors"
	"testing"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

// refusalClauses cover holds while the service answers requests with refusals.
var refusalClauses = []Clause{
	{
		ID: "U1", Group: "refusals", Slug: "refused-release-abandons", needs: needRefuseRelease, serial: true,
		run: func(t *trial) { t.abandons(false, t.h.Server.RefuseRelease) },
		Rule: "if a release is refused and never repeated, the hold ends within a TTL after the refusal, " +
			"even though the client renews another hold with the same TTL, which remains",
	},
	{
		ID: "U2", Group: "refusals", Slug: "refused-writes-abandon", needs: needRefuseWrites, serial: true,
		run: func(t *trial) { t.abandons(true, t.h.Server.RefuseWrites) },
		Rule: "if a release is refused, and renewals too for less than their validity, " +
			"the hold ends within a TTL after the refusal, the other hold remains, and no renewal reports a loss",
	},
	{
		ID: "U3", Group: "refusals", Slug: "health-is-no-condition", needs: needRefuseWrites, serial: true,
		run: healthIsNoCondition,
		Rule: "a driver that found its service unhealthy renews and releases its holds as " +
			"soon as the service can, with the first call",
	},
	{
		ID: "U4", Group: "refusals", Slug: "refused-release-is-repeated", needs: needRefuseRelease | needRefuseWrites, serial: true,
		run: refusedReleaseIsRepeated,
		Rule: "the core retries a refused release, whatever the answer: the name is free within a TTL after the refusal, " +
			"and the client's other lease remains",
	},
	{
		ID: "U5", Group: "refusals", Slug: "refused-leaving-is-repeated", needs: needRefuseRelease | needRefuseWrites, serial: true,
		run: refusedLeavingIsRepeated,
		Rule: "if the service refuses the removal of a waiter from the queue, " +
			"the waiter is out of the queue within a TTL after the refusal, even though its client is open",
	},
}

// refuse begins the first refusal that the service has, and returns the function that ends it, which also runs at the
// end of the clause.
func (t *trial) refuse(name string, ways ...func(testing.TB, string) func()) (allow func()) {
	var end func()
	for _, how := range ways {
		if end = how(t, name); end != nil {
			break
		}
	}
	if end == nil {
		t.inapplicable("the service cannot refuse this call")
	}
	ended := false
	allow = func() {
		if !ended {
			ended = true
			end()
		}
	}
	t.Cleanup(allow)
	return allow
}

// refused checks the answer to a call that the service refuses: an error, but not ErrNotHeld.
func (t *trial) refused(call string, err error) {
	switch {
	case err == nil:
		t.Fatalf("%s = nil while the service refuses it; does Harness.Server refuse?", call)
	case errors.Is(err, backend.ErrNotHeld):
		t.Errorf("%s = %v while the service refuses it, want no loss", call, err)
	}
}

// abandons has the service refuse a release, and keeps renewing another hold. With writes, the service refuses
// renewals too.
func (t *trial) abandons(writes bool, how func(testing.TB, string) func()) {
	a, rival := t.client(), t.client()
	left, kept := t.brief(t.name()), t.brief(t.name())
	t.outlives(rival)
	gone := t.take(a, left, "of a free name")
	stays := t.take(a, kept, "of another free name")
	allow := t.refuse(left.Name, how)
	t.refused("Release", a.Release(t.within(t.ttl/3), gone))
	refusal := t.ttl / 4
	if long := t.h.longRefusal; long > 0 && !writes {
		refusal = t.ttl + long
	}
	for end := t.now().Add(refusal); t.now() < end; {
		pause(t.within(slack), t.ttl/10) // an immediate renewal may have no time to add, and write nothing
		renewal := t.renew(a, stays)
		if writes {
			t.refused("Renew", renewal.Err)
		} else if renewal.Err != nil {
			t.Errorf("renewal of another hold while releases are refused = %v, want nil", renewal.Err)
		}
	}
	allow()
	ctx, stop := context.WithCancel(t.Context())
	renewed := make(chan error, 1)
	go func() {
		var err error
		for ctx.Err() == nil {
			renewal := t.renewIn(ctx, a, stays)
			if errors.Is(renewal.Err, backend.ErrNotHeld) {
				err = renewal.Err
			}
			pause(ctx, t.ttl/6)
		}
		renewed <- err
	}()
	t.opensWithin(rival, left.Name, t.ttl+slack, "a release that was refused")
	stop()
	if err := <-renewed; err != nil {
		t.Errorf("another hold of the client, renewed all the time, was lost: %v", err)
	}
	if err := a.Release(t.within(ample), stays); err != nil {
		t.Errorf("release of another hold after the refusal = %v, want nil", err)
	}
}

// outlives opens the client's connection to the service, so that its first call comes before the refusal.
func (t *trial) outlives(d backend.Driver) { t.mustBeFree(d, t.name(), "before the refusal") }

func healthIsNoCondition(t *trial) {
	a := t.client()
	g := t.take(a, t.brief(t.name()), "of a free name")
	allow := t.refuse(g.Name, t.h.Server.RefuseWrites)
	if pinger, ok := backend.As[backend.Pinger](a); ok {
		_ = pinger.Ping(t.within(ample)) // it may report the service as unhealthy
	}
	allow()
	if renewal := t.renew(a, g); renewal.Err != nil {
		t.Errorf("the first renewal after a refusal = %v, want nil", renewal.Err)
	}
	if err := a.Release(t.within(ample), g); err != nil {
		t.Errorf("the first release after a refusal = %v, want nil", err)
	}
}

func refusedLeavingIsRepeated(t *trial) {
	holder, rival := t.client(), t.client()
	t.outlives(rival)
	c := t.core(t.client(), nil)
	r := t.request(t.name())
	g := t.take(holder, r, "of a free name")
	other, err := c.Acquire(t.within(ample), t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	ctx, leave := context.WithCancel(t.within(10 * slack))
	defer leave()
	left := make(chan error, 1)
	go func() {
		_, err := c.Acquire(ctx, r.Name)
		left <- err
	}()
	t.queued(holder, r.Name, 1)
	allow := t.refuse(r.Name, t.h.Server.RefuseRelease, t.h.Server.RefuseWrites)
	leave()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Fatalf("Acquire of a waiter that left = %v, want context.Canceled", err)
	}
	pause(t.within(slack), t.ttl/3)
	allow()
	if err := t.releaseSettled(holder, g); err != nil {
		t.Errorf("release by the holder after the refusal = %v, want nil", err)
	}
	t.opensWithin(rival, r.Name, t.ttl+slack, "the leaving of a waiter that was refused")
	_ = other.Release(t.within(ample)) // the service may have refused renewals, too
}

func refusedReleaseIsRepeated(t *trial) {
	rival := t.client()
	t.outlives(rival)
	c := t.core(t.client(), nil)
	name := t.name()
	lease, err := c.Acquire(t.within(ample), name)
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	other, err := c.Acquire(t.within(ample), t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	allow := t.refuse(name, t.h.Server.RefuseRelease, t.h.Server.RefuseWrites)
	t.refused("Release", lease.Release(t.within(t.ttl/3)))
	pause(t.within(slack), t.ttl/3)
	allow()
	t.opensWithin(rival, name, t.ttl+slack, "a release that was refused")
	if err := other.Err(); err != nil && !errors.Is(err, fencelock.ErrNotHeld) {
		t.Errorf("another lease of the client was lost: %v", err)
	}
	if err := other.Release(t.within(ample)); err != nil {
		t.Errorf("release of another lease after the refusal = %v, want nil", err)
	}
}
