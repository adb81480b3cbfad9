package fencelock

// Renewal, and loss by time. One heart per client manages all of its holds:
//
//	timer ─► tick ─┬─ deadline passed ─► endAll: notify every loser ──► settleEnding: clean-up, events
//	               └─ renewal due ─────► batches ─► renew ─► Driver.Renew ─► settle ─► schedule
//
// Goroutines. tick runs on the timer's own goroutine, and each batch on a separate one; heart.rounds counts both.
// They are bounded: a tick does not wait for the service, and a renewal waits for at most maxAttempt. Close stops the
// timer, ends their context and waits for them for a moment. There is no goroutine and no timer for a lease.

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/cleanup"
)

// heart renews the holds of a client and alone declares them lost by time.
//
// All holds are in one heap, ordered by the instant at which a renewal or the deadline is due. One timer serves the
// heap, and one call of Driver.Renew serves up to a thousand holds that are due together, so that ten thousand leases
// cost no goroutine and no timer each. A renewal runs beside the timer: however long it hangs, the deadline fires. So
// a hold with a renewal in flight stays in the heap, due at its deadline.
//
// Losses have a budget, the safety margin: within it every loser must be notified, however many there are
// (TestLosersAreNotifiedWithinTheMargin). So a tick first notifies every loser, then starts renewals, and then queues
// clean-up and events.
type heart struct {
	client *Client

	mu sync.Mutex // protects the following fields and hold.index; never held while a hold's is taken
	// due has every hold that has not ended.
	due holdHeap
	// timer is nil until the first hold. It fires at timerAt; zero: it is not armed, or has just fired.
	timer   *time.Timer
	timerAt instant
	// closed: no new hold is added, and ticks have no effect.
	closed bool

	// size is the length of due, for validity, which does not take the lock. A slightly old figure will
	// do.
	size atomic.Int64
	// rounds counts ticks and renewals in progress. After close only a tick that had begun adds to it.
	rounds sync.WaitGroup
	// ctx ends the renewals in flight; stop is called by Close.
	ctx  context.Context
	stop context.CancelFunc
}

const (
	// maxSleep bounds the sleep of the timer while there are holds. Go's timers stand still while the machine is
	// suspended and the lease clock does not; waking often notices soon after.
	maxSleep = 250 * time.Millisecond
	// maxBatch bounds the grants of one Driver.Renew call: other calls do not wait for a slow one.
	maxBatch = 1000
	// maxAttempt bounds one such call, whatever the TTL: the result for one hold arrives within that time, even while
	// the answer for another is missing.
	maxAttempt = 5 * time.Second
	// tellThousand is the time budget to notify a thousand losers: two processors need 1 to 2 ms, and the rest is for
	// the program and its garbage collector.
	tellThousand = 8 * time.Millisecond
)

// init does not start the timer, which is made with the first hold.
func (b *heart) init(c *Client) {
	b.client = c
	b.ctx, b.stop = context.WithCancel(context.Background())
}

// spread is a factor from 0.8 to 1: clients that began together, after a deployment or an outage, do not always renew
// together (TestAFleetSpreadsItsRenewals).
func (c *Client) spread() float64 { return 0.8 + 0.2*c.chance() }

// schedule sets the time at which a hold is due, and puts it into the heap if needed. It returns false, without
// effect, after the client was closed. The caller holds h.mu, as with drop.
//
// An instant that has passed is allowed: the timer fires as soon as it may.
func (b *heart) schedule(h *hold, at instant, early time.Duration, now instant) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false
	}
	if h.index < 0 {
		b.due.push(slot{at, early, h})
	} else {
		b.due[h.index].at, b.due[h.index].early = at, early
		b.due.fix(h.index)
	}
	b.arm(now)
	return true
}

// drop removes a hold from the heap. The timer stays armed; a tick that finds no hold due arms it again. The caller
// holds h.mu.
func (b *heart) drop(h *hold) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if h.index >= 0 && !b.closed {
		b.due.remove(h.index)
	}
}

