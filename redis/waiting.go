package redis

// This file looks after the waiters of one driver: all of them together, because what each cost by itself would be paid
// by the server. A release pushes the next waiter awake, and nothing here is needed then. It is needed when a push is
// lost, when a holder dies, and when a whole queue has died:
//
//   - A look asks what became of this client's places at one name (redisscript.Look), and settles the name.
//   - A settlement has the server hand over if the present hold has run out (redisscript.Settle).
//   - A peek asks, for up to 500 names in one step, which of them deserve a look: nobody holds them, or this client
//     does.
//
// Each name that somebody waits for is a group with one timer, which is set to whatever is due next, a look or a
// settlement. One timer for all names peeks every second on a single server. Measured on a single server: 200 waiters
// on 200 names cost some 20 commands a second, 10,000 some 300; a look for each name every three seconds cost 620 for
// 200.

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
	// lookAgain is the pause after a look that failed.
	lookAgain = 500 * time.Millisecond
	// lookTime is for one look, settlement or peek.
	lookTime = 3 * time.Second
	// peekEvery is how soon a lost push or a dead holder is noticed on a single server.
	peekEvery = time.Second
)

// What a look costs is more than a peek at hundreds of names, and a settlement about as much. So on one server every
// name is peeked at all the time, and for the rest many names share what one client may ask for in a second.
const (
	// restBetween is what lies between two looks at one name that is peeked at, at least.
	restBetween = 10 * time.Second
	// looksMore is how many looks a second a client may ask for at names of which none is looked at more often than
	// need be, and namesALook how many names allow one more.
	looksMore, namesALook = 3, 150
	// precise is the number of names up to which the end of each hold is settled when it is due. With more, the next
	// peek finds it up to a second later.
	precise = 64
)

// nextLook is how long to wait from a look at one of so many names, in whose queue there were so many places, to the
// next one. What is due is spread evenly over twice its share of the client's looks, so that names whose waits began
// together are looked at apart from then on.
func nextLook(names, places int, peeked bool) time.Duration {
	d := redisscript.NextLook(places)
	if peeked {
		d = max(d, redisscript.Jitter(restBetween))
	}
	share := time.Duration(names) * time.Second / time.Duration(looksMore+names/namesALook)
	return max(d, mathrand.N(2*share+1))
}

// waiting knows the waiters of one driver, by nonce for pushes and by name for looks. It has one timer a name, one for
// all of them, and one for each offer that is looked after; no goroutine runs between their firings. Every timer
// function counts as a call at the gate, so Close waits for those that run, and close stops the others.
//
// Looks and peeks are not what keeps a waiter's place: a dead one is found out by offering it the lock. Heartbeats that
// keep places were rejected, as their number grows with the names that one waits for.
type waiting struct {
	// mu protects the following fields, but for ended, and those of the groups and waiters. It is never held during an
	// exchange with the server.
	mu     sync.Mutex
	nonces map[string]*waiter
	groups map[string]*group // by lock key
	// Tries that ended without a hold as far as their callers know, and that the server may yet hand one.
	ended redisconn.Abandoned
	// By lock key: when to see what became of an offer that this driver has made. See offer.go.
	offers map[string]*time.Timer
	// nil until there is something to peek at, and again when nobody waits.
	peek *time.Timer
	// Set by close: no timer is set any more.
	shut bool
}

// waiter is an attempt that has a place, or is about to get one, by the nonce of its present try.
type waiter struct {
	keys  redisscript.Keys
	nonce string
	// What ended the wait. It has room for one: the first event counts, and the teller of a later one must not block.
	event chan event
	// The waiters of the same name; nil until it is queued.
	group *group
}

// event ends a waiter's wait. It is offered the hold and has to accept; or gone says that its place is not there any
// more; or at is the instant from which it is proved to hold already.
type event struct {
	gone bool
	at   backend.Instant
}

// group is the waiters of one name. It exists as long as there are any.
type group struct {
	keys    redisscript.Keys
	waiters map[string]*waiter // by nonce
	timer   *time.Timer
	// A look or a settlement is under way: the timer is not set before it ends.
	busy bool
	// Look at once when that has ended: something has happened meanwhile.
	again bool
	// When to look next.
	look time.Time
	// When to settle next; zero if it is not known when the hold runs out, or left to the next peek.
	settle time.Time
	// A peek tells when to look sooner. Not for names held in shares, whose key says nothing about one hold.
	peeked bool
}

// init makes the maps.
func (w *waiting) init() {
	w.nonces = map[string]*waiter{}
	w.groups = map[string]*group{}
	w.offers = map[string]*time.Timer{}
}

