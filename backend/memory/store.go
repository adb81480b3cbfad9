package memory

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// StoreOptions are the settings of a Store. The zero value, or nil, means defaults.
type StoreOptions struct {
	// Clock by which the store ends holds, and by which its drivers report instants. Default backend.SystemClock();
	// backend.GoClock() under testing/synctest. The store finds ends that the clock has passed on each call, and
	// sleeps by package time's timers between calls.
	Clock backend.Clock

	// Steady makes the intervals at which drivers ask again, in case a push got lost, depend on the name alone and not
	// on chance: for simulations that must repeat.
	Steady bool
}

// Store is a lock service in memory. All methods are safe for concurrent use.
type Store struct {
	clock  backend.Clock
	steady bool

	mu      sync.Mutex // protects the following fields
	space   string     // of the tokens; another one after Wipe
	state   serverState
	inbox   []func() // requests that arrived while paused
	names   map[string]*entry
	last    fencing.Token // counts grants and ends of holds
	past    history
	watches map[string]map[*watch]struct{}
	alarms  alarmHeap
	timer   *time.Timer
	armed   backend.Instant // when the timer fires; zero: not armed
	outbox  []func()        // pushes to send once mu is free
	ended   endings
	drivers map[*Driver]struct{}
	under   map[string]map[*waiter]struct{} // those that wait under a hold, by its request id
	spare   []*entry
}

// NewStore returns an empty store with a random token space.
func NewStore(o *StoreOptions) *Store {
	s := &Store{
		clock: backend.SystemClock(), space: newSpace(),
		names: map[string]*entry{}, watches: map[string]map[*watch]struct{}{}, drivers: map[*Driver]struct{}{},
		under: map[string]map[*waiter]struct{}{},
	}
	s.past.floor = s.revision()
	if o != nil && o.Clock != nil {
		s.clock = o.Clock
	}
	s.steady = o != nil && o.Steady
	return s
}

func newSpace() string { return "memory-" + backend.NewRequestID() }

// Driver returns one more client of the store. The caller closes it.
func (s *Store) Driver() *Driver {
	d := &Driver{store: s, done: make(chan struct{})}
	d.net.conn = make(chan struct{})
	s.mu.Lock()
	d.space = s.space
	s.drivers[d] = struct{}{}
	s.mu.Unlock()
	return d
}

// answer is what the store says about one acquire: of one request, or of a set of them.
type answer struct {
	grants []granted // one for each request
	err    error     // nil: granted
	gone   bool      // the place in the queue is gone; ask again
}

// granted is what the store tells about one hold.
type granted struct {
	token       fencing.Token
	incarnation string
	ttl         time.Duration
	minHold     time.Duration // what is left of it
	queued      bool          // granted out of the queue
}

// verdict says what became of a request at the store.
type verdict uint8

const (
	answered   verdict = iota
	queued             // the answer comes by push
	notServing         // the store is paused or stopped and has done nothing
)

// acquire grants all of rs, or answers why not if push is nil, or queues them. Requests that hold or wait already keep
// what they have, with a fresh TTL: that is what makes sending them again harmless. A caller that read the clock just
// now passes what it read, since reading costs as much as granting; others pass zero. The grants are appended to room.
func (s *Store) acquire(d *Driver, rs []backend.Request, now backend.Instant, room []granted, push func(answer)) (answer, verdict) {
	s.mu.Lock()
	if s.state != serving {
		s.mu.Unlock()
		return answer{}, notServing
	}
	if now.IsZero() {
		now = s.clock.Now()
	}
	s.expire(now)
	a, v := answer{err: s.forgot(d)}, answered
	if a.err == nil {
		a, v = s.decide(d, rs, now, room, push)
	}
	s.arm(now)
	s.unlock()
	return a, v
}

