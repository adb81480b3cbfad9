package conformance

import (
	"context"
	"errors"
	"sync"

	"github.com/fencelock/fencelock/backend"
)

var deadlockClauses = []Clause{
	{
		ID: "G1", Group: "deadlock", Slug: "cycle-is-refused", caps: backend.CapDeadlock, run: cycleIsRefused,
		Rule: "a request that would complete a cycle of holds returns ErrDeadlock with the cycle, " +
			"and the other requests keep waiting",
	},
	{
		ID: "G2", Group: "deadlock", Slug: "no-false-alarm", caps: backend.CapDeadlock, run: noFalseAlarm,
		Rule: "a request that completes no cycle is not refused: under another hold of the same client, under no hold, " +
			"as an attempt, or as the second request under one hold",
	},
	{
		ID: "G3", Group: "deadlock", Slug: "cycle-over-readers", caps: backend.CapDeadlock | backend.CapShared,
		run:  cycleOverReaders,
		Rule: "a cycle is detected through each of several holders of a name",
	},
	{
		ID: "G4", Group: "deadlock", Slug: "cycle-of-simultaneous-requests", caps: backend.CapDeadlock,
		run:  cycleOfSimultaneousRequests,
		Rule: "of simultaneous requests that complete a cycle, exactly one returns ErrDeadlock, and the others continue",
	},
}

// under returns r as a request made under the holds.
func under(r backend.Request, holds ...backend.Grant) backend.Request {
	for _, g := range holds {
		r.Under = append(r.Under, g.RequestID)
	}
	return r
}

func cycleIsRefused(t *trial) {
	for _, n := range []int{2, 4} {
		drivers, names := make([]backend.Driver, n), make([]string, n)
		grants := make([]backend.Grant, n)
		for i := range n {
			drivers[i], names[i] = t.client(), t.name()
			r := t.request(names[i])
			r.Owner = "owner of " + names[i]
			grants[i] = t.take(drivers[i], r, "of a free name")
		}
		waiters := make([]*waiter, n-1)
		for i := range waiters {
			waiters[i] = t.wait(t.within(10*slack), drivers[i], under(t.request(names[i+1]), grants[i]))
			t.queued(drivers[n-1], names[i+1], 1)
		}
		last := under(t.request(names[0]), grants[n-1])
		last.Wait = true
		_, err := drivers[n-1].Acquire(t.within(ample), last)
		var cycle *backend.DeadlockError
		if !errors.Is(err, backend.ErrDeadlock) || !errors.As(err, &cycle) {
			t.Fatalf("closing a cycle of %d = %v, want a *DeadlockError", n, err)
		}
		if len(cycle.Cycle) != n || cycle.Cycle[0].Wants != names[0] || cycle.Cycle[0].Holds != names[n-1] ||
			cycle.Cycle[1].Owner != "owner of "+names[0] || cycle.Cycle[1].Holds != names[0] {
			t.Errorf("the cycle of %d is reported as: %v", n, err)
		}
		// The refused client releases its hold, and the waiters are granted one after the other.
		t.release(drivers[n-1], grants[n-1], "by the refused")
		for i := n - 2; i >= 0; i-- {
			got := t.got(waiters[i], t.ttl+slack, "after the refusal")
			t.release(drivers[i], got, "by a waiter")
			t.release(drivers[i], grants[i], "by a waiter")
		}
	}
}

