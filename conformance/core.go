package conformance

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

var coreClauses = []Clause{
	{
		ID: "D1", Group: "core", Slug: "lost-before-a-rival-holds", needs: needLink, serial: true,
		run:  lostBeforeARivalHolds,
		Rule: "the lease's context ends before a rival can acquire the lock, whichever direction of the link fails",
	},
	{
		ID: "D2", Group: "core", Slug: "deletion-is-noticed", needs: needEvict, run: deletionIsNoticed,
		Rule: "if a lease's entry is deleted in the service, the lease is lost within half a TTL, not at its deadline",
	},
	{
		ID: "D3", Group: "core", Slug: "do-is-cancelled-by-loss", needs: needLink, run: doIsCancelledByLoss,
		Rule: "on a loss, the context of Do's function ends, with a *LostError as its cause",
	},
	{
		ID: "D4", Group: "core", Slug: "release-after-loss-is-lost", needs: needLink, run: releaseAfterLossIsLost,
		Rule: "after a loss, Release returns ErrLost immediately, even while the network does not respond",
	},
	{
		ID: "D5", Group: "core", Slug: "release-outlives-its-context", run: releaseOutlivesItsContext,
		Rule: "Release with a context that has ended still releases the lock",
	},
	{
		ID: "D6", Group: "core", Slug: "lease-is-renewed", run: leaseIsRenewed,
		Rule: "a lease is renewed until released; with NoRenew it ends at its deadline unless Extend prolongs it",
	},
	{
		ID: "D7", Group: "core", Slug: "fault-is-no-loss", needs: needLink, crowd: true, run: faultIsNoLoss,
		Rule: "neither a broken connection nor an outage that ends before the deadline loses a lease",
	},
	{
		ID: "D8", Group: "core", Slug: "close-gives-back", run: closeGivesBack,
		Rule: "Close ends every lease with reason closed and releases its lock",
	},
	{
		ID: "D9", Group: "core", Slug: "unknown-is-cleaned-up", needs: needLink, run: unknownIsCleanedUp,
		Rule: "a grant that its caller did not receive, because of a lost reply or a late request, " +
			"is released long before its TTL ends",
	},
}

// core returns a client of the library over d.
func (t *trial) core(d backend.Driver, change func(*fencelock.Options)) *fencelock.Client {
	o := &fencelock.Options{TTL: t.ttl}
	if change != nil {
		change(o)
	}
	tier := fencelock.Efficiency
	if t.fencing {
		tier = fencelock.Correctness
		o.AcceptAsyncReplica = true
	}
	c, err := fencelock.New(d, tier, o)
	if err != nil {
		t.Fatalf("fencelock.New = %v", err)
	}
	t.Cleanup(func() {
		t.heal()
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		_ = c.Close(ctx)
	})
	return c
}

func lostBeforeARivalHolds(t *trial) {
	rival := t.client()
	var all sync.WaitGroup
	for _, dir := range []fault.Direction{fault.Requests, fault.Replies, fault.Both} {
		// Err reads the clock itself and is exact. The context ends by a timer, which a busy machine may fire after the
		// margin that every lease has: the clause checks the context only with a larger margin.
		for _, margin := range []time.Duration{0, t.ttl / 3} {
			d, link := t.linked()
			c := t.core(d, func(o *fencelock.Options) { o.StopEarly = margin })
			lease, err := c.Acquire(t.within(ample), t.name())
			if err != nil {
				t.Fatalf("Acquire = %v", err)
			}
			all.Go(func() {
				pause(t.Context(), t.ttl/3) // until renewals run
				seen := link.Seen(fault.Requests)
				link.Hold(dir)
				r := t.request(lease.Name())
				r.Wait = true
				g, err := rival.Acquire(t.within(t.ttl+2*slack), r)
				ended := lease.Context().Err() != nil
				exact := lease.Err()
				if err != nil {
					t.Errorf("rival, with direction %d held = %v", dir, err)
					return
				}
				if !errors.Is(exact, fencelock.ErrLost) {
					t.Violatedf("a rival held the lock and Lease.Err = %v (direction %d held)", exact, dir)
				}
				if margin > 0 && !ended {
					t.Latef("a rival held the lock while the lease's context lived (direction %d held)", dir)
				}
				if link.Seen(fault.Requests) == seen {
					t.Latef("no renewal was sent over the link that holds messages back")
				}
				t.release(rival, g, "by the rival")
			})
		}
	}
	all.Wait()
}