func (s *Store) decide(d *Driver, rs []backend.Request, now backend.Instant, room []granted, push func(answer)) (answer, verdict) {
	if grants, all := s.again(d, rs, now, room); all {
		return answer{grants: grants}, answered
	}
	if e := s.names[rs[0].Name]; e != nil && push != nil {
		if w := e.waiter(rs[0].RequestID); w != nil {
			w.requests, w.driver, w.push = rs, d, push
			s.setAlarm(&w.alarm, now.Add(rs[0].TTL))
			return answer{}, queued
		}
	}
	var few [1]claim
	claims := few[:0]
	for i := range rs {
		claims = appendClaims(claims, i, &rs[i])
	}
	if err := s.refuse(rs, claims); err != nil {
		return answer{err: err}, answered
	}
	blocked := s.blocked(claims, nil)
	switch {
	case blocked == nil:
		for i := range rs {
			room = append(room, s.grant(&rs[i], now, d, false).granted(now))
		}
		return answer{grants: room}, answered
	case push == nil:
		return answer{err: s.names[blocked.name].heldError(rs[blocked.request].Name, now)}, answered
	}
	if err := s.cycle(rs, claims); err != nil {
		return answer{err: err}, answered
	}
	s.enqueue(&waiter{requests: rs, claims: append([]claim(nil), claims...), driver: d, push: push}, now)
	return answer{}, queued
}

// again prolongs the holds of requests that were granted before, and reports whether all were. A set of which only
// some are left is given up: it is all or none, and its caller asks for all.
func (s *Store) again(d *Driver, rs []backend.Request, now backend.Instant, grants []granted) ([]granted, bool) {
	found := 0
	for i := range rs {
		if e := s.names[rs[i].Name]; e != nil && e.find(rs[i].RequestID) != nil {
			found++
		}
	}
	if found == 0 {
		return nil, false
	}
	for i := range rs {
		r := &rs[i]
		var h *hold
		if e := s.names[r.Name]; e != nil {
			h = e.find(r.RequestID)
		}
		switch {
		case h == nil:
		case found < len(rs):
			h.closes = 0
			s.vacate(h, now, backend.ChangeReleased, "")
		default:
			h.ttl, h.lost, h.driver = r.TTL, r.Lost, d
			h.expires = max(h.expires, now.Add(r.TTL))
			s.setAlarm(&h.alarm, h.expires)
			grants = append(grants, h.granted(now))
		}
	}
	return grants, found == len(rs)
}

// refuse says what can never be granted: a set that contradicts itself, and a name that is in use otherwise.
func (s *Store) refuse(rs []backend.Request, claims []claim) error {
	if len(rs) > 1 {
		if err := contradiction(rs, claims); err != nil {
			return err
		}
	}
	for i := range claims {
		c := &claims[i]
		if e := s.names[c.name]; e != nil && (e.limit != c.limit || e.tree != c.tree) {
			return fmt.Errorf("%w: %q", backend.ErrLimitMismatch, c.name)
		}
	}
	return nil
}

// blocked returns the first claim that somebody keeps out: a holder, or a waiter before w, which may be nil.
func (s *Store) blocked(claims []claim, w *waiter) *claim {
	for i := range claims {
		c := &claims[i]
		e := s.names[c.name]
		if e == nil {
			continue
		}
		if e.bars(c) {
			return c
		}
		for _, ahead := range e.queue {
			if ahead == w {
				break
			}
			if c.behind(ahead) {
				return c
			}
		}
	}
	return nil
}

// grant makes r a holder, which nothing keeps out, with the next token.
func (s *Store) grant(r *backend.Request, now backend.Instant, d *Driver, queued bool) *hold {
	s.last++
	token := s.last
	if r.Kind != backend.KindExclusive {
		token = token.NotExclusive()
	}
	var few [1]claim
	claims := appendClaims(few[:0], 0, r)
	own := claims[len(claims)-1]
	h := s.entryFor(&own).newHold()
	h.claim, h.kind, h.requestID, h.holdID, h.owner, h.token = own, r.Kind, r.RequestID, r.HoldID, r.Owner, token
	h.incarnation, h.ttl, h.since, h.expires = s.last.String(), r.TTL, now, now.Add(r.TTL)
	h.metadata, h.lost, h.driver, h.queued = cloneMetadata(r.Metadata), r.Lost, d, queued
	if r.MinHold > 0 {
		h.closes = now.Add(r.MinHold)
	}
	for i := range claims {
		s.entryFor(&claims[i]).count(&claims[i], 1)
	}
	s.record(h, backend.ChangeAcquired, "")
	s.setAlarm(&h.alarm, h.expires)
	return h
}

