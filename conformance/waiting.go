package conformance

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

var waitingClauses = []Clause{
	{
		ID: "W1", Group: "waiting", Slug: "release-wakes-a-waiter", serial: true, run: releaseWakesAWaiter,
		Rule: "a release reaches a waiter by push, or by polling only where Describe declares it, " +
			"within the declared interval",
	},
	{
		ID: "W2", Group: "waiting", Slug: "first-come-first-served", caps: backend.CapFair,
		run:  firstComeFirstServed,
		Rule: "where fair is declared, waiters of different clients acquire the lock in the order of their arrival",
	},
	{
		ID: "W3", Group: "waiting", Slug: "attempts-do-not-barge", caps: backend.CapFair, run: attemptsDoNotBarge,
		Rule: "where fair is declared, neither an attempt nor a new waiter overtakes earlier waiters",
	},
	{
		ID: "W4", Group: "waiting", Slug: "release-wakes-no-herd", needs: needLink, run: releaseWakesNoHerd,
		Rule: "one release wakes at most one waiter of the queue, unless Describe declares that waiters poll",
	},
	{
		ID: "W5", Group: "waiting", Slug: "lost-notification-still-acquires", needs: needLink,
		run:  lostNotificationStillAcquires,
		Rule: "a waiter whose notification is lost still acquires, by polling",
	},
	{
		ID: "W6", Group: "waiting", Slug: "grant-after-a-wait-is-whole", run: grantAfterAWaitIsWhole,
		Rule: "a waiter that waited for longer than its TTL receives a live hold, with at least half of its validity left",
	},
	{
		ID: "W7", Group: "waiting", Slug: "dead-waiter-blocks-nobody", needs: needLink, run: deadWaiterBlocksNobody,
		Rule: "a waiter that no longer responds delays the waiters behind it for at most its own TTL",
	},
	{
		ID: "W8", Group: "waiting", Slug: "waiter-survives-a-reset", needs: needLink, run: waiterSurvivesAReset,
		Rule: "a waiter whose connection breaks continues to wait, and acquires",
	},
	{
		ID: "W9", Group: "waiting", Slug: "wait-does-not-end-early", run: waitDoesNotEndEarly,
		Rule: "a wait ends with a grant or with its context, and not earlier",
	},
	{
		ID: "W10", Group: "waiting", Slug: "evicted-waiter-does-not-hold", needs: needEvictWaiter,
		run:  evictedWaiterDoesNotHold,
		Rule: "a waiter whose place in the queue was deleted never holds beside another holder, and eventually acquires",
	},
	{
		ID: "W11", Group: "waiting", Slug: "overtaken-waiter-does-not-hold", needs: needLink,
		run:  overtakenWaiterDoesNotHold,
		Rule: "a waiter that was cut off for longer than its TTL never holds beside the waiter that overtook it",
	},
	{
		ID: "W12", Group: "waiting", Slug: "release-wakes-one-name", needs: needLink, run: releaseWakesOneName,
		Rule: "a release wakes no waiter of another name, even in the same client, " +
			"unless Describe declares that waiters poll",
	},
}

func releaseWakesAWaiter(t *trial) {
	const rounds = 7
	a, b := t.client(), t.client()
	name := t.name()
	took, alone := make([]time.Duration, 0, rounds), make([]time.Duration, 0, rounds)
	for range rounds {
		began := t.now()
		g := t.take(a, t.request(name), "of a free name")
		alone = append(alone, t.now().Sub(began))
		w := t.wait(t.within(10*slack), b, t.request(name))
		t.queued(a, name, 1)
		pause(t.Context(), rand.N(200*time.Millisecond)) // out of step with any poll
		released := t.now()
		t.release(a, g, "by the holder")
		next := t.got(w, t.ttl+slack, "after the release")
		took = append(took, w.at.Sub(released))
		t.release(b, next, "by the waiter")
	}
	slices.Sort(took)
	slices.Sort(alone)
	// A slow round may be the machine's fault, and on a busy machine all rounds are slow, uncontended acquires included.
	polling := b.Describe().Polling
	if median, most := took[rounds/2], polling+max(50*time.Millisecond, 5*alone[rounds/2]); median > most {
		t.Latef("the median of %d hand-overs took %v, want less than %v", rounds, median, most)
	}
}