// lostWith checks that the lease's context ends within d, with a *LostError, and returns it.
func (t *trial) lostWith(lease *fencelock.Lease, d time.Duration, when string) *fencelock.LostError {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-lease.Context().Done():
	case <-timer.C:
		t.FatalLatef("%s: the lease was not lost within %v", when, d)
	}
	var lost *fencelock.LostError
	if !errors.As(context.Cause(lease.Context()), &lost) {
		t.Fatalf("%s: the cause is %v, want a *LostError", when, context.Cause(lease.Context()))
	}
	return lost
}

func deletionIsNoticed(t *trial) {
	ttl := t.times(3)
	c := t.core(t.client(), func(o *fencelock.Options) { o.TTL = ttl })
	lease, err := c.Acquire(t.within(ample), t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	t.h.Server.Evict(t, lease.Name())
	lost := t.lostWith(lease, ttl+slack, "after the entry was deleted")
	if lost.Reason == fencelock.ReasonExpired {
		t.Errorf("the lease was lost at its deadline only: %v", lost)
	}
	if err := lease.Release(t.within(slack)); !errors.Is(err, fencelock.ErrLost) {
		t.Errorf("Release = %v, want ErrLost", err)
	}
}

func doIsCancelledByLoss(t *trial) {
	d, link := t.linked()
	c := t.core(d, nil)
	var cause error
	ran := false
	err := c.Do(t.within(t.ttl+2*slack), t.name(), func(ctx context.Context, _ *fencelock.Lease) error {
		ran = true
		link.Drop(fault.Both)
		<-ctx.Done()
		cause = context.Cause(ctx)
		return cause
	})
	if !ran {
		t.FatalLatef("Do did not run its function: %v", err)
	}
	var lost *fencelock.LostError
	if !errors.As(cause, &lost) {
		t.Errorf("the cause in Do = %v, want a *LostError", cause)
	}
	if !errors.Is(err, fencelock.ErrLost) {
		t.Errorf("Do = %v, want ErrLost", err)
	}
}

func releaseAfterLossIsLost(t *trial) {
	d, link := t.linked()
	c := t.core(d, nil)
	lease, err := c.Acquire(t.within(ample), t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	link.Hold(fault.Both)
	t.lostWith(lease, t.ttl+slack, "over a silent link")
	began := time.Now()
	err = lease.Release(context.Background())
	if took := time.Since(began); took > grace {
		t.Latef("Release after loss took %v over a silent link", took)
	}
	if !errors.Is(err, fencelock.ErrLost) {
		t.Errorf("Release after loss = %v, want ErrLost", err)
	}
}

func releaseOutlivesItsContext(t *trial) {
	c := t.core(t.client(), func(o *fencelock.Options) { o.TTL = t.long() })
	lease, err := c.Acquire(t.within(ample), t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_ = lease.Release(ended)
	t.opensWithin(t.client(), lease.Name(), promptly, "after a release with a context that has ended")
}

func leaseIsRenewed(t *trial) {
	ttl := t.times(2) // so that a short stall of the machine loses no lease
	c := t.core(t.client(), func(o *fencelock.Options) { o.TTL = ttl })
	rival := t.client()
	ctx := t.within(4*ttl + 2*slack)
	renewed, err := c.Acquire(ctx, t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	left, err := c.Acquire(ctx, t.name(), fencelock.NoRenew())
	if err != nil {
		t.Fatalf("Acquire with NoRenew = %v", err)
	}
	extended, err := c.Acquire(ctx, t.name(), fencelock.NoRenew())
	if err != nil {
		t.Fatalf("Acquire with NoRenew = %v", err)
	}
	leases := map[string]*fencelock.Lease{"renewed": renewed, "extended": extended}
	if err := extended.Extend(ctx, t.long()); err != nil {
		t.Errorf("Extend = %v", err)
	}
	if t.long() < 3*ttl { // the driver accepts no TTL that outlives the clause
		t.lostWith(extended, t.long()+slack, "after Extend and without renewal")
		delete(leases, "extended")
	}
	if lost := t.lostWith(left, ttl+slack, "without renewal"); lost.Reason != fencelock.ReasonExpired {
		t.Errorf("a lease without renewal was lost for reason %q, want expired", lost.Reason)
	}
	pause(ctx, ttl)
	for what, lease := range leases {
		if err := lease.Err(); err != nil {
			t.Errorf("the %s lease = %v after two TTLs", what, err)
		}
		t.mustBeHeld(rival, lease.Name(), "while the "+what+" lease lives")
		if err := lease.Release(ctx); err != nil {
			t.Errorf("Release of the %s lease = %v", what, err)
		}
		t.mustBeFree(rival, lease.Name(), "after the release")
	}
}

func faultIsNoLoss(t *trial) {
	d, link := t.linked()
	ttl := t.times(3)
	c := t.core(d, func(o *fencelock.Options) { o.TTL = ttl })
	lease, err := c.Acquire(t.within(ample), t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	ctx := t.within(3*ttl + slack)
	for _, fail := range []func(){link.Refuse, func() { link.Hold(fault.Both) }, link.Reset} {
		// A renewal is due a third of the TTL after the last proof: each fault disturbs a renewal, and ends before the
		// deadline.
		pause(ctx, ttl/6)
		fail()
		pause(ctx, ttl/3)
		link.Pass()
		pause(ctx, ttl/6)
	}
	if err := lease.Err(); err != nil {
		t.Errorf("the lease = %v after faults shorter than its deadline", err)
	}
	if err := lease.Release(t.within(2 * slack)); err != nil {
		t.Errorf("Release = %v", err)
	}
}

func closeGivesBack(t *trial) {
	c := t.core(t.client(), func(o *fencelock.Options) { o.TTL = t.long() })
	rival := t.client()
	var leases []*fencelock.Lease
	for range 10 {
		lease, err := c.Acquire(t.within(ample), t.name())
		if err != nil {
			t.Fatalf("Acquire = %v", err)
		}
		leases = append(leases, lease)
	}
	if err := c.Close(t.within(slack)); err != nil {
		t.Errorf("Close = %v", err)
	}
	for _, lease := range leases {
		if lost := t.lostWith(lease, time.Second, "after Close"); lost.Reason != fencelock.ReasonClosed {
			t.Errorf("a lease was lost for reason %q, want closed", lost.Reason)
		}
		t.mustBeFree(rival, lease.Name(), "after Close")
	}
	if _, err := c.TryAcquire(t.within(ample), t.name()); !errors.Is(err, fencelock.ErrClosed) {
		t.Errorf("TryAcquire after Close = %v, want ErrClosed", err)
	}
}

func unknownIsCleanedUp(t *trial) {
	for how, dir := range map[string]func(fault.Link){
		"its reply lost":   func(l fault.Link) { l.Drop(fault.Replies) },
		"its request late": func(l fault.Link) { l.Hold(fault.Requests) },
	} {
		d, link := t.linked()
		c := t.core(d, func(o *fencelock.Options) { o.TTL = t.long() })
		rival := t.client()
		t.warm(d)
		name := t.name()
		dir(link)
		if err := t.sends(link, "acquire with "+how, func(ctx context.Context) error {
			_, err := c.TryAcquire(ctx, name)
			return err
		}); !errors.Is(err, fencelock.ErrUnknown) {
			t.Errorf("acquire with %s = %v, want ErrUnknown", how, err)
		}
		link.Pass()
		if how == "its request late" {
			// Let the request arrive, so that the core has a hold to clean up.
			pause(t.Context(), 50*time.Millisecond)
		}
		// The cleanup retries with growing pauses, and each attempt may hang on the fault.
		if !t.opensWithin(rival, name, 5*slack, "after an acquire with "+how) {
			return
		}
	}
}