func (h *hold) granted(now backend.Instant) granted {
	return granted{
		token: h.token, incarnation: h.incarnation, ttl: h.ttl, queued: h.queued, minHold: max(0, h.closes.Sub(now)),
	}
}

func (s *Store) enqueue(w *waiter, now backend.Instant) {
	w.alarm = alarm{index: idle, waiter: w}
	for i := range w.claims {
		if e := s.entryFor(&w.claims[i]); len(e.queue) == 0 || e.queue[len(e.queue)-1] != w {
			e.queue = append(e.queue, w)
		}
	}
	s.waitsUnder(w, true)
	// A waiter that stopped asking is dead. Its place ends like a hold would, or a queue of the dead would close the
	// name for one TTL each.
	s.setAlarm(&w.alarm, now.Add(w.requests[0].TTL))
}

// renew prolongs the holds it finds, and never makes one that it does not find.
func (s *Store) renew(d *Driver, grants []backend.Grant, out []error) verdict {
	s.mu.Lock()
	if s.state != serving {
		s.mu.Unlock()
		return notServing
	}
	now := s.clock.Now()
	s.expire(now)
	for i := range grants {
		g := &grants[i]
		var h *hold
		if e := s.names[g.Name]; e != nil && s.forgot(d) == nil {
			h = e.findGrant(g)
		}
		if h == nil {
			out[i] = s.notHeld(d, g)
			continue
		}
		out[i] = nil
		h.ttl = g.TTL
		h.expires = max(h.expires, now.Add(g.TTL))
		s.setAlarm(&h.alarm, h.expires)
	}
	s.arm(now)
	s.unlock()
	return answered
}

// release ends the hold that g names. If g names a request only (Request.Grant), it ends whatever that request has, and
// no minimum applies, since nobody ran under it. A wait for several names ends as a whole.
func (s *Store) release(d *Driver, g *backend.Grant) (verdict, error) {
	s.mu.Lock()
	if s.state != serving {
		s.mu.Unlock()
		return notServing, nil
	}
	now := s.clock.Now()
	s.expire(now)
	err := s.giveBack(d, g, now)
	s.arm(now)
	s.unlock()
	return answered, err
}

func (s *Store) giveBack(d *Driver, g *backend.Grant, now backend.Instant) error {
	e := s.names[g.Name]
	if e == nil || s.forgot(d) != nil {
		return s.notHeld(d, g)
	}
	if g.Token != 0 || g.Incarnation != "" {
		h := e.findGrant(g)
		if h == nil {
			return s.notHeld(d, g)
		}
		s.vacate(h, now, backend.ChangeReleased, "")
		return nil
	}
	if h := e.find(g.RequestID); h != nil {
		h.closes = 0
		s.vacate(h, now, backend.ChangeReleased, "")
		return nil
	}
	if w := e.waiter(g.RequestID); w != nil {
		s.leave(w, now)
		return nil
	}
	return s.notHeld(d, g)
}

// end takes a hold from its holder, who is told the reason through his own network. Watchers are told what happened
// and why, in words.
func (s *Store) end(h *hold, now backend.Instant, reason backend.Reason, what backend.ChangeType, why string) {
	s.ended.add(h.token, reason)
	if lost, d := h.lost, h.driver; lost != nil {
		s.outbox = append(s.outbox, func() { d.pushLost(lost, reason) })
	}
	s.vacate(h, now, what, why)
}