func firstComeFirstServed(t *trial) {
	const n = 8
	a := t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	ctx := t.within(20 * slack)
	var mu sync.Mutex
	var order []int
	var all sync.WaitGroup
	for i := range n {
		d := t.client()
		r := t.request(name)
		r.Wait = true
		all.Go(func() {
			got, err := d.Acquire(ctx, r)
			if err != nil {
				t.Errorf("waiter %d: %v", i, err)
				return
			}
			mu.Lock()
			order = append(order, i)
			mu.Unlock()
			t.release(d, got, "by a waiter")
		})
		t.queued(a, name, i+1)
	}
	t.release(a, g, "by the holder")
	all.Wait()
	for i, got := range order {
		if got != i {
			t.Errorf("grants went to the waiters %v, want them in the order of their arrival", order)
			break
		}
	}
}

func attemptsDoNotBarge(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	for range 20 {
		g := t.take(a, t.request(name), "of a free name")
		w := t.wait(t.within(10*slack), b, t.request(name))
		t.queued(a, name, 1)
		t.release(a, g, "by the holder")
		// The client that has just released is the fastest to retry.
		barger, err := t.try(a, t.request(name))
		if err == nil {
			select {
			case <-w.done: // the waiter was granted and has not released: two holders
				t.Violatedf("an attempt was granted while the waiter held")
			default:
				t.Errorf("an attempt right after the release overtook a waiter")
			}
			t.release(a, barger, "by the barger")
		} else if !errors.Is(err, backend.ErrHeld) {
			t.Errorf("attempt right after the release = %v, want ErrHeld", err)
		}
		next := t.got(w, t.ttl+slack, "after the release")
		t.release(b, next, "by the waiter")
		if t.Failed() {
			return
		}
	}
}

func releaseWakesNoHerd(t *trial) {
	const n, rounds = 10, 4
	const window = 150 * time.Millisecond
	holder := t.client()
	if holder.Describe().Polling > 0 {
		t.inapplicable("waiters poll, so their requests show nothing about a release")
	}
	name := t.name()
	g := t.take(holder, t.request(name), "of a free name")
	ctx, giveUp := context.WithTimeout(t.Context(), 20*slack)
	defer giveUp()
	links := make([]fault.Link, n)
	drivers := make([]backend.Driver, n)
	waiters := make([]*waiter, n)
	for i := range n {
		drivers[i], links[i] = t.linked()
		waiters[i] = t.wait(ctx, drivers[i], t.request(name))
		t.queued(holder, name, i+1)
	}
	seen := func() []int64 {
		bytes := make([]int64, n)
		for i := range n {
			bytes[i] = links[i].Seen(fault.Requests)
		}
		return bytes
	}
	calm := false
	var last int
	for range rounds {
		before, began := seen(), t.now()
		t.release(holder, g, "by the holder")
		pause(ctx, window)
		after, took := seen(), t.now().Sub(began)
		// The same time again, without a release: on a busy machine it is long, and every waiter renews its session.
		pause(ctx, took)
		later := seen()
		winner, stirred, waiting := -1, 0, 0
		for i := range n {
			switch {
			case waiters[i] != nil && waiters[i].ended(0):
				winner = i
			case waiters[i] != nil:
				waiting++
				if after[i]-before[i] > later[i]-after[i] {
					stirred++
				}
			}
		}
		// A few waiters may have polled just now; a herd wakes all of them, in every round.
		calm = calm || 2*stirred <= waiting
		last = stirred
		if winner < 0 {
			t.Logf("no waiter was granted the lock within %v of a release", window)
			for winner < 0 && ctx.Err() == nil {
				pause(ctx, 10*time.Millisecond)
				for i, w := range waiters {
					if w != nil && w.ended(0) {
						winner = i
					}
				}
			}
			if winner < 0 {
				t.FatalLatef("no waiter was granted the lock after a release")
			}
		}
		g = t.got(waiters[winner], slack, "after the release")
		holder, waiters[winner] = drivers[winner], nil
	}
	if !calm {
		t.Latef("each of %d releases made more than half of the waiters send more than without (%d the last time)",
			rounds, last)
	}
	giveUp()
	for _, w := range waiters {
		switch {
		case w == nil:
		case !w.ended(2 * slack):
			t.Latef("a cancelled waiter did not return")
		case w.err == nil:
			t.Errorf("a cancelled waiter was granted a name that another request holds")
		}
	}
	t.release(holder, g, "by the last holder")
}