func noFalseAlarm(t *trial) {
	a, b := t.client(), t.client()
	x, y := t.name(), t.name()
	gx := t.take(a, t.request(x), "of a free name")
	gy := t.take(b, t.request(y), "of a free name")
	gz := t.take(a, t.request(t.name()), "of a free name")
	ctx, cancel := context.WithCancel(t.within(10 * slack))
	defer cancel()
	// Two requests of a's client wait for y, under another hold and under no hold. They form no cycle with b's wait for
	// x.
	w := t.wait(ctx, a, under(t.request(y), gz))
	t.queued(b, y, 1)
	bare := t.wait(ctx, a, t.request(y))
	t.queued(b, y, 2)
	wx := t.wait(ctx, b, under(t.request(x), gy))
	t.queued(a, x, 1)
	for what, waiting := range map[string]*waiter{"another hold": w, "no hold": bare, "the other side": wx} {
		if waiting.ended(0) {
			t.Errorf("%s returned %v, want it to wait", what, waiting.err)
		}
	}
	if _, err := t.try(a, under(t.request(y), gx)); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("an attempt under the hold of x = %v, want ErrHeld", err)
	}
	t.release(a, gx, "by its holder")
	t.release(b, t.got(wx, t.ttl+slack, "after the release"), "by the other side")
	t.release(b, gy, "by its holder")
	t.release(a, t.got(w, t.ttl+slack, "after the release"), "under another hold")
	t.release(a, t.got(bare, t.ttl+slack, "after the release"), "under no hold")
	siblings(t, a, gz)
}

// siblings makes two requests for the same name under one hold, one after the other.
func siblings(t *trial, d backend.Driver, hold backend.Grant) {
	name := t.name()
	first := t.take(d, under(t.request(name), hold), "of a free name")
	second := t.wait(t.within(10*slack), d, under(t.request(name), hold))
	t.queued(d, name, 1)
	if second.ended(0) {
		t.Errorf("the second of two requests under one hold returned %v, want it to wait", second.err)
	}
	t.release(d, first, "by the first of two under one hold")
	t.release(d, t.got(second, t.ttl+slack, "after the first of two under one hold"), "by the second")
	t.release(d, hold, "after the work under it")
}

func cycleOverReaders(t *trial) {
	a, b, c := t.client(), t.client(), t.client()
	x, y := t.name(), t.name()
	other := t.take(c, t.reader(x), "of a free name")
	mine := t.take(a, t.reader(x), "beside a reader")
	gy := t.take(b, t.request(y), "of a free name")
	w := t.wait(t.within(10*slack), b, under(t.request(x), gy))
	t.queued(c, x, 1)
	r := under(t.request(y), mine)
	r.Wait = true
	if _, err := a.Acquire(t.within(ample), r); !errors.Is(err, backend.ErrDeadlock) {
		t.Errorf("a reader that waits for the writer behind it = %v, want ErrDeadlock", err)
	}
	t.release(a, mine, "by a reader")
	t.release(c, other, "by a reader")
	t.release(b, t.got(w, t.ttl+slack, "after the readers"), "by the writer")
	t.release(b, gy, "by the writer")
}

func cycleOfSimultaneousRequests(t *trial) {
	const clients, rounds = 4, 3
	drivers := make([]backend.Driver, clients)
	for i := range drivers {
		drivers[i] = t.client()
	}
	for range rounds {
		names, held := make([]string, clients), make([]backend.Grant, clients)
		for i, d := range drivers {
			names[i] = t.name()
			held[i] = t.take(d, t.request(names[i]), "of a free name")
		}
		ctx := t.within(ample)
		errs := make(chan error, clients)
		var requests sync.WaitGroup
		t.Cleanup(requests.Wait)
		for i, d := range drivers {
			r := under(t.request(names[(i+1)%clients]), held[i])
			r.Wait = true
			requests.Go(func() {
				g, err := d.Acquire(ctx, r)
				if err == nil {
					err = d.Release(ctx, g)
				}
				errs <- errors.Join(err, d.Release(ctx, held[i])) // granted or refused
			})
		}
		refused := 0
		for range drivers {
			switch err := <-errs; {
			case errors.Is(err, backend.ErrDeadlock):
				refused++
			case err != nil:
				t.Errorf("a request of a cycle = %v, want the name or ErrDeadlock", err)
			}
		}
		if refused != 1 {
			t.Errorf("%d of the %d requests of a cycle were refused, want 1", refused, clients)
		}
	}
}
