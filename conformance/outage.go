package conformance

import (
	"context"
	"errors"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

var outageClauses = []Clause{
	{
		ID: "S1", Group: "outages", Slug: "stopped-service", needs: needStop, serial: true, run: stoppedService,
		Rule: "while the service is down, calls return when their context ends and report no loss; " +
			"afterwards the same driver works",
	},
	{
		ID: "S2", Group: "outages", Slug: "paused-service", needs: needPause, serial: true, run: pausedService,
		Rule: "while the service is frozen, calls return when their context ends; afterwards the same driver works",
	},
	{
		ID: "S3", Group: "outages", Slug: "restarted-service", needs: needRestart, serial: true,
		run:  restartedService,
		Rule: "after a restart a holder either still holds the lock or receives a loss, and a waiter then acquires it",
	},
	{
		ID: "S4", Group: "outages", Slug: "increases-across-restart", caps: backend.CapFencing,
		needs: needRestart, serial: true,
		run:  increasesAcrossRestart,
		Rule: "a token is greater than every earlier token of the same name, across restarts of the service",
	},
	{
		ID: "S5", Group: "outages", Slug: "increases-across-a-wipe", caps: backend.CapFencing,
		needs: needWipe, serial: true,
		run:  increasesAcrossAWipe,
		Rule: "after all data is deleted, a new client receives greater tokens, or tokens of another token space",
	},
	{
		ID: "S6", Group: "outages", Slug: "wiped-service", needs: needWipe, serial: true, run: wipedService,
		Rule: "after all data is deleted, holds are lost; where the service starts over, the reason is history-lost, " +
			"and existing clients fail permanently with ErrHistoryLost",
	},
	{
		ID: "S7", Group: "outages", Slug: "grants-outlive-a-restart", caps: backend.CapFencing,
		needs: needRestart, serial: true,
		run: grantsOutliveARestart,
		Rule: "where fencing is declared, a grant made before a restart, " +
			"however shortly before, still excludes others after it",
	},
}

// recovers checks that d works again.
func (t *trial) recovers(d backend.Driver, after string) {
	name := t.name()
	if err := t.settled(func(ctx context.Context) error {
		g, err := d.Acquire(ctx, t.request(name))
		if err == nil {
			t.release(d, g, after)
		}
		return err
	}); err != nil {
		t.Errorf("acquire after %s = %v, want a grant", after, err)
	}
}

// failsInTime makes each call once; each must fail within its context, without a claim about the lock.
func (t *trial) failsInTime(d backend.Driver, held backend.Grant, while string) {
	const bound = 400 * time.Millisecond
	acquire := func(ctx context.Context) error { _, err := d.Acquire(ctx, t.brief(t.name())); return err }
	renew := func(ctx context.Context) error { return t.renewIn(ctx, d, held).Err }
	for _, c := range []struct {
		what string
		call func(ctx context.Context) error
	}{{"Acquire", acquire}, {"Renew", renew}, {"Acquire behind an unanswered Renew", acquire}} {
		what, began := c.what, time.Now()
		err := c.call(t.within(bound))
		if late := time.Since(began) - bound; late > grace {
			t.Latef("%s %s returned %v after its context ended", what, while, late)
		}
		if !errors.Is(err, backend.ErrUnavailable) && !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("%s %s = %v, want ErrUnavailable or ErrUnknown", what, while, err)
		}
		if errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("%s %s = %v, which the driver cannot know", what, while, err)
		}
	}
}

func stoppedService(t *trial) {
	d := t.client()
	held := t.take(d, t.request(t.name()), "before the stop")
	t.h.Server.Stop(t)
	t.failsInTime(d, held, "while the service is down")
	t.h.Server.Start(t)
	t.recovers(d, "the service is up again")
	t.recovers(t.client(), "the service is up again, from a new client")
	_ = d.Release(t.within(slack), held)
}

func pausedService(t *trial) {
	d := t.client()
	held := t.take(d, t.request(t.name()), "before the pause")
	t.h.Server.Pause(t)
	t.failsInTime(d, held, "while the service is frozen")
	t.h.Server.Resume(t)
	t.recovers(d, "the service goes on")
	if err := t.renewSettled(d, held); err != nil {
		t.Errorf("renewal after the service went on = %v, want nil", err)
	}
	t.release(d, held, "after the service went on")
}