// arm makes the timer fire when the first hold is due, but within maxSleep. A timer that fires earlier than that stays.
// The caller holds mu.
func (b *heart) arm(now instant) {
	b.size.Store(int64(len(b.due)))
	if b.closed || len(b.due) == 0 {
		return
	}
	at := min(b.due[0].at, now.Add(maxSleep))
	if !b.timerAt.IsZero() && b.timerAt <= at {
		return
	}
	b.timerAt = at
	// The two clocks differ a little: never spin. And a tick of many holds costs, so not for each of their retries.
	sleep := max(at.Sub(now), time.Millisecond/2+time.Duration(len(b.due))*100)
	if b.timer == nil {
		b.timer = time.AfterFunc(sleep, b.tick)
	} else {
		b.timer.Reset(sleep)
	}
}

// tick ends holds that have reached their deadline and starts the renewals that are due. It rearms the timer before
// either, so that a slow tick does not delay the next one. It holds mu only while it looks at the heap.
func (b *heart) tick() {
	b.mu.Lock()
	b.timerAt = 0
	if b.closed {
		b.mu.Unlock()
		return
	}
	b.rounds.Add(1)
	defer b.rounds.Done()
	now := b.client.set.Clock.Now()
	over, due := b.takeDue(now)
	b.arm(now)
	b.mu.Unlock()

	// First the losers: later steps must not use up the time in which they have to be notified.
	lost := b.endAll(over, func(h *hold) error {
		if now < h.believedUntil() { // extended since we looked
			at, early := h.renewalDue(now, b.client.spread())
			b.schedule(h, at, early, now)
			return nil
		}
		return h.timeUp()
	})
	// Then the renewals. Each batch has its own goroutine, so that a hanging batch delays neither the next tick nor
	// the other batches.
	var round batches
	for i, h := range due {
		if full := round.enlist(h, now, len(due)-i); full != nil {
			b.rounds.Go(func() { b.renew(full) })
		}
	}
	for _, x := range round {
		b.rounds.Go(func() { b.renew(x) })
	}
	// Last clean-up and events, which no caller waits for.
	for i := range lost {
		b.settleEnding(&lost[i], now)
	}
}

// takeDue returns expired holds, removed from the heap, and holds with a renewal due, left there for their deadline.
// The caller holds mu.
//
// A due renewal takes along others that will be due soon, since one call serves them all: so the holds of a client
// stay together in few calls. An Extend and a repetition take no others along; they come out of turn.
//
//	due now           renewed
//	due in 2 s renewed too, if it may ride along 2 s early and a renewal that takes others along is due
//	retried in 2 s    not yet
//	deadline passed   lost
func (b *heart) takeDue(now instant) (over, due []*hold) {
	carried := false // a renewal is due that takes others along; an Extend and a repetition do not
	isDue := func(s *slot) bool { return s.at <= now || carried && s.at <= now.Add(s.early) }
	take := func(s *slot) (gone bool) {
		carried = carried || s.early > 0
		deadline := s.hold.believedUntil()
		if deadline <= now {
			over = append(over, s.hold)
			return true
		}
		due = append(due, s.hold)
		s.at, s.early = deadline, 0
		return false
	}
	for few := 0; len(b.due) > 0 && isDue(&b.due[0]); few++ {
		if few == 256 { // many: one pass over all costs less than taking each from the top
			b.due.sweep(func(s *slot) (gone bool) { return isDue(s) && take(s) })
			break
		}
		if take(&b.due[0]) {
			b.due.remove(0)
		} else {
			b.due.fix(0)
		}
	}
	return over, due
}

