package memory

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/btree"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
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

// Store is a lock service in memory: the lock machine of the bundled server, and the time, which the machine leaves to
// others. All methods are safe for concurrent use.
type Store struct {
	clock  backend.Clock
	steady bool

	mu      sync.Mutex // protects the following fields
	space   string     // of the tokens; another one after Wipe
	state   serverState
	inbox   []func() // requests that arrived while paused
	machine *machine.Machine
	command machine.Command // the one that apply carries out
	holds   map[fencing.Token]*hold
	waiters map[uint64]*waiter // by ticket
	ended   endings
	floor   uint64 // the revision up to which Compact has forgotten all events
	watches map[string][]*watch
	alarms  *btree.BTreeG[*alarm]
	alarmed uint64 // counts alarms
	timer   *time.Timer
	armed   backend.Instant // when the timer fires; zero: not armed
	outbox  []func()        // pushes to send once mu is free
	drivers []*Driver
}

// hold is what the store keeps of one hold besides what the machine does. Once it has ended it may go on to keep the
// name closed, for what is left of its minimum.
type hold struct {
	name, requestID string
	token           fencing.Token
	incarnation     string
	ttl             time.Duration
	since           backend.Instant
	expires         backend.Instant
	closes          backend.Instant // the end of the minimum; zero: none
	vacant          bool            // over, and only keeps the name closed
	queued          bool            // granted out of the queue
	lost            func(backend.Reason)
	driver          *Driver // whom lost belongs to
	alarm           alarm
}

// waiter is one set of requests that waits for all of its names at once.
type waiter struct {
	ticket   uint64
	requests []backend.Request
	driver   *Driver
	push     func(answer)
	alarm    alarm
}

// NewStore returns an empty store with a random token space.
func NewStore(o *StoreOptions) *Store {
	s := &Store{clock: backend.SystemClock(), watches: map[string][]*watch{}}
	if o != nil && o.Clock != nil {
		s.clock = o.Clock
	}
	s.steady = o != nil && o.Steady
	s.begin()
	return s
}

// Driver returns one more client of the store. The caller closes it.
func (s *Store) Driver() *Driver {
	d := &Driver{store: s, gate: kit.NewGate()}
	d.net.conn = make(chan struct{})
	s.mu.Lock()
	d.space = s.space
	s.drivers = append(s.drivers, d)
	s.mu.Unlock()
	return d
}

// Sessions of the machine. The store times each hold by itself, so one session has them all; a hold whose time is over
// moves to another one and ends with it.
var (
	everybody = machine.SessionID{1}
	expired   = machine.SessionID{2}
)

// begin makes the store an empty one, with a token space of its own.
func (s *Store) begin() {
	s.space = "memory-" + backend.NewRequestID()
	s.machine = machine.New(eventsKept)
	s.holds, s.waiters = map[fencing.Token]*hold{}, map[uint64]*waiter{}
	s.ended, s.alarms, s.floor = endings{}, newAlarms(), 0
	limits := machine.DefaultLimits()
	for _, l := range limits.All() {
		*l.Value = l.Most
	}
	s.apply(0, machine.Command{Op: machine.OpSetLimits, Limits: &limits}, "")
	s.apply(0, machine.Command{Op: machine.OpOpenSession, Session: everybody, TTL: maxTTL}, "")
}

// apply carries out c, and does to others what it brings about. Whoever loses a hold by it is told the reason, if there
// is one.
func (s *Store) apply(now backend.Instant, c machine.Command, reason backend.Reason) machine.Result {
	before := s.machine.Revision()
	s.command = c
	r, notices := s.machine.Apply(0, &s.command)
	for i := range notices {
		s.notice(now, &notices[i], reason)
	}
	s.wake(before)
	return r
}