// add makes a waiter known, so that a push finds it. It comes before the request leaves.
func (w *waiting) add(keys redisscript.Keys, h redisscript.Hold) *waiter {
	x := &waiter{keys: keys, nonce: h.Nonce, event: make(chan event, 1)}
	w.mu.Lock()
	w.nonces[h.Nonce] = x
	w.mu.Unlock()
	return x
}

// queued says that x has a place in the queue. The first waiter of a name starts the group's timer, and the first of
// all the peeks. The first settlement comes early: all who stand in front may be dead, behind a hold that has run out,
// and then nobody else would look.
func (w *waiting) queued(d *Driver, x *waiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(x.event) > 0 || w.shut {
		return // the push was faster than the answer, and there is nothing to look after
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

// remove forgets x, and with the last waiter of a name its group.
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

// close stops all timers, and from then on nothing sets one. A timer function that has fired already finds the gate
// closed or, if it entered before, is waited for by Close, which calls this afterwards.
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

// offered passes a push on. It is false if the try was abandoned, and the lock is to be given back. A push for an try
// that is just not known any more is no reason for that: a look was faster, and the try may hold the lock.
func (w *waiting) offered(nonce string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x := w.nonces[nonce]; x != nil {
		x.tell(event{})
	}
	return !w.ended.Has(nonce)
}

// tell ends x's wait, unless it has ended.
func (x *waiter) tell(e event) {
	select {
	case x.event <- e:
	default:
	}
}

// closed says that a name stays closed for another d, by a minimum hold: there is nothing to settle before.
func (w *waiting) closed(lock string, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g := w.groups[lock]; g != nil {
		g.settleAfter(d)
		g.arm()
	}
}

// asked answers the server's question whether those who wait for a name live. A look is the answer: a waiter that does
// not look in time loses its places.
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

// now makes the group look at once, or again once the present look has ended. waiting.mu is held.
func (g *group) now() {
	g.look = time.Now()
	g.again = g.again || g.busy
	g.arm()
}

// peek looks at all names at once, and makes those groups look for whom something may have happened. It runs on its
// timer and sets it anew; without groups it lets it go, and queued makes the next one.
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
	// The lock is not held meanwhile: a push that comes in between must find its waiter.
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
	// The next waiter starts the peeks again.
	case len(w.groups) == 0:
		w.peek = nil
	default:
		w.peek.Reset(redisscript.Jitter(peekEvery))
	}
}

// peekAt returns the groups that are worth a look, in steps of at most redisscript.MaxPeek names that travel together.
// A step that fails is not repeated, since the next peek is a second away.
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
	d.lines.doAll(ctx, steps, func(i int, s *step, err error) {
		if err != nil {
			return // the next one is soon
		}
		chunk := all[i*redisscript.MaxPeek : min((i+1)*redisscript.MaxPeek, len(all))]
		worth, _ := redisscript.ParsePeeked(s.Answer, len(chunk))
		for _, n := range worth {
			found = append(found, chunk[n])
		}
	})
	return found
}

// settleAfter plans a settlement for soon after the hold has run out in d. waiting.mu is held.
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

// tick runs when a group's timer fires. While it is busy nobody else looks for this group, and the lock is not held
// during the exchange, so everything is read again afterwards: waiters may have come and gone. A look carries at most
// MaxLook nonces; Go's order of maps makes the next one carry others.
func (d *Driver) tick(g *group) {
	if d.gate.Enter() != nil {
		return
	}
	defer d.gate.Leave()
	w := &d.waiting
	w.mu.Lock()
	// The timer may fire once more although it was stopped, or set for a group that has become empty.
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
	// Something was heard while this look was under way, which it may have missed.
	if g.again {
		g.look = time.Now()
	}
	if !w.shut {
		g.arm()
	}
}

// settle lets the server hand over after a hold has run out, and plans the next settlement by what the present hold has
// left.
func (d *Driver) settle(ctx context.Context, g *group) {
	answer, _, err := d.lines.do(ctx, newStep(redisscript.Settle, g.keys))
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
		g.soon(0) // nobody holds and nobody waits: our places are gone, which a look tells their waiters
	}
}

// rough reports whether the end of a hold is left to the next peek. waiting.mu is held.
func (w *waiting) rough(g *group) bool { return g.peeked && len(w.groups) > precise }

// soon brings the next look forward, and never puts it off. waiting.mu is held.
func (g *group) soon(d time.Duration) {
	if at := time.Now().Add(d); at.Before(g.look) {
		g.look = at
	}
}

// look learns what became of the waiters, which also tells the server that they live, and settles. A place that is the
// hold already was renewed by the look, so the instant before it was sent proves the hold.
func (d *Driver) look(ctx context.Context, g *group, nonces []string) {
	s := newStep(redisscript.Look, g.keys)
	s.Args = append([]string{d.identity}, nonces...)
	answer, sentAt, err := d.lines.do(ctx, s)
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