// endAll ends holds for the cause that why returns, and notifies their holders: all of them before anything else, side
// by side if they are many. A nil cause leaves a hold alone. What remains to be done is settleEnding, for each of the
// result.
//
// It waits for the goroutines that it starts. why runs under the hold's mutex.
func (b *heart) endAll(holds []*hold, why func(*hold) error) []ending {
	part := func(holds []*hold) []ending {
		told := make([]ending, 0, len(holds))
		for _, h := range holds {
			h.mu.Lock()
			var end ending
			if h.cause.Load() == nil {
				if cause := why(h); cause != nil {
					end = h.end(cause)
				}
			}
			h.mu.Unlock()
			if end.hold != nil {
				end.cancel()
				told = append(told, end)
			}
		}
		return told
	}
	// each is the number of holds that are worth a goroutine.
	const each = 512
	workers := min(runtime.GOMAXPROCS(0), len(holds)/each)
	if workers < 2 {
		return part(holds)
	}
	// Each worker has its own part and writes into its own slice, so they share only the holds' locks.
	parts := make([][]ending, workers)
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() { parts[i] = part(holds[i*len(holds)/workers : (i+1)*len(holds)/workers]) })
	}
	all.Wait()
	told := parts[0]
	for _, more := range parts[1:] {
		told = append(told, more...)
	}
	return told
}

// announce notifies the holder of a hold that has just ended, if it has, and then does the rest. The caller holds no
// mutex.
//
// It is for one hold; a tick, which has many, calls endAll for all of them before the first settleEnding.
func (b *heart) announce(end *ending, now instant) {
	if end.hold != nil {
		end.cancel()
		b.settleEnding(end, now)
	}
}

// settleEnding cleans up and queues the event after the holder has been notified. The service may still have the
// entry of an expired hold, and its session may keep it alive: it is released when its TTL is over, and not before,
// since until then the holder may still be stopping.
func (b *heart) settleEnding(end *ending, now instant) {
	h := end.hold
	lost := (*LostError)(nil)
	if !errors.As(end.cause, &lost) {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if lost.byTime() {
		h.clean(cleanup.Granted, max(h.gone.Sub(now), time.Millisecond))
	}
	if h.settled = true; h.handed { // else hand notifies the observer
		h.tellOfLoss(now)
	}
}

// batch is the holds of one Driver.Renew call. grants are copies, with the TTL that each holder wants now.
type batch struct {
	holds  []*hold
	grants []backend.Grant
	// least and longest are the shortest and the longest time to a deadline among them.
	least   time.Duration
	longest time.Duration
}

// batches are the batches of one round that are not full.
type batches []*batch

// enlist adds a hold to a batch if it is to be renewed, and returns the batch if it is full now. A hold with a
// renewal in flight is left out: there is one owner of its outcome at a time.
//
// Holds do not share a call if their remaining times differ by more than a factor of four: each call is bounded by
// its nearest deadline, so one urgent hold would cut the time of all (TestRenewalsAreBoundedByTheirDeadlines). Up to
// more holds will follow; it sizes new batches.
//
//	deadlines in 29 s, 20 s and 8 s     one call, bounded by a third of 8 s
//	deadlines in 29 s and 5 s           two calls
func (bs *batches) enlist(h *hold, now instant, more int) (full *batch) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cause.Load() != nil || h.renewing || (!h.renew || h.last) && len(h.extends) == 0 {
		return nil
	}
	h.renewing = true
	g := h.grant
	g.TTL = h.askFor(now)
	left := h.believedUntil().Sub(now)
	for i, x := range *bs {
		if max(x.longest, left) > 4*min(x.least, left) {
			continue
		}
		x.holds, x.grants = append(x.holds, h), append(x.grants, g)
		x.least, x.longest = min(x.least, left), max(x.longest, left)
		if len(x.holds) < maxBatch {
			return nil
		}
		*bs = slices.Delete(*bs, i, i+1)
		return x
	}
	room := min(more, maxBatch)
	// No batch fits: begin one, with room for all that may follow, so that a thousand holds take two pieces of memory.
	x := &batch{make([]*hold, 1, room), make([]backend.Grant, 1, room), left, left}
	x.holds[0], x.grants[0] = h, g
	*bs = append(*bs, x)
	return nil
}

