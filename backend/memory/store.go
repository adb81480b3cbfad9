package memory

import (
	"maps"
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

// forceRelease takes a name from all of its holders, whatever minimum they asked for. It reports whether there was one.
func (s *Store) forceRelease(now backend.Instant, name, by, why string, reason backend.Reason) bool {
	if len(s.living(name)) == 0 {
		return false
	}
	s.apply(now, machine.Command{Op: machine.OpForceRelease, Name: name, Reason: why, By: by}, reason)
	return true
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
