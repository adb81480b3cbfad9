package redis

// This file serves all waiters of one driver together, because the server would pay for each of them separately. A
// release pushes the next waiter awake, without this file. It is needed when a push is lost, when a holder dies, and
// when a whole queue has died:
//
//   - A look asks for the state of this client's places at one name (redisscript.Look), and settles the name.
//   - A settlement has the server hand over if the present hold has run out (redisscript.Settle).
//   - A peek asks, for up to 500 names in one step, which of them deserve a look: nobody holds them, or this client
//     does.
//
// Each name that somebody waits for is a group with one timer, which is set to the next look or
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
	"github.com/fencelock/fencelock/redis/internal/lines"
)

const (
	// lookAgain is the pause after a look that failed.
	lookAgain = 500 * time.Millisecond
	// lookTime is for one look, settlement or peek.
	lookTime = 3 * time.Second
	// peekEvery bounds the time until a lost push or a dead holder is noticed on a single server.
	peekEvery = time.Second
)

// A look costs more than a peek at hundreds of names, and a settlement about as much as a look. So on one server every
// name is peeked at all the time, and for the rest many names share the looks that one client may send in a second.
const (
	// restBetween is the minimum time between two looks at a name that is peeked at.
	restBetween = 10 * time.Second
	// looksMore bounds a client's looks per second at names none of which is looked at more often than necessary, and
	// namesALook names allow one more.
	looksMore, namesALook = 3, 150
	// precise is the number of names up to which the end of each hold is settled when it is due. With more, the next
	// peek finds it up to a second later.
	precise = 64
)

// nextLook returns the time between two looks at one of so many names, with so many places in its queue. Looks that are
// due are spread evenly over twice their share of the client's looks, so that names with waits that began together are
// looked at apart from then on.
func nextLook(names, places int, peeked bool) time.Duration {
	d := redisscript.NextLook(places)
	if peeked {
		d = max(d, redisscript.Jitter(restBetween))
	}
	share := time.Duration(names) * time.Second / time.Duration(looksMore+names/namesALook)
	return max(d, mathrand.N(2*share+1))
}

// waiting knows the waiters of one driver, by nonce for pushes and by name for looks. It has one timer a name, one for
// all of them, and one for each monitored offer; no goroutine runs between their firings. Every timer function counts
// as a call at the gate, so Close waits for running ones, and close stops the others.
//
// Looks and peeks do not keep a waiter's place: a dead waiter is found by offering it the lock. The number of
// heartbeats would grow with the names that a client waits for.
type waiting struct {
	// mu protects the following fields, except ended, and the fields of the groups and waiters. It is never held during an
	// exchange with the server.
	mu     sync.Mutex
	nonces map[string]*waiter
	groups map[string]*group // by lock key
	// Tries that ended without a hold as far as their callers know, and that the server may yet hand one.
	ended redisconn.Abandoned
	// By lock key: when to settle an offer that this driver has made. See offer.go.
	offers map[string]*time.Timer
	// nil while there is no name to peek at.
	peek *time.Timer
	// Set by close: no timer is set any more.
	shut bool
}

// waiter is an attempt that has a place, or is about to get one, by the nonce of its present try.
type waiter struct {
	keys  redisscript.Keys
	nonce string
	// The event that ended the wait. It has room for one: the first event counts, and the teller of a later one must not
	// block.
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
	// A peek tells when to look sooner. Not for names held in shares: their key does not show a single hold.
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
		return // the push was faster than the answer, and no look is needed
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

// close stops all timers, and no timer is set from then on. A timer function that has fired already finds the gate
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

// offered passes a push on. It returns false if the try was abandoned, and the lock is to be declined. A push for a try
// that is merely unknown is no reason for that: a look was faster, and the try may hold the lock.
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

// closed says that a name stays closed for another d, by a minimum hold: no settlement is due before.
func (w *waiting) closed(lock string, d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g := w.groups[lock]; g != nil {
		g.settleAfter(d)
		g.arm()
	}
}

// asked answers the server's question whether the waiters for a name live. A look is the answer: a waiter that does
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

// now makes the group look immediately, or after the present look. waiting.mu is held.
func (g *group) now() {
	g.look = time.Now()
	g.again = g.again || g.busy
	g.arm()
}

// peek looks at all names at once, and makes groups look if their name may have changed. It runs on its timer and sets
// it anew; without groups it drops the timer, and queued makes the next one.
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
	// The next waiter restarts the peeks.
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
	var steps []*lines.Step
	for chunk := range slices.Chunk(all, redisscript.MaxPeek) {
		s := lines.NewStep(redisscript.Peek, chunk[0].keys, strconv.Itoa(len(chunk)), d.identity)
		for _, g := range chunk[1:] {
			s.Others = append(s.Others, g.keys)
		}
		steps = append(steps, s)
	}
	ctx, cancel := context.WithTimeout(d.gate.Work(), lookTime)
	defer cancel()
	d.lines.DoAll(ctx, steps, func(i int, s *lines.Step, err error) {
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

// arm sets the timer for the next look or settlement. waiting.mu is held.
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
// during the exchange, so the fields are read anew afterwards: waiters may have come and gone. A look carries at most
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

// settle lets the server hand over after a hold has run out, and plans the next settlement by the remaining time of the
// present hold.
func (d *Driver) settle(ctx context.Context, g *group) {
	answer, _, err := d.lines.Do(ctx, lines.NewStep(redisscript.Settle, g.keys))
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

// look asks for the state of the waiters' places, which also shows the server that they live, and settles. A place that
// is the hold already was renewed by the look, so the instant before it was sent proves the hold.
func (d *Driver) look(ctx context.Context, g *group, nonces []string) {
	s := lines.NewStep(redisscript.Look, g.keys)
	s.Args = append([]string{d.identity}, nonces...)
	answer, sentAt, err := d.lines.Do(ctx, s)
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