// renew makes one attempt for a batch. It is bounded by a third of the remaining time to the nearest deadline, so
// that an attempt that hangs leaves time for others. The result is applied to each hold separately; missing renewals
// are faults.
func (b *heart) renew(x *batch) {
	ctx, cancel := context.WithTimeout(b.ctx, min(x.least/3, maxAttempt))
	defer cancel()
	c := b.client
	began := c.set.Clock.Now()
	renewals := c.driver.Renew(ctx, x.grants)
	now := c.set.Clock.Now()
	// Drawn once for all holds of the call, so that they stay together.
	round := outcome{now: now, took: now.Sub(began), spread: c.spread(), retry: c.chance()}
	round.floor = 5*time.Millisecond + time.Duration(b.size.Load())*5*time.Microsecond
	for i, h := range x.holds {
		if i >= len(renewals) {
			renewals = append(renewals, backend.Renewal{Err: errTooFew})
		}
		b.settle(h, x.grants[i].TTL, &renewals[i], &round)
	}
}

// errTooFew is the fault of a driver that broke the contract; it is no loss, because the service did not report one.
var errTooFew = fmt.Errorf("%w: the driver returned fewer renewals than requested", ErrUnknown)

// outcome is shared by the renewals of one call: they succeed, or are repeated, together. Holds that each drew their
// own time for the next attempt would come back as a thousand calls.
type outcome struct {
	// now is when the answer came, and took how long that took.
	now  instant
	took time.Duration
	// spread and retry are the random parts of when the next renewal is due, after a success and after a fault.
	spread float64
	retry  float64
	// floor is the least time until a repetition, see retryIn.
	floor time.Duration
}

// retryIn returns the time until the next attempt with so much time left: a twentieth to a tenth of it, but no
// more than 1 s. The floor grows with the number of holds: each round costs, and the last ones before a common deadline
// must not take the time to notify all losers.
//
// With a validity of 29.65 s and the renewal due after 9 s, an outage is met by an attempt after 9 s, then by another
// about every 0.5 to 1 s while more than 10 s are left, and faster towards the deadline. For a client of few holds the
// least pause is 2.5 to 5 ms.
func (o *outcome) retryIn(left time.Duration) time.Duration {
	return time.Duration(float64(max(min(left/10, time.Second), o.floor)) * (1 + o.retry) / 2)
}

// settle applies the outcome of a renewal that asked for ttl. Since renewals never shorten, a renewal without an
// answer leaves the deadline unchanged, which is the latest of all that were proved.
//
//	cause there already no effect: a lost hold stays lost
//	nil                          the deadline moves (prove); EventRenewed
//	ErrNotHeld, ErrHistoryLost   lost, with the driver's reason
//	anything else                retried before the deadline; EventSuspect, if it is the first since a success
//
// A permanent error (final) is returned by the Extend that it was for; for the hold itself it is a fault like others.
func (b *heart) settle(h *hold, ttl time.Duration, r *backend.Renewal, round *outcome) {
	now, event := round.now, Event{Took: round.took}
	h.mu.Lock()
	h.renewing = false
	if r.Err == nil {
		r.Err = b.client.overstated(r.SentAt, r.TTL, max(ttl, h.grant.TTL), now)
	}
	h.lastErr = r.Err
	h.failed = r.Err != nil && ttl > h.ttl
	// A reply after the deadline confirms nothing: Lease.Err may already have reported the end of the hold.
	tell := h.expire(now)
	told := h.handed
	switch {
	case h.cause.Load() != nil:
		// Lost or released meanwhile; there is no un-losing.
	case r.Err == nil:
		b.prove(h, ttl, r, round)
		event.Type = EventRenewed
	case errors.Is(r.Err, ErrNotHeld), errors.Is(r.Err, ErrHistoryLost):
		tell = h.lose(reasonOf(r.Err), r.Err)
	default:
		if cleanup.Final(r.Err) { // the service refuses the new length
			h.answer(func(x *extension) bool { return x.ttl == ttl }, r.Err)
		}
		left := h.believedUntil().Sub(now)
		at := h.believedUntil() // in any case: the deadline fires although renewals fail
		if h.renew || len(h.extends) > 0 {
			at = min(at, now.Add(round.retryIn(left)))
		}
		b.schedule(h, at, 0, now)
		if !h.suspect {
			h.suspect, event.Type, event.Err = true, EventSuspect, r.Err
		}
	}
	event.Left = h.believedUntil().Sub(now)
	h.mu.Unlock()

	if tell.hold != nil {
		b.announce(&tell, now)
		b.client.remember(r.Err)
	} else if event.Type != "" && told {
		h.tell(&event)
	}
}