func (s *Store) notice(now backend.Instant, n *machine.Notice, reason backend.Reason) {
	switch {
	case n.Type == machine.NoticeGranted:
		w := s.waiters[n.Ticket]
		s.forgetWaiter(w)
		a := answer{grants: make([]granted, len(n.Grants))}
		for i := range n.Grants {
			a.grants[i] = s.keep(now, w.driver, &w.requests[i], n.Grants[i].Token, true).granted(now)
		}
		s.outbox = append(s.outbox, func() { w.push(a) })
	case n.Type == machine.NoticeLingering:
		h := s.holds[n.Token]
		h.vacant, h.lost = true, nil
		s.setAlarm(&h.alarm, h.closes)
	case n.Type != machine.NoticeLost, n.Cause == machine.CauseMoved:
	case n.Ticket != 0:
		s.forgetWaiter(s.waiters[n.Ticket])
	default:
		if h := s.holds[n.Token]; !h.vacant {
			s.lose(h, reason)
			s.forget(h)
		}
	}
}

// keep makes the store time a hold that was granted now.
func (s *Store) keep(now backend.Instant, d *Driver, r *backend.Request, t fencing.Token, queued bool) *hold {
	h := &hold{
		name: r.Name, requestID: r.RequestID, token: t, incarnation: t.String(), ttl: r.TTL, since: now,
		expires: now.Add(r.TTL), queued: queued, lost: r.Lost, driver: d,
	}
	if r.MinHold > 0 {
		h.closes = now.Add(r.MinHold)
	}
	h.alarm = alarm{hold: h}
	s.holds[t] = h
	s.setAlarm(&h.alarm, h.expires)
	return h
}

func (s *Store) forget(h *hold) {
	s.setAlarm(&h.alarm, 0)
	delete(s.holds, h.token)
}

func (s *Store) forgetWaiter(w *waiter) {
	s.setAlarm(&w.alarm, 0)
	delete(s.waiters, w.ticket)
}