// vacate ends a hold. For what is left of its minimum it goes on to keep the name closed.
func (s *Store) vacate(h *hold, now backend.Instant, what backend.ChangeType, why string) {
	s.last++
	s.record(h, what, why)
	if now < h.closes {
		h.vacant, h.metadata, h.lost = true, nil, nil
		s.setAlarm(&h.alarm, h.closes)
		return
	}
	s.drop(h, now)
}

// drop forgets a hold that is over, and lets those in who waited for that.
func (s *Store) drop(h *hold, now backend.Instant) {
	s.setAlarm(&h.alarm, 0)
	e, own := h.entry, h.claim
	e.removeHold(h)
	e.count(&own, -1)
	if own.tree {
		below := claim{use: belowOf(own.use)}
		eachAncestor(own.name, func(ancestor string) { s.names[ancestor].count(&below, -1) })
		eachAncestor(own.name, func(ancestor string) { s.settle(ancestor, now) })
	}
	s.settle(own.name, now)
}

// settle brings a name, whose holders or waiters changed, to rest: those first in its queue become holders, or nothing
// is left of it.
func (s *Store) settle(name string, now backend.Instant) {
	e := s.names[name]
	if e == nil {
		return
	}
	for i := 0; i < len(e.queue); {
		w := e.queue[i]
		if blocked := s.blocked(w.claims, w); blocked != nil {
			if u := blocked.use; blocked.name == name && (u == exclusive || u == permits) {
				break // nobody gets past it
			}
			i++
			continue
		}
		s.dequeue(w)
		a := answer{grants: make([]granted, len(w.requests))}
		for j := range w.requests {
			a.grants[j] = s.grant(&w.requests[j], now, w.driver, true).granted(now)
		}
		push := w.push
		s.outbox = append(s.outbox, func() { push(a) })
	}
	s.dropIdle(e)
}

// dequeue takes a waiter out of all queues.
func (s *Store) dequeue(w *waiter) {
	s.setAlarm(&w.alarm, 0)
	s.waitsUnder(w, false)
	for i := range w.claims {
		if e := s.names[w.claims[i].name]; e != nil {
			e.queue = slices.DeleteFunc(e.queue, func(other *waiter) bool { return other == w })
		}
	}
}

// leave takes out a waiter that gives up, and lets those in who stood behind it.
func (s *Store) leave(w *waiter, now backend.Instant) {
	s.dequeue(w)
	for i := range w.claims {
		s.settle(w.claims[i].name, now)
	}
}

// expire ends everything whose time has come.
func (s *Store) expire(now backend.Instant) {
	for len(s.alarms) > 0 && s.alarms[0].at <= now {
		al := s.alarms[0]
		s.setAlarm(al, 0)
		switch {
		case al.waiter != nil:
			push := al.waiter.push
			s.outbox = append(s.outbox, func() { push(answer{gone: true}) })
			s.leave(al.waiter, now)
		case al.hold.vacant:
			s.drop(al.hold, now)
		default:
			s.end(al.hold, now, backend.ReasonExpired, backend.ChangeExpired, "")
		}
	}
}

// unlock frees the store, then sends what piled up. Sending under the lock would let a callback that looks at the store
// block for ever.
func (s *Store) unlock() {
	out := s.outbox
	s.outbox = nil
	s.mu.Unlock()
	for _, send := range out {
		send()
	}
}

// notHeld tells why the hold that g names is gone, if the store remembers.
func (s *Store) notHeld(d *Driver, g *backend.Grant) error {
	reason := s.ended.reason(g.Token)
	if s.forgot(d) != nil {
		reason = backend.ReasonHistoryLost
	}
	return &backend.NotHeldError{Name: g.Name, Reason: reason}
}

// forgot says that the store knows nothing any more of what it told d, after a Wipe.
func (s *Store) forgot(d *Driver) error {
	if d.space == s.space {
		return nil
	}
	return &backend.HistoryError{What: "token space", Was: d.space, Now: s.space}
}