// prove applies a confirmed renewal. The caller holds h.mu.
//
// A proof counts from the instant before its request was sent, and for no longer than the length in force: if Extend
// has shortened it since, the holder knows that already. An older proof than the latest has no effect (a driver with
// sessions may return an earlier keepalive). It is not followed by an immediate renewal, or a driver that only has
// old proofs would be asked without a pause.
//
// With Extend(10 s) on a lease of 30 s while a renewal for 30 s is in flight:
//
//	the renewal is confirmed for 30 s     it counts for 10 s, since the holder expects 10 s
//	the next one asks for 10 s            and the service keeps its 30 s: renewals never shorten
func (b *heart) prove(h *hold, ttl time.Duration, r *backend.Renewal, round *outcome) {
	granted := r.TTL
	h.suspect = false
	h.grant.TTL = max(h.grant.TTL, ttl)
	granting := func(x *extension) bool { return x.ttl <= ttl }
	for _, x := range h.extends {
		if granting(x) {
			h.ttl = x.ttl
		}
	}
	if ttl != h.ttl { // it was for an Extend that has been withdrawn, or Extend has shortened the length since
		granted = min(granted, h.ttl)
	}
	h.last = r.Last && granted == r.TTL
	h.grant.SentAt = max(h.grant.SentAt, r.SentAt)
	if until := r.SentAt.Add(h.validity(granted)); until > h.believedUntil() {
		h.believe(until, r.SentAt.Add(granted))
	}
	h.answer(granting, nil) // after believe: Deadline and Err take no lock
	at, early := h.renewalDue(r.SentAt, round.spread)
	if at <= round.now && len(h.extends) == 0 { // an old proof: pause first
		at = round.now.Add(round.retryIn(h.believedUntil().Sub(round.now)))
	}
	b.schedule(h, min(at, h.believedUntil()), early, round.now)
}

// answer ends the Extends that wait and that the answer is for. Each channel has room for its one answer, so this never
// blocks. The caller holds mu.
func (h *hold) answer(isFor func(*extension) bool, err error) {
	h.extends = slices.DeleteFunc(h.extends, func(x *extension) bool {
		if isFor(x) {
			x.done <- err
			return true
		}
		return false
	})
}

// askFor is the length that the next renewal asks for: that of the first Extend that waits. When the service has failed
// to answer that and a renewal is due, it is the old length, so that an Extend costs no lease that would live without
// it (TestFailedExtendKeepsTheLease). The caller holds mu.
func (h *hold) askFor(now instant) time.Duration {
	if len(h.extends) == 0 || h.failed && h.renew && now >= h.grant.SentAt.Add(h.validity(h.ttl)/3) {
		return h.ttl
	}
	return h.extends[0].ttl
}

// reasonOf returns the reason of a loss from the driver's error. Without a reason the driver has found the entry
// missing.
func reasonOf(err error) Reason {
	notHeld := (*backend.NotHeldError)(nil)
	switch {
	case errors.Is(err, ErrHistoryLost):
		return ReasonHistoryLost
	case errors.As(err, &notHeld) && notHeld.Reason != "":
		return notHeld.Reason
	}
	return ReasonEvicted
}

// all returns the holds of the heap, for what concerns all of them. Some may have ended when the caller looks at them.
//
// Taking their mutexes under b.mu would be the wrong order of locks; so it copies.
func (b *heart) all() []*hold {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.due.holds()
}

// close stops the timer, refuses new holds and returns the holds, with invalid indices. A concurrent tick finds
// closed set and returns. Renewals in flight go on until their context ends.
func (b *heart) close() []*hold {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if b.timer != nil {
		b.timer.Stop()
	}
	holds := b.due.holds()
	b.due = nil
	return holds
}