// lose tells the holder of h through his own network why it is gone, unless he gave it back.
func (s *Store) lose(h *hold, reason backend.Reason) {
	if reason == "" {
		return
	}
	s.ended.add(h.token, reason)
	if lost, d := h.lost, h.driver; lost != nil {
		s.outbox = append(s.outbox, func() { d.pushLost(lost, reason) })
	}
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

func (h *hold) granted(now backend.Instant) granted {
	return granted{
		token: h.token, incarnation: h.incarnation, ttl: h.ttl, queued: h.queued, minHold: max(0, h.closes.Sub(now)),
	}
}

// verdict says what became of a request at the store.
type verdict uint8

const (
	answered   verdict = iota
	queued             // the answer comes by push
	notServing         // the store is paused or stopped and has done nothing
)

// serve runs op at one moment of the store, if it is serving. A caller that read the clock just now passes what it
// read, since reading costs as much as granting; others pass zero.
func (s *Store) serve(now backend.Instant, op func(now backend.Instant)) verdict {
	s.mu.Lock()
	if s.state != serving {
		s.mu.Unlock()
		return notServing
	}
	if now.IsZero() {
		now = s.clock.Now()
	}
	s.expire(now)
	op(now)
	s.arm(now)
	s.unlock()
	return answered
}

// acquire grants all of rs, or answers why not if push is nil, or queues them. Requests that hold or wait already keep
// what they have, with a fresh TTL: that is what makes sending them again harmless.
func (s *Store) acquire(d *Driver, rs []backend.Request, now backend.Instant, push func(answer)) (a answer, v verdict) {
	waits := false
	v = s.serve(now, func(now backend.Instant) {
		if a.err = s.forgot(d); a.err == nil {
			a, waits = s.decide(now, d, rs, push)
		}
	})
	if waits {
		v = queued
	}
	return a, v
}

func (s *Store) decide(now backend.Instant, d *Driver, rs []backend.Request, push func(answer)) (answer, bool) {
	c := machine.Command{
		Op: machine.OpAcquire, Session: everybody, Requests: requestsOf(rs), Under: rs[0].Under, Wait: push != nil,
	}
	r := s.apply(now, c, "")
	if r.Code == machine.CodeConflict {
		// Some of a set that was granted before have ended. It is all or none, and its caller asks for all.
		for i := range rs {
			s.apply(now, machine.Command{Op: machine.OpRelease, Name: rs[i].Name, RequestID: rs[i].RequestID}, "")
		}
		r = s.apply(now, c, "")
	}
	switch {
	case r.Code == machine.CodeGranted:
		a := answer{grants: make([]granted, len(rs))}
		for i := range r.Grants {
			a.grants[i] = s.granted(now, d, &rs[i], r.Grants[i].Token)
		}
		return a, false
	case r.Code == machine.CodeQueued && push != nil:
		w := s.waiters[r.Ticket]
		if w == nil {
			w = &waiter{ticket: r.Ticket}
			w.alarm = alarm{waiter: w}
			s.waiters[r.Ticket] = w
		}
		w.requests, w.driver, w.push = rs, d, push
		// A waiter that stopped asking is dead. Its place ends like a hold would, or a queue of the dead would close
		// the name for one TTL each.
		s.setAlarm(&w.alarm, now.Add(rs[0].TTL))
		return answer{}, true
	}
	return answer{err: s.refusal(now, rs, &r)}, false
}

// granted prolongs the hold that r has, if it was granted before.
func (s *Store) granted(now backend.Instant, d *Driver, r *backend.Request, t fencing.Token) granted {
	h := s.holds[t]
	if h == nil {
		return s.keep(now, d, r, t, false).granted(now)
	}
	h.lost, h.driver = r.Lost, d
	s.prolong(now, h, r.TTL)
	return h.granted(now)
}

func (s *Store) prolong(now backend.Instant, h *hold, ttl time.Duration) {
	h.ttl = ttl
	h.expires = max(h.expires, now.Add(ttl))
	s.setAlarm(&h.alarm, h.expires)
}

func requestsOf(rs []backend.Request) []machine.Request {
	out := make([]machine.Request, len(rs))
	for i := range rs {
		r := &rs[i]
		out[i] = machine.Request{
			Name: r.Name, ID: r.RequestID, HoldID: r.HoldID, Owner: r.Owner, Kind: machine.Kind(r.Kind),
			Permits: uint32(r.Permits), Limit: uint32(r.Limit), Hierarchical: r.Hierarchical, MinHold: r.MinHold,
			Metadata: maps.Clone(r.Metadata),
		}
	}
	return out
}

// refusal is the answer to requests that were not granted.
func (s *Store) refusal(now backend.Instant, rs []backend.Request, r *machine.Result) error {
	switch r.Code {
	case machine.CodeHeld, machine.CodeQueued:
		return s.heldError(now, rs, r.Holder)
	case machine.CodeDeadlock:
		all := &backend.DeadlockError{}
		holds := r.Cycle[len(r.Cycle)-1].Name
		for i, b := range r.Cycle[1:] {
			all.Cycle = append(all.Cycle, backend.DeadlockEdge{Owner: r.Cycle[i].Owner, Holds: holds, Wants: b.Name})
			holds = b.Name
		}
		return all
	case machine.CodeMismatch:
		return fmt.Errorf("%w: %q", backend.ErrLimitMismatch, r.Detail)
	}
	return kit.InvalidOption(cmp.Or(r.Field, "request"), "of the request for "+fmt.Sprintf("%q", rs[0].Name), r.Detail)
}

// heldError tells who is in the way of rs. Nobody is who only keeps the name closed.
func (s *Store) heldError(now backend.Instant, rs []backend.Request, in *machine.Blocker) error {
	held := &backend.HeldError{Name: rs[0].Name}
	closed := rs[0].Name
	if in != nil {
		closed = in.Name
		for i := range rs {
			if name := rs[i].Name; name == closed || strings.HasPrefix(name, closed+"/") {
				held.Name = name
			}
		}
		if !in.Waits {
			held.Holder, held.HoldID = in.Owner, in.HoldID
		}
	}
	for _, h := range s.machine.Holder(closed).Holders {
		left := s.holds[h.Token].ends().Sub(now)
		if held.RetryAfter == 0 || left < held.RetryAfter {
			held.RetryAfter = left
		}
		if held.Holder == "" && !h.Lingering {
			held.Holder, held.HoldID = h.Owner, h.HoldID
		}
	}
	return held
}

// ends is when a hold stops to keep others out, unless it is renewed.
func (h *hold) ends() backend.Instant {
	if h.vacant {
		return h.closes
	}
	return max(h.expires, h.closes)
}

// find returns the living hold that g is, by request and by incarnation, never by name alone.
func (s *Store) find(d *Driver, g *backend.Grant) *hold {
	h := s.holds[g.Token]
	if h == nil || h.vacant || s.forgot(d) != nil ||
		h.name != g.Name || h.requestID != g.RequestID || h.incarnation != g.Incarnation {
		return nil
	}
	return h
}

// renew prolongs the holds it finds, and never makes one that it does not find.
func (s *Store) renew(d *Driver, grants []backend.Grant, out []error) verdict {
	return s.serve(0, func(now backend.Instant) {
		for i := range grants {
			h := s.find(d, &grants[i])
			if h == nil {
				out[i] = s.notHeld(d, &grants[i])
				continue
			}
			out[i] = nil
			s.prolong(now, h, grants[i].TTL)
		}
	})
}

// release ends the hold that g names. If g names a request only (Request.Grant), it ends whatever that request has, and
// no minimum applies, since nobody ran under it. A wait for several names ends as a whole.
func (s *Store) release(d *Driver, g *backend.Grant) (v verdict, err error) {
	v = s.serve(0, func(now backend.Instant) {
		c := machine.Command{Op: machine.OpRelease, Name: g.Name, RequestID: g.RequestID, Token: g.Token}
		there := s.forgot(d) == nil
		if g.Token != 0 || g.Incarnation != "" {
			h := s.find(d, g)
			there = h != nil
			c.Linger = there && now < h.closes
		}
		if !there || s.apply(now, c, "").Code != machine.CodeOK {
			err = s.notHeld(d, g)
		}
	})
	return v, err
}

// living returns the holds of a name that are not over.
func (s *Store) living(name string) []*hold {
	var living []*hold
	for _, h := range s.machine.Holder(name).Holders {
		if !h.Lingering {
			living = append(living, s.holds[h.Token])
		}
	}
	return living
}

// forceRelease takes a name from all of its holders, whatever minimum they asked for. It reports whether there was one.
func (s *Store) forceRelease(now backend.Instant, name, by, why string, reason backend.Reason) bool {
	if len(s.living(name)) == 0 {
		return false
	}
	s.apply(now, machine.Command{Op: machine.OpForceRelease, Name: name, Reason: why, By: by}, reason)
	return true
}

// over ends a hold as its TTL does.
func (s *Store) over(now backend.Instant, h *hold) {
	s.lose(h, backend.ReasonExpired)
	s.apply(now, machine.Command{Op: machine.OpOpenSession, Session: expired, TTL: maxTTL}, "")
	s.apply(now, machine.Command{
		Op: machine.OpMove, Session: expired, Name: h.name, RequestID: h.requestID, Token: h.token,
	}, "")
	linger := now < h.closes
	if !linger {
		s.forget(h)
	}
	s.apply(now, machine.Command{Op: machine.OpExpire, Session: expired, Linger: linger}, "")
}

// expire ends everything whose time has come.
func (s *Store) expire(now backend.Instant) {
	for {
		al, some := s.alarms.Min()
		if !some || al.at > now {
			return
		}
		s.setAlarm(al, 0)
		switch h, w := al.hold, al.waiter; {
		case w != nil:
			s.outbox = append(s.outbox, func() { w.push(answer{gone: true}) })
			s.leave(now, w)
		case h.vacant:
			s.forget(h)
			s.apply(now, machine.Command{Op: machine.OpFree, Name: h.name, Token: h.token}, "")
		default:
			s.over(now, h)
		}
	}
}

// leave takes a waiter out of all queues.
func (s *Store) leave(now backend.Instant, w *waiter) {
	s.apply(now, machine.Command{Op: machine.OpCancelWait, Name: w.requests[0].Name, RequestID: w.requests[0].RequestID}, "")
}

// waiting returns those who wait, by arrival; with a name, those who wait for that.
func (s *Store) waiting(name string) []*waiter {
	var found []*waiter
	for _, ticket := range slices.Sorted(maps.Keys(s.waiters)) {
		w := s.waiters[ticket]
		if name == "" || slices.ContainsFunc(w.requests, func(r backend.Request) bool { return r.Name == name }) {
			found = append(found, w)
		}
	}
	return found
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
