package fencelock

// Renewal, and loss by time. One heart per client looks after all of its holds:
//
//	timer ─► tick ─┬─ deadline passed ─► endAll: every loser is told ──► settleEnding: clean-up, events
//	               └─ renewal due ─────► batches ─► renew ─► Driver.Renew ─► settle ─► schedule
//
// Goroutines. tick runs on the timer's own goroutine, and each batch on one of its own; heart.rounds counts both. They
// end by themselves: a tick waits for nothing of the service, and a renewal for maxAttempt at most. Close stops the
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
)

// heart renews the holds of a client and is the only place where time decides that one is lost.
//
// All holds stand in one heap, ordered by the instant at which something is due: a renewal, or the deadline. One timer
// serves the heap, and one call of Driver.Renew serves up to a thousand holds that are due together, so that ten
// thousand leases cost no goroutine and no timer each. A renewal runs beside the timer: however long it hangs, the
// deadline fires. So a hold whose renewal is in flight stays in the heap, due at its deadline.
//
// Losses have a budget, the safety margin: within it every loser must have been told, however many there are
// (TestLossesAreToldWithinTheMargin). So a tick tells every loser first, then starts the renewals, and only then does
// what nobody waits for: it queues clean-up and events.
type heart struct {
	client *Client

	mu sync.Mutex // protects the following fields and hold.index; never held while a hold's is taken
	// due has every hold that is held, and no other.
	due holdHeap
	// timer is nil until the first hold. It fires at timerAt; zero: it is not armed, or has just fired.
	timer   *time.Timer
	timerAt instant
	// closed: nothing is taken in any more, and no tick does anything.
	closed bool

	// size is the length of due, for validity, which has no business with the lock. A figure that is a moment old will
	// do.
	size atomic.Int64
	// rounds counts ticks and renewals under way. Nothing is added after close, but by a tick that had begun.
	rounds sync.WaitGroup
	// ctx ends the renewals in flight; stop is called by Close.
	ctx  context.Context
	stop context.CancelFunc
}

const (
	// maxSleep is how long the timer sleeps at most while there are holds. Go's timers stand still while the machine is
	// suspended and the lease clock does not; waking often notices soon after.
	maxSleep = 250 * time.Millisecond
	// maxBatch bounds the grants of one Driver.Renew call: what one call waits for, no other does.
	maxBatch = 1000
	// maxAttempt bounds one such call, whatever the TTL: what the service has said of one hold is heard that soon,
	// while the answer for another is still out.
	maxAttempt = 5 * time.Second
	// tellThousand is what it may take to tell a thousand holders that they have lost: two processors need 1 to 2 ms,
	// and the program beside it and its garbage collector want their share.
	tellThousand = 8 * time.Millisecond
)

// init starts nothing: the timer is made with the first hold.
func (b *heart) init(c *Client) {
	b.client = c
	b.ctx, b.stop = context.WithCancel(context.Background())
}

// spread is a factor from 0.8 to 1: clients that began together, after a deployment or an outage, do not renew together
// for ever (TestAFleetSpreadsItsRenewals).
func (c *Client) spread() float64 { return 0.8 + 0.2*c.chance() }

// schedule says when a hold is due, and puts it into the heap if it is not there. It is false, and does nothing, when
// the client has been closed: then nobody would ever look at the hold. The caller holds h.mu, as with drop.
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

// drop takes a hold out of the heap. The timer stays as it is; a tick that finds nothing due arms it again. The caller
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

// tick ends what has reached its deadline and starts the renewals that are due. It arms the timer again before it does
// either, so that a tick that takes long does not delay the next one. It holds mu only while it looks at the heap.
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

	// First the losers: nothing that follows may take the time in which they have to be told.
	lost := b.endAll(over, func(h *hold) error {
		if now < h.believedUntil() { // extended since we looked
			at, early := h.renewalDue(now, b.client.spread())
			b.schedule(h, at, early, now)
			return nil
		}
		return h.lostFor(ReasonExpired, h.lastErr)
	})
	// Then the renewals. Each batch has a goroutine of its own, so that one that hangs holds up neither the next tick
	// nor the other batches.
	var round batches
	for i, h := range due {
		if full := round.enlist(h, now, len(due)-i); full != nil {
			b.rounds.Go(func() { b.renew(full) })
		}
	}
	for _, x := range round {
		b.rounds.Go(func() { b.renew(x) })
	}
	// Last what nobody waits for.
	for i := range lost {
		b.settleEnding(&lost[i], now)
	}
}

