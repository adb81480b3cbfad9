package engine

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// Checks of waiters: one loop of the driver asks the service about all queues in which the driver waits, instead of
// each waiter for itself. The loop begins with the first waiter and ends with the last one.

const (
	// firstCheck is the time from the first place in a queue to its first check: all waiters in front may be gone.
	firstCheck = 60 * time.Millisecond
	// quickInterval is the time between two quick checks.
	quickInterval = time.Second
	// checkAgain is the time from a check that failed to the next one.
	checkAgain = 500 * time.Millisecond
	// checkGrain is the time by which checks are made early, so that they go together.
	checkGrain = 5 * time.Millisecond
)

// queue is the waiters of this driver in the queue of one name. Driver.mu protects its fields.
type queue struct {
	name    string
	waiters map[*waiter]Entering
	due     backend.Instant // of the next check
	quick   bool            // until then, quick checks find changes
	busy    bool            // a check is in progress
	again   bool            // and another one is due after it
}

// enqueue makes the loop check w until dequeue. e is its last Enter.
func (d *Driver) enqueue(w *waiter, e Entering) {
	d.mu.Lock()
	defer d.mu.Unlock()
	q := d.queues[e.Name]
	if q == nil {
		q = &queue{name: e.Name, waiters: map[*waiter]Entering{}, due: d.clock.Now().Add(d.spread(firstCheck))}
		d.queues[e.Name] = q
		if !d.checking {
			d.checkAt = 0
			d.checking = d.gate.Go(func(context.Context) { d.check() })
		}
		d.checkBy(q.due)
	}
	q.waiters[w] = e
}

func (d *Driver) dequeue(w *waiter, name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if q := d.queues[name]; q != nil {
		if delete(q.waiters, w); len(q.waiters) == 0 {
			delete(d.queues, name)
		}
	}
}

// checkSoon schedules a check of a name after a while, if that is sooner than planned. Driver.mu is held.
func (d *Driver) checkSoon(q *queue, after time.Duration) {
	if at := d.clock.Now().Add(after); at < q.due {
		q.due = at
		d.checkBy(at)
	}
	q.again = q.again || q.busy && after == 0
}

// checkBy wakes the loop unless its next check is early enough. Driver.mu is held.
func (d *Driver) checkBy(at backend.Instant) {
	if at.Add(checkGrain) < d.checkAt {
		d.checkAt = at
		wake(d.checkNow)
	}
}

// spread returns t, plus or minus a fifth.
func (d *Driver) spread(t time.Duration) time.Duration {
	return t - t/5 + time.Duration(d.chance()*float64(2*t/5))
}

// check is the loop.
func (d *Driver) check() {
	closing := d.gate.Closing()
	timer := time.NewTimer(0)
	defer timer.Stop()
	quick := d.clock.Now().Add(d.spread(quickInterval))
	for {
		all, next, waiting := d.due(quick)
		switch {
		case !waiting:
			return
		case len(all) > 0:
			if d.clock.Now() >= quick {
				quick = d.clock.Now().Add(d.spread(quickInterval))
			}
			d.checkAll(closing, all)
			continue
		}
		timer.Reset(next)
		select {
		case <-timer.C:
		case <-d.checkNow:
		case <-closing.Done():
			return
		}
	}
}

// due returns the queues to check now, including all quick ones when quick is due, or how long to wait.
// waiting is false if there are no queues: then the loop has ended.
func (d *Driver) due(quick backend.Instant) (all []Waiters, next time.Duration, waiting bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.clock.Now()
	soonest := quick
	if quick <= now {
		soonest = now.Add(quickInterval) // unless a queue is checked quickly now
	}
	d.checkAt = 0
	for _, q := range d.queues {
		full := q.due <= now.Add(checkGrain)
		soonest = min(soonest, q.due)
		if !full && (!q.quick || quick > now) {
			continue
		}
		w := Waiters{Name: q.name, Quick: !full, All: make([]Entering, 0, len(q.waiters))}
		for _, e := range q.waiters {
			w.All = append(w.All, e)
		}
		q.busy, q.again = true, false
		all = append(all, w)
	}
	if len(d.queues) == 0 {
		d.checking = false
		return nil, 0, false
	}
	d.checkAt = soonest
	return all, soonest.Sub(now), true
}

// checkAll is one exchange. Waiters that have come meanwhile are checked with the next one.
func (d *Driver) checkAll(ctx context.Context, all []Waiters) {
	d.mu.Lock()
	queues := len(d.queues)
	d.mu.Unlock()
	found, _, err := exchange(ctx, d, func(ctx context.Context) ([]Found, error) {
		return d.service.(Checks).Check(ctx, all, queues)
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, w := range all {
		q := d.queues[w.Name]
		if q == nil {
			continue
		}
		q.busy = false
		switch {
		case err != nil && !w.Quick:
			q.due = d.clock.Now().Add(d.spread(checkAgain))
		case err == nil && found[i].Again > 0:
			q.due, q.quick = d.clock.Now().Add(found[i].Again), found[i].Quick
		case err == nil && !w.Quick:
			q.due = d.clock.Now().Add(d.spread(lookInterval))
		}
		if q.again {
			q.due = d.clock.Now()
		}
		if err != nil {
			continue
		}
		for _, n := range found[i].Turns {
			for one, e := range q.waiters { // a request may wait twice
				if e.RequestID == w.All[n].RequestID && e.Place == w.All[n].Place {
					wake(one.woken)
				}
			}
		}
	}
}

// maxSettling bounds the names with a settle timer. Waiters of further names rely on the checks of their own clients.
const maxSettling = 10000

// settleIn makes the service settle a name after a while, and repeatedly for as long as Settle returns a time. A name
// has one timer.
func (d *Driver) settleIn(name string, after time.Duration) {
	with, ok := d.service.(Settles)
	if !ok || after <= 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gate.Closed() || d.settling[name] != nil || len(d.settling) >= maxSettling {
		return
	}
	d.settling[name] = time.AfterFunc(after, func() { d.settle(with, name) })
}

func (d *Driver) settle(with Settles, name string) {
	if d.gate.Enter() != nil {
		return
	}
	defer d.gate.Leave()
	again, _, err := exchange(d.gate.Closing(), d, func(ctx context.Context) (time.Duration, error) {
		return with.Settle(ctx, name)
	})
	if err != nil {
		again = d.spread(checkAgain)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if again > 0 && !d.gate.Closed() {
		d.settling[name].Reset(again)
		return
	}
	delete(d.settling, name)
}

// stopSettling stops the timers, with the driver.
func (d *Driver) stopSettling() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, timer := range d.settling {
		timer.Stop()
	}
}
