package redis

import (
	"context"
	mathrand "math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const (
	lookAgain = 500 * time.Millisecond // after a fault
	lookTime  = 3 * time.Second        // for one look
	peekEvery = time.Second
)

// What a look costs is more than a peek at hundreds of names, and a settlement about as much. So on one server every
// name is peeked at all the time, and for the rest many names share what one client may ask for in a second.
const (
	restBetween = 10 * time.Second // between two looks at one name that is peeked at, at least
	looksMore   = 3                // looks a second at names of which none is looked at more often than need be,
	namesALook  = 150              // and one more for so many names
	precise     = 64               // names up to which the end of each hold is settled when it is due, although a peek would find it
)

// nextLook is how long to wait from a look at one of so many names, in whose queue there were so many places, to the
// next one.
func nextLook(names, places int, peeked bool) time.Duration {
	d := redisscript.NextLook(places)
	if peeked {
		d = max(d, redisscript.Jitter(restBetween))
	}
	share := time.Duration(names) * time.Second / time.Duration(looksMore+names/namesALook)
	return max(d, mathrand.N(2*share+1)) // names whose waits began together are apart at once
}

// waiting knows the waiters of one driver, by nonce for pushes and by name for looks. It has one timer a name, one for
// all of them, and no goroutine.
//
// A push makes every look unnecessary, unless it is lost or a holder dies. Looks and peeks are not what keeps a waiter's
// place: who has died is found out by offering it the lock.
type waiting struct {
	mu     sync.Mutex // protects the following fields, and those of the groups and waiters
	nonces map[string]*waiter
	groups map[string]*group      // by lock key
	ended  redisconn.Abandoned    // attempts that may still be handed a hold
	offers map[string]*time.Timer // by lock key: when to see what became of an offer
	peek   *time.Timer            // nil until there is something to peek at
	shut   bool
}

// waiter is one attempt of one call.
type waiter struct {
	keys  redisscript.Keys
	nonce string
	event chan event // buffered: the first one counts
	group *group     // nil until it is queued
}

// event ends a waiter's wait: it is offered the hold, or its place is gone.
type event struct {
	gone bool
	at   backend.Instant // the instant that proves that it holds already, if not zero
}

// group is the waiters of one name.
type group struct {
	keys    redisscript.Keys
	waiters map[string]*waiter // by nonce
	timer   *time.Timer
	busy    bool      // a look or a settlement is under way
	again   bool      // look at once when it has ended
	look    time.Time // when to look next
	settle  time.Time // when to settle next; zero if not known
	peeked  bool      // a peek tells when to look sooner
}

func (w *waiting) init() {
	w.nonces = map[string]*waiter{}
	w.groups = map[string]*group{}
	w.offers = map[string]*time.Timer{}
}

// add makes an attempt known, so that a push finds it.
func (w *waiting) add(keys redisscript.Keys, h redisscript.Hold) *waiter {
	x := &waiter{keys: keys, nonce: h.Nonce, event: make(chan event, 1)}
	w.mu.Lock()
	w.nonces[h.Nonce] = x
	w.mu.Unlock()
	return x
}

// queued says that x has a place in the queue.
func (w *waiting) queued(d *Driver, x *waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(x.event) > 0 || w.shut {
		return // the push was here first
	}
	g := w.groups[x.keys.Lock]
	if g == nil {
		g = &group{keys: x.keys, waiters: map[string]*waiter{}}
		g.look = time.Now().Add(redisscript.FirstLook())
		g.settle = time.Now().Add(redisscript.FirstSettle())
		g.timer = time.AfterFunc(time.Until(g.settle), func() { d.tick(g) })
		w.groups[x.keys.Lock] = g
		if w.peek == nil && !d.sharded() {
			w.peek = time.AfterFunc(redisscript.Jitter(peekEvery), d.peek)
		}
	}
	g.waiters[x.nonce] = x
	x.group = g
}

// remove forgets x.
func (w *waiting) remove(x *waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.nonces, x.nonce)
	if g := x.group; g != nil {
		x.group = nil
		delete(g.waiters, x.nonce)
		if len(g.waiters) == 0 {
			g.timer.Stop()
			delete(w.groups, g.keys.Lock)
		}
	}
}

// close stops all timers.
func (w *waiting) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shut = true
	for _, g := range w.groups {
		g.timer.Stop()
	}
	for _, t := range w.offers {
		t.Stop()
	}
	if w.peek != nil {
		w.peek.Stop()
	}
}

// offered passes a push on. It is false if the attempt was abandoned, and the lock is to be given back. A push for an
// attempt that is just not known any more is no reason for that: a look was faster, and the attempt may hold the lock.
func (w *waiting) offered(nonce string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x := w.nonces[nonce]; x != nil {
		x.tell(event{})
	}
	return !w.ended.Has(nonce)
}

func (x *waiter) tell(e event) {
	select {
	case x.event <- e:
	default:
	}
}

// closed says that a name stays closed for another d.
func (w *waiting) closed(lock string, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g := w.groups[lock]; g != nil {
		g.settleAfter(d)
		g.arm()
	}
}

// asked answers whether those who wait for a name live, by a look.
func (w *waiting) asked(lock string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g := w.groups[lock]; g != nil {
		g.now()
	}
}

// lookAll makes every group look at once: pushes may have been lost.
func (w *waiting) lookAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range w.groups {
		g.now()
	}
}

// now makes the group look at once. waiting.mu is held.
func (g *group) now() {
	g.look = time.Now()
	g.again = g.again || g.busy
	g.arm()
}