// takeDue returns the holds whose deadline has passed, taken out of the heap, and those whose renewal is due, left
// there for their deadline. The caller holds mu.
//
// A renewal that is due takes others along that would be due soon, since one call serves them all: so the holds of a
// client stay together in few calls. An Extend and a repetition take nobody along; they come out of turn.
//
//	due now           renewed
//	due in 2 s        renewed too, if it may ride along 2 s early and something that takes others along is due
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

// endAll ends holds for the cause that why returns, and tells their holders: all of them before anything else, side by
// side if they are many. A nil cause leaves a hold alone. What remains to be done is settleEnding, for each of the
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
	// each is how many holds are worth a goroutine.
	const each = 512
	workers := min(runtime.GOMAXPROCS(0), len(holds)/each)
	if workers < 2 {
		return part(holds)
	}
	// Each worker has a part of its own and writes into a slice of its own, so they share nothing but the holds' locks.
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

// announce tells the holder of a hold that has just ended, if it has, and then does the rest. The caller holds no
// mutex.
//
// It is for one hold; a tick, which has many, calls endAll for all of them before the first settleEnding.
func (b *heart) announce(end *ending, now instant) {
	if end.hold != nil {
		end.cancel()
		b.settleEnding(end, now)
	}
}

// settleEnding does what follows a loss when the holder has been told. The service may still have the entry of a hold
// that expired, and its session may keep it alive: it is given back when its TTL is over, and not before, since until
// then the holder may still be stopping.
func (b *heart) settleEnding(end *ending, now instant) {
	h := end.hold
	lost := (*LostError)(nil)
	if !errors.As(end.cause, &lost) {
		return
	}
	h.mu.Lock()
	if lost.Reason == ReasonExpired {
		h.clean(max(h.gone.Sub(now), time.Millisecond))
	}
	told := h.told
	h.mu.Unlock()
	if told {
		h.tell(Event{Type: EventLost, Held: now.Sub(h.since), Reason: lost.Reason, Err: lost.Err})
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

// batches are those of one round that are not full.
type batches []*batch

// enlist adds a hold to a batch if it is to be renewed, and returns the batch if it is full now. A hold whose renewal
// is in flight is left out: there is one owner of its outcome at a time.
//
// Holds whose deadlines are near do not share a call with those that have much time, by more than a factor of four:
// each call is bounded by its nearest deadline, so one hold in need would cut the time of all
// (TestRenewalsAreBoundedByTheirDeadlines). Up to more holds will follow; it is for the room that a batch is made with.
//
//	deadlines in 29 s, 20 s and 8 s     one call, bounded by a third of 8 s
//	deadlines in 29 s and 5 s           two calls
func (bs *batches) enlist(h *hold, now instant, more int) (full *batch) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cause.Load() != nil || h.renewing || !h.renew && len(h.extends) == 0 {
		return nil
	}
	h.renewing = true
	g := h.grant
	g.TTL = h.ttl // Extend may have changed what to ask for
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

// renew makes one attempt for a batch. It is bounded by a third of the time that is left to the nearest of the current
// deadlines, so that an attempt that hangs leaves time for others. The answer is applied to each hold by itself;
// renewals that the driver left out are faults.
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

// errTooFew is the fault of a driver that broke the contract; it is no loss, because the service has said nothing.
var errTooFew = fmt.Errorf("%w: the driver answered fewer renewals than it was asked for", ErrUnknown)

// outcome is what the renewals of one call have in common: they succeed, or are repeated, together. Holds that each
// drew their own time for the next attempt would come back as a thousand calls.
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

// retryIn returns when to try again with so much time left: after a twentieth to a tenth of it, but no more than 1 s.
// The floor grows with the number of holds: each round costs, and the last ones before a common deadline must not take
// the time in which all have to be told that they lost.
//
// With a validity of 29.65 s and the renewal due after 9 s, an outage is met by an attempt after 9 s, then by another
// about every 0.5 to 1 s while more than 10 s are left, and faster towards the deadline. For a client of few holds the
// least pause is 2.5 to 5 ms.
func (o *outcome) retryIn(left time.Duration) time.Duration {
	return time.Duration(float64(max(min(left/10, time.Second), o.floor)) * (1 + o.retry) / 2)
}

// settle applies the outcome of a renewal that asked for ttl. Since renewals never shorten, one without an answer
// changes nothing, and the deadline is the latest of all that were proved.
//
//	cause there already          nothing: there is no un-losing
//	nil                          the deadline moves (prove); EventRenewed
//	ErrNotHeld, ErrHistoryLost   lost, with the driver's reason
//	anything else                tried again before the deadline; EventSuspect
//
// An answer that will be the same next time (final) is the answer to an Extend, whose length is taken back; for the
// hold itself it is a fault like others.
func (b *heart) settle(h *hold, ttl time.Duration, r *backend.Renewal, round *outcome) {
	now, event := round.now, Event{Took: round.took}
	h.mu.Lock()
	h.renewing = false
	h.lastErr = r.Err
	// An answer that comes after the deadline proves nothing any more, whatever it says: the hold may have been told
	// to be over by Lease.Err already.
	tell := h.expire(now)
	switch {
	case h.cause.Load() != nil:
		// Lost or released meanwhile; there is no un-losing.
	case r.Err == nil:
		b.prove(h, ttl, r, round)
		event.Type = EventRenewed
	case errors.Is(r.Err, ErrNotHeld), errors.Is(r.Err, ErrHistoryLost):
		tell = h.lose(reasonOf(r.Err), r.Err)
	default:
		if final(r.Err) && len(h.extends) > 0 { // the service refuses the new length
			h.ttl = h.extends[0].before
			h.answer(r.Err)
		}
		left := h.believedUntil().Sub(now)
		at := h.believedUntil() // in any case: the deadline fires although renewals fail
		if h.renew || len(h.extends) > 0 {
			at = min(at, now.Add(round.retryIn(left)))
		}
		b.schedule(h, at, 0, now)
		event.Type, event.Err = EventSuspect, r.Err
	}
	event.Left = h.believedUntil().Sub(now)
	h.mu.Unlock()

	if tell.hold != nil {
		b.announce(&tell, now)
		b.client.remember(r.Err)
	} else if event.Type != "" {
		h.tell(event)
	}
}

// prove takes a confirmed renewal over. The caller holds h.mu.
//
// A proof counts from the instant before its request was sent, and for no longer than the length in force: if Extend
// has shortened it since, the holder was told so already. A proof that is older than what is known moves nothing (a
// driver with sessions may answer with an earlier keepalive). It is not followed by another renewal at once, or a
// driver that only has old proofs would be asked without a pause.
//
// With Extend(10 s) on a lease of 30 s while a renewal for 30 s is in flight:
//
//	the renewal is confirmed for 30 s     it counts for 10 s, since the holder has been told 10 s
//	the next one asks for 10 s            and the service keeps its 30 s: renewals never shorten
func (b *heart) prove(h *hold, ttl time.Duration, r *backend.Renewal, round *outcome) {
	granted := r.TTL
	if ttl != h.ttl { // Extend has changed the length since this was sent
		granted = min(granted, h.ttl)
	} else {
		h.grant.TTL = ttl
		h.answer(nil)
	}
	h.grant.SentAt = max(h.grant.SentAt, r.SentAt)
	if until := r.SentAt.Add(h.validity(granted)); until > h.believedUntil() {
		h.believe(until, r.SentAt.Add(granted))
	}
	at, early := h.renewalDue(r.SentAt, round.spread)
	if at <= round.now && len(h.extends) == 0 { // an old proof: not again at once
		at = round.now.Add(round.retryIn(h.believedUntil().Sub(round.now)))
	}
	b.schedule(h, min(at, h.believedUntil()), early, round.now)
}

// answer ends the Extends that wait. Each channel has room for its one answer, so this never blocks. The caller holds
// mu.
func (h *hold) answer(err error) {
	for _, x := range h.extends {
		x.done <- err
	}
	h.extends = nil
}

// reasonOf tells why a hold is gone by what the driver answered. A driver that gives no reason has found the entry
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

// close stops the timer, takes in nothing more and returns the holds, whose index means nothing any more. A tick that
// is on its way finds closed set and does nothing. Renewals in flight go on until their context ends.
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