func restartedService(t *trial) {
	a, b := t.client(), t.client()
	c := t.core(a, nil)
	lease, err := c.Acquire(t.within(ample), t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	w := t.wait(t.within(10*slack), b, t.request(lease.Name()))
	t.queued(b, lease.Name(), 1)
	t.h.Server.Restart(t)
	held := t.now()
	pause(t.Context(), t.ttl)
	if err := lease.Err(); err == nil {
		if w.ended(0) && w.err == nil {
			t.Violatedf("a waiter has held the lock since %v after the restart, while the holder's lease is valid", w.at.Sub(held))
		}
		if err := lease.Release(t.within(2 * slack)); err != nil && !errors.Is(err, fencelock.ErrLost) {
			t.Errorf("Release after the restart = %v", err)
		}
	} else if !errors.Is(err, fencelock.ErrLost) {
		t.Errorf("the lease after the restart = %v, want it held or ErrLost", err)
	}
	g := t.got(w, 3*t.ttl+3*slack, "after the restart and the release")
	if err := t.releaseSettled(b, g); err != nil {
		t.Errorf("release by the waiter = %v", err)
	}
}

func increasesAcrossRestart(t *trial) {
	d := t.client()
	name := t.name()
	k := tokens{t: t}
	for range 3 {
		var g backend.Grant
		if err := t.settled(func(ctx context.Context) (err error) {
			g, err = d.Acquire(ctx, t.request(name))
			return err
		}); err != nil {
			t.Fatalf("acquire after a restart = %v", err)
		}
		k.next(g, "restarts")
		t.release(d, g, "by the holder")
		t.h.Server.Restart(t)
	}
	t.recovers(d, "the last restart")
}

func increasesAcrossAWipe(t *trial) {
	name := t.name()
	last := map[string]tokens{} // by token space
	for range 3 {
		d := t.client()
		var g backend.Grant
		if err := t.settled(func(ctx context.Context) (err error) {
			g, err = d.Acquire(ctx, t.request(name))
			return err
		}); err != nil {
			t.Fatalf("acquire of a new client after everything was deleted = %v", err)
		}
		space := d.Describe().TokenSpace
		if space == "" {
			t.Errorf("TokenSpace is empty after a grant")
		}
		k := last[space]
		k.t = t
		k.next(g, "the deletion of everything, in the token space "+space)
		last[space] = k
		t.h.Server.Wipe(t)
	}
}

func wipedService(t *trial) {
	a, b := t.client(), t.client()
	c := t.core(a, func(o *fencelock.Options) { o.TTL = t.times(3) })
	lease, err := c.Acquire(t.within(ample), t.name())
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	before := lease.Grant()
	space := a.Describe().TokenSpace
	w := t.wait(t.within(10*slack), b, t.request(lease.Name()))
	t.queued(b, lease.Name(), 1)
	t.h.Server.Wipe(t)
	lost := t.lostWith(lease, t.times(3)+slack, "after everything was deleted")
	if !w.ended(3*t.ttl + 2*slack) {
		t.FatalLatef("a waiter did not return after everything was deleted")
	}
	if w.err == nil {
		t.release(b, w.grant, "by the waiter")
	}
	// The service may keep counters elsewhere, so that the deletion is only an eviction. A new client shows which.
	fresh := t.client()
	var g backend.Grant
	if err := t.settled(func(ctx context.Context) (err error) {
		g, err = fresh.Acquire(ctx, t.request(lease.Name()))
		return err
	}); err != nil {
		t.Fatalf("acquire of a new client after everything was deleted = %v", err)
	}
	t.release(fresh, g, "by the new client")
	anew := t.desc.Capabilities.Has(backend.CapFencing) &&
		(fresh.Describe().TokenSpace != space || g.Token <= max(before.Token, w.grant.Token))
	if anew && lost.Reason != fencelock.ReasonHistoryLost {
		t.Errorf("the lease was lost for reason %q, want history-lost", lost.Reason)
	}
	t.refuses(anew, "a waiter", w.grant, w.err)
	for what, d := range map[string]backend.Driver{"the holder's client": a, "the waiter's client": b} {
		var g backend.Grant
		err := t.settled(func(ctx context.Context) (err error) {
			g, err = d.Acquire(ctx, t.request(t.name()))
			return err
		})
		t.refuses(anew, what, g, err)
		if err == nil {
			t.release(d, g, "by "+what)
		}
	}
	t.recovers(t.client(), "everything was deleted, from a new client")
}

// refuses checks an acquire after a wipe by a client from before the wipe.
func (t *trial) refuses(must bool, who string, g backend.Grant, err error) {
	var lost *backend.HistoryError
	switch {
	case err == nil && must:
		t.Errorf("%s was granted the token %v after everything was deleted, want ErrHistoryLost", who, g.Token)
	case err != nil && !errors.Is(err, backend.ErrHistoryLost):
		t.Errorf("%s = %v after everything was deleted, want ErrHistoryLost", who, err)
	case err != nil && !errors.As(err, &lost):
		t.Errorf("%s = %v, without a *HistoryError", who, err)
	case err != nil && (lost.What == "" || lost.Was == lost.Now):
		t.Errorf("%s = %+v, which does not name the change", who, lost)
	}
}