// peek looks at all names at once, and makes those groups look for whom something may have happened: nobody holds the
// name, or this client does.
func (d *Driver) peek() {
	if d.gate.Enter() != nil {
		return
	}
	defer d.gate.Leave()
	w := &d.waiting
	var all []*group
	w.mu.Lock()
	for _, g := range w.groups {
		if g.peeked {
			all = append(all, g)
		}
	}
	w.mu.Unlock()
	found := d.peekAt(all)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range found {
		if len(g.waiters) > 0 {
			g.now()
		}
	}
	switch {
	case w.shut:
	case len(w.groups) == 0:
		w.peek = nil
	default:
		w.peek.Reset(redisscript.Jitter(peekEvery))
	}
}

// peekAt returns the groups that are worth a look.
func (d *Driver) peekAt(all []*group) (found []*group) {
	if len(all) == 0 {
		return nil
	}
	var steps []*step
	for chunk := range slices.Chunk(all, redisscript.MaxPeek) {
		s := newStep(redisscript.Peek, chunk[0].keys, strconv.Itoa(len(chunk)), d.identity)
		for _, g := range chunk[1:] {
			s.Others = append(s.Others, g.keys)
		}
		steps = append(steps, s)
	}
	ctx, cancel := context.WithTimeout(d.gate.Work(), lookTime)
	defer cancel()
	d.batch.doAll(ctx, steps, func(i int, s *step, err error) {
		if err != nil {
			return // the next one is soon
		}
		chunk := all[i*redisscript.MaxPeek : min((i+1)*redisscript.MaxPeek, len(all))]
		worth, _ := redisscript.ParsePeeked(s.answer, len(chunk))
		for _, n := range worth {
			found = append(found, chunk[n])
		}
	})
	return found
}

// settleAfter plans a settlement for soon after the hold has run out in d.
func (g *group) settleAfter(d time.Duration) { g.settle = time.Now().Add(redisscript.SettleIn(d)) }

// arm sets the timer for what is due next. waiting.mu is held.
func (g *group) arm() {
	if g.busy || len(g.waiters) == 0 {
		return
	}
	due := g.look
	if !g.settle.IsZero() && g.settle.Before(due) {
		due = g.settle
	}
	g.timer.Reset(max(0, time.Until(due)))
}

// tick runs when a group's timer fires.
func (d *Driver) tick(g *group) {
	if d.gate.Enter() != nil {
		return
	}
	defer d.gate.Leave()
	w := &d.waiting
	w.mu.Lock()
	if g.busy || len(g.waiters) == 0 || w.shut {
		w.mu.Unlock()
		return
	}
	g.busy, g.again = true, false
	look := !time.Now().Before(g.look)
	var nonces []string
	if look {
		for nonce := range g.waiters {
			if nonces = append(nonces, nonce); len(nonces) == redisscript.MaxLook {
				break
			}
		}
	}
	w.mu.Unlock()

	ctx, cancel := context.WithTimeout(d.gate.Work(), lookTime)
	defer cancel()
	if look {
		d.look(ctx, g, nonces)
	} else {
		d.settle(ctx, g)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	g.busy = false
	if g.again {
		g.look = time.Now()
	}
	if !w.shut {
		g.arm()
	}
}

// settle lets the server hand over after a hold has run out.
func (d *Driver) settle(ctx context.Context, g *group) {
	answer, _, err := d.batch.do(ctx, newStep(redisscript.Settle, g.keys))
	w := &d.waiting
	w.mu.Lock()
	defer w.mu.Unlock()
	g.settle = time.Time{}
	if err != nil {
		g.soon(redisscript.Jitter(lookAgain))
		return
	}
	ms, _ := answer.(int64)
	switch {
	case ms >= 0 && !w.rough(g):
		g.settleAfter(time.Duration(ms) * time.Millisecond)
	case ms == -2:
		g.soon(0) // nobody holds and nobody waits: our places are gone
	}
}

// rough reports whether the end of a hold is left to the next peek. waiting.mu is held.
func (w *waiting) rough(g *group) bool { return g.peeked && len(w.groups) > precise }

// soon brings the next look forward. waiting.mu is held.
func (g *group) soon(d time.Duration) {
	if at := time.Now().Add(d); at.Before(g.look) {
		g.look = at
	}
}

// look learns what became of the waiters, keeps their places, and settles.
func (d *Driver) look(ctx context.Context, g *group, nonces []string) {
	s := newStep(redisscript.Look, g.keys)
	s.Args = append([]string{d.identity}, nonces...)
	answer, sentAt, err := d.batch.do(ctx, s)
	w := &d.waiting
	w.mu.Lock()
	defer w.mu.Unlock()
	found, ok := redisscript.ParseLooked(answer, len(nonces))
	if err != nil || !ok {
		g.look = time.Now().Add(redisscript.Jitter(lookAgain))
		return
	}
	g.peeked = !d.sharded() && !found.Shared
	g.look = time.Now().Add(nextLook(len(w.groups), found.Length, g.peeked))
	g.settle = time.Time{}
	if found.ExpiresIn >= 0 && !w.rough(g) {
		g.settleAfter(found.ExpiresIn)
	}
	for i, nonce := range nonces {
		x := g.waiters[nonce]
		if x == nil {
			continue // ended meanwhile
		}
		switch found.Places[i] {
		case redisscript.PlaceGone:
			x.tell(event{gone: true})
		case redisscript.PlaceHolds:
			x.tell(event{at: sentAt})
		}
	}
	if len(g.waiters) > len(nonces) && len(nonces) == redisscript.MaxLook {
		g.soon(redisscript.FirstLook()) // more than one look can carry; map order makes the next one carry others
	}
}
