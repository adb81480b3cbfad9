package conformance

import (
	"context"
	"errors"

	"github.com/fencelock/fencelock/backend"
)

var deadlockClauses = []Clause{
	{
		ID: "G1", Group: "deadlock", Slug: "cycle-is-refused", caps: backend.CapDeadlock, run: cycleIsRefused,
		Rule: "the request that would close a cycle of agents is ErrDeadlock, with the cycle, and the others go on",
	},
	{
		ID: "G2", Group: "deadlock", Slug: "no-false-alarm", caps: backend.CapDeadlock, run: noFalseAlarm,
		Rule: "who waits without a cycle is not refused: other agents of one client, none at all, attempts, and queues",
	},
	{
		ID: "G3", Group: "deadlock", Slug: "cycle-over-readers", caps: backend.CapDeadlock | backend.CapShared,
		run:  cycleOverReaders,
		Rule: "a cycle is found through each of several holders of a name",
	},
}

// as returns r for an agent.
func as(r backend.Request, agent string) backend.Request {
	r.Agent = agent
	return r
}

func cycleIsRefused(t *trial) {
	for _, n := range []int{2, 4} {
		drivers, names := make([]backend.Driver, n), make([]string, n)
		grants, agents := make([]backend.Grant, n), make([]string, n)
		for i := range n {
			drivers[i], names[i], agents[i] = t.client(), t.name(), backend.NewRequestID()
			r := as(t.request(names[i]), agents[i])
			r.Owner = "agent " + names[i]
			grants[i] = t.take(drivers[i], r, "of a free name")
		}
		waiters := make([]*waiter, n-1)
		for i := range waiters {
			waiters[i] = t.wait(t.within(10*slack), drivers[i], as(t.request(names[i+1]), agents[i]))
			t.queued(drivers[n-1], names[i+1], 1)
		}
		last := as(t.request(names[0]), agents[n-1])
		last.Wait = true
		_, err := drivers[n-1].Acquire(t.within(slack), last)
		var cycle *backend.DeadlockError
		if !errors.Is(err, backend.ErrDeadlock) || !errors.As(err, &cycle) {
			t.Fatalf("closing a cycle of %d = %v, want a *DeadlockError", n, err)
		}
		if len(cycle.Cycle) != n || cycle.Cycle[0].Wants != names[0] || cycle.Cycle[0].Holds != names[n-1] ||
			cycle.Cycle[1].Owner != "agent "+names[0] || cycle.Cycle[1].Holds != names[0] {
			t.Errorf("the cycle of %d is told as: %v", n, err)
		}
		// The refused one gives up what it has, and the others get their turn one after the other.
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
	one, two, three := backend.NewRequestID(), backend.NewRequestID(), backend.NewRequestID()
	gx := t.take(a, as(t.request(x), one), "of a free name")
	gy := t.take(b, as(t.request(y), two), "of a free name")
	ctx, cancel := context.WithCancel(t.within(10 * slack))
	defer cancel()
	// Another agent of a's client waits for y, one without an agent too. That is no cycle with b's wait for x.
	w := t.wait(ctx, a, as(t.request(y), three))
	t.queued(b, y, 1)
	bare := t.wait(ctx, a, t.request(y))
	t.queued(b, y, 2)
	wx := t.wait(ctx, b, as(t.request(x), two))
	t.queued(a, x, 1)
	for what, waiting := range map[string]*waiter{"another agent": w, "no agent": bare, "the other side": wx} {
		if waiting.ended(0) {
			t.Errorf("%s is answered %v, want it to wait", what, waiting.err)
		}
	}
	if _, err := t.try(a, as(t.request(y), one)); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("an attempt by the agent that holds x = %v, want ErrHeld", err)
	}
	t.release(a, gx, "by its agent")
	t.release(b, t.got(wx, t.ttl+slack, "after the release"), "by the other side")
	t.release(b, gy, "by its agent")
	t.release(a, t.got(w, t.ttl+slack, "after the release"), "by another agent")
	t.release(a, t.got(bare, t.ttl+slack, "after the release"), "by no agent")
}

func cycleOverReaders(t *trial) {
	a, b, c := t.client(), t.client(), t.client()
	x, y := t.name(), t.name()
	one, two := backend.NewRequestID(), backend.NewRequestID()
	other := t.take(c, t.reader(x), "of a free name")
	mine := t.take(a, as(t.reader(x), one), "beside a reader")
	gy := t.take(b, as(t.request(y), two), "of a free name")
	w := t.wait(t.within(10*slack), b, as(t.request(x), two))
	t.queued(c, x, 1)
	r := as(t.request(y), one)
	r.Wait = true
	if _, err := a.Acquire(t.within(slack), r); !errors.Is(err, backend.ErrDeadlock) {
		t.Errorf("a reader that waits for the writer behind it = %v, want ErrDeadlock", err)
	}
	t.release(a, mine, "by a reader")
	t.release(c, other, "by a reader")
	t.release(b, t.got(w, t.ttl+slack, "after the readers"), "by the writer")
	t.release(b, gy, "by the writer")
}