// releaseWakesOneName compares the requests of a client that waits for many names with those of a client that waits for
// one, after a release of one name each.
func releaseWakesOneName(t *trial) {
	const n, rounds = 12, 5
	const window = 150 * time.Millisecond
	holder := t.client()
	if holder.Describe().Polling > 0 {
		t.inapplicable("waiters poll, so their requests show nothing about a release")
	}
	type wait struct {
		g backend.Grant
		w *waiter
	}
	ctx := t.within(20 * slack)
	begin := func(d backend.Driver) wait {
		name := t.name()
		g := t.take(holder, t.request(name), "of a free name")
		w := t.wait(ctx, d, t.request(name))
		t.queued(holder, name, 1)
		return wait{g, w}
	}
	// end releases the name, and returns how many bytes the waiter's client has sent until its grant and in the window
	// after it.
	end := func(d backend.Driver, link fault.Link, one wait) int64 {
		before := link.Seen(fault.Requests)
		t.release(holder, one.g, "by the holder")
		g := t.got(one.w, slack, "after the release")
		pause(ctx, window)
		sent := link.Seen(fault.Requests) - before
		t.release(d, g, "by the waiter")
		return sent
	}
	lone, loneLink := t.linked()
	many, manyLink := t.linked()
	waits := make([]wait, n)
	for i := range waits {
		waits[i] = begin(many)
	}
	var byLone, byMany []int64
	for i := range rounds {
		byLone = append(byLone, end(lone, loneLink, begin(lone)))
		byMany = append(byMany, end(many, manyLink, waits[i]))
	}
	for _, one := range waits[rounds:] {
		end(many, manyLink, one)
	}
	// Signs of life come now and then. A herd sends more in every round.
	slices.Sort(byLone)
	if least, most := slices.Min(byMany), 3*byLone[rounds/2]; least > most {
		t.Latef("a release made a client with waiters of other names send %d bytes at least, want at most %d", least, most)
	}
}

func lostNotificationStillAcquires(t *trial) {
	a := t.client()
	b, link := t.linked()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	r := t.brief(name)
	w := t.wait(t.within(20*slack), b, r)
	t.queued(a, name, 1)
	link.Drop(fault.Replies)
	t.release(a, g, "by the holder")
	pause(t.Context(), 100*time.Millisecond)
	if w.ended(0) {
		t.Fatalf("the waiter returned after the release through a link that drops replies: %v", w.err)
	}
	link.Pass()
	next := t.got(w, 3*t.ttl+2*slack, "after a lost notification")
	if left := next.SentAt.Add(t.desc.Validity(next.TTL)).Sub(t.now()); left <= 0 {
		t.Latef("the grant had ended %v before it was reported", -left)
	}
	t.mustBeHeld(a, name, "after the waiter was granted the lock")
	t.release(b, next, "by the waiter")
}

func grantAfterAWaitIsWhole(t *trial) {
	a, b := t.client(), t.client()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	w := t.wait(t.within(3*t.ttl+10*slack), b, t.brief(name))
	pause(t.Context(), t.ttl*3/2)
	t.release(a, g, "by the holder")
	next := t.got(w, t.ttl+slack, "after the release")
	whole := t.desc.Validity(next.TTL)
	if left := next.SentAt.Add(whole).Sub(w.at); left < whole/2 {
		t.Latef("%v of a validity of %v was left when the waiter got the lock", left, whole)
	}
	if r := t.renew(b, next); r.Err != nil {
		t.Errorf("renewal of the hold after a long wait = %v, want nil", r.Err)
	}
	t.mustBeHeld(a, name, "after the waiter was granted the lock")
	t.release(b, next, "by the waiter")
}

func deadWaiterBlocksNobody(t *trial) {
	a, c := t.client(), t.client()
	b, link := t.linked()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	dead := t.brief(name)
	t.wait(t.within(20*slack), b, dead)
	t.queued(a, name, 1)
	link.Drop(fault.Both)
	w := t.wait(t.within(20*slack), c, t.request(name))
	t.queued(a, name, 2)
	t.release(a, g, "by the holder")
	next := t.got(w, 2*t.ttl+slack, "behind a waiter that went silent")
	t.release(c, next, "by the waiter behind")
}

func waiterSurvivesAReset(t *trial) {
	a := t.client()
	b, link := t.linked()
	name := t.name()
	g := t.take(a, t.request(name), "of a free name")
	w := t.wait(t.within(20*slack), b, t.request(name))
	t.queued(a, name, 1)
	link.Reset()
	if w.ended(200 * time.Millisecond) {
		t.Fatalf("the waiter returned when its connection broke: %v", w.err)
	}
	t.release(a, g, "by the holder")
	next := t.got(w, 3*t.ttl+2*slack, "after its connection broke")
	t.mustBeHeld(a, name, "after the waiter was granted the lock")
	t.release(b, next, "by the waiter")
}
