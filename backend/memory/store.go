package memory

// The store: the lock machine, and around it what the machine leaves to others. The machine decides who gets what; it
// measures no time, and tells by notices what a command did to others than who sent it. The store times each hold and
// each waiter, and turns notices into messages.
//
// Locks. Store.mu protects all of it. Nothing is sent and no function of a caller runs under it: what is to be sent is
// put into the outbox, and unlock sends it. So no mutex of a driver or of a network is ever taken under Store.mu, and a
// holder that is told of a loss may call the store.

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
	"github.com/fencelock/fencelock/internal/machine"
)

// Options are the settings of New and NewStore. The zero value, or nil, means defaults.
type Options struct {
	// Clock by which the store ends holds, and by which its drivers report instants. Default backend.SystemClock();
	// backend.GoClock() under testing/synctest. The store finds ends that the clock has passed on each call, and
	// sleeps by package time's timers between calls.
	Clock backend.Clock
}

// Store is a lock service in memory: the lock machine of the bundled server, and the time, which the machine leaves to
// others. All methods are safe for concurrent use.
//
// A store has no goroutine, and one timer, which is set while anything can end. There is nothing to close.
type Store struct {
	clock backend.Clock

	mu sync.Mutex // protects the following fields
	// space is the token space; another one after Wipe.
	space string
	// state is what Pause, Stop and the like have made of the server.
	state serverState
	// inbox has the requests that arrived while the server was paused, in order. Stop empties it, and nobody answers
	// them: the broken connection tells their callers.
	inbox []func()
	// machine is replaced by Wipe; all else that is kept by token or ticket belongs to one machine.
	machine *machine.Machine
	// claims are by number, and due has the same in the order in which they end.
	claims map[uint64]*claim
	due    *btree.BTreeG[*claim]
	// timer runs tick. It is nil before the first claim, and never stopped; armed is when it fires, or zero.
	timer *time.Timer
	armed backend.Instant
	// endings is a ring, at the place that the order of the token says: a later token overwrites an older one.
	endings [endingsKept]ending
	// floor is the revision up to which Compact has forgotten all events.
	floor uint64
	// watches are by name. A name without watches has no entry, so that wake can tell at once that nobody listens.
	watches map[string][]*watch
	// outbox is what to send once mu is free. The answer to a request comes after all that the request has brought
	// about.
	outbox []func()
	// drivers are those whose connections Stop breaks. Driver.Close takes its own out.
	drivers []*Driver
}

// eventsKept is how many events of all names together the store keeps for watchers, and how many of one name it keeps
// for a watch that is slow.
const eventsKept = 4096

// NewStore returns an empty store with a random token space.
//
// Contenders in one test share it:
//
//	store := memory.NewStore(&memory.Options{Clock: backend.GoClock()}) // under testing/synctest
//	a, b := store.Driver(), store.Driver()
func NewStore(o *Options) *Store {
	s := &Store{clock: backend.SystemClock(), watches: map[string][]*watch{}}
	if o != nil && o.Clock != nil {
		s.clock = o.Clock
	}
	s.begin()
	return s
}

// Driver returns one more client of the store. The caller closes it.
//
// A driver that is not closed costs memory, for as long as the store lives. It is bound to the store as it is now:
// after Wipe it is refused, and another one has to be made.
func (s *Store) Driver() *Driver {
	d := &Driver{store: s, gate: kit.NewGate()}
	d.net.conn = make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	d.space = s.space
	s.drivers = append(s.drivers, d)
	return d
}

// Sessions of the machine. The store times each hold by itself, so one session has them all; a hold whose time is over
// moves to another one and ends with it. A session for each hold would do the same with two commands more for each
// lock.
var (
	everybody = machine.SessionID{1}
	expired   = machine.SessionID{2}
)

// begin makes the store an empty one, with a token space of its own. The limits are the widest that the machine knows:
// they protect a server from its clients, and here both are one process. The caller holds s.mu, or has the store alone.
func (s *Store) begin() {
	s.space = "memory-" + backend.NewRequestID()
	s.machine, s.floor = machine.New(eventsKept), 0
	s.claims, s.due = map[uint64]*claim{}, newAlarms()
	s.endings = [endingsKept]ending{}
	limits := machine.DefaultLimits()
	for _, l := range limits.All() {
		*l.Value = l.Most
	}
	s.apply(0, machine.Command{Op: machine.OpSetLimits, Limits: &limits})
	s.apply(0, machine.Command{Op: machine.OpOpenSession, Session: everybody, TTL: maxTTL})
}

// apply carries out c, and does to others what it brings about. The machine's stamps are the store's instants, so what
// it tells of times is subtracted from instants and never from the time of day. The caller holds s.mu.
func (s *Store) apply(now backend.Instant, c machine.Command) machine.Result {
	before := s.machine.Revision()
	r, notices := s.machine.Apply(int64(now), &c)
	for i := range notices {
		s.notice(now, &notices[i])
	}
	s.wake(before)
	return r
}

// notice does to one holder or waiter what a command has done to it. The caller holds s.mu.
//
//	granted                the holds are timed from now on, and the waiter is told to ask
//	lingering              the name is freed when the minimum is over
//	lost                   forgotten: a waiter notices when it asks again, and lose has told a holder
//	lost, because moved    nothing: end has moved it, and goes on
//
// A grant carries no token to the waiter. It asks for it, so that the validity counts from a request of its own,
// however long it has waited.
func (s *Store) notice(now backend.Instant, n *machine.Notice) {
	c := s.claims[max(n.Ticket, n.Token.Order())]
	switch {
	case c == nil:
	case n.Type == machine.NoticeGranted:
		s.forget(c)
		for _, g := range n.Grants { // in the order of who asked first, and c.requests in that of who asked last
			i := slices.IndexFunc(c.requests, func(r backend.Request) bool { return r.Name == g.Name })
			s.keep(now, c.driver, c.requests[i:i+1], 0, g.Token).queued = true
		}
		s.outbox = append(s.outbox, c.ring)
	case n.Type == machine.NoticeLingering:
		c.lingers = true
		s.schedule(c, c.closes)
	case n.Type == machine.NoticeLost && n.Cause != machine.CauseMoved && !c.lingers:
		s.forget(c)
	}
}

// acquire grants all of rs, or says why not, or queues them and answers neither. ring is nil if they do not wait.
// Requests that hold or wait already keep what they have, with a fresh TTL: that is what makes sending them again
// harmless.
//
// Grants come in the order of rs. The caller holds s.mu; the driver's copy of rs is kept, and must not be changed
// later.
func (s *Store) acquire(now backend.Instant, d *Driver, rs []backend.Request, ring func()) ([]backend.Grant, error) {
	if err := s.forgot(d); err != nil {
		return nil, err
	}
	c := machine.Command{
		Op: machine.OpAcquire, Session: everybody, Requests: requestsOf(rs), Under: rs[0].Under, Wait: ring != nil,
	}
	r := s.apply(now, c)
	if r.Code == machine.CodeConflict {
		// Some of a set that was granted before have ended. It is all or none, and its caller asks for all.
		for i := range rs {
			s.apply(now, machine.Command{Op: machine.OpRelease, Name: rs[i].Name, RequestID: rs[i].RequestID})
		}
		r = s.apply(now, c)
	}
	switch {
	case r.Code == machine.CodeGranted:
		grants := make([]backend.Grant, len(rs))
		for i := range rs {
			h := s.keep(now, d, rs[i:i+1], 0, r.Grants[i].Token)
			grants[i] = rs[i].Grant()
			grants[i].Token, grants[i].Incarnation = h.token, h.token.String()
			grants[i].Queued, grants[i].MinHoldUntil = h.queued, h.closes
		}
		return grants, nil
	case r.Code == machine.CodeQueued && ring != nil:
		s.keep(now, d, rs, r.Ticket, 0).ring = ring
		return nil, nil
	}
	return nil, s.refusal(now, rs, &r)
}

// requestsOf is rs in the machine's words. It copies the metadata, which the machine keeps and callers may change.
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
//
// A cycle comes from the machine as who is in the way of whom. The contract wants for each owner what it holds and what
// it wants: it holds what the one before wants, and the first holds what the last is about. The caller holds s.mu.
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

// heldError tells who is in the way of rs. A hold that only keeps the name closed is nobody's.
//
// RetryAfter is the shortest time after which one of the holders may be gone: more than one of them may have to go
// first, and waiters may come before, so it is a hint. in is nil where the machine names nobody; then the first name is
// meant. The caller holds s.mu.
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
		c := s.claims[h.Token.Order()]
		left := max(c.due, c.closes).Sub(now)
		if held.RetryAfter == 0 || left < held.RetryAfter {
			held.RetryAfter = left
		}
		if held.Holder == "" && !c.lingers {
			held.Holder, held.HoldID = h.Owner, h.HoldID
		}
	}
	return held
}

// renew prolongs a hold, and never makes one that it does not find. The caller holds s.mu.
func (s *Store) renew(now backend.Instant, d *Driver, g *backend.Grant) error {
	h := s.find(d, g)
	if h == nil {
		return s.notHeld(d, g)
	}
	s.prolong(now, h, g.TTL)
	return nil
}

// release ends the hold that g names. If g names a request only (Request.Grant), it ends whatever that request has, and
// no minimum applies, since nobody ran under it. A wait for several names ends as a whole.
//
// The name alone would not do: the request may have been granted anew since, or another may hold the name. The caller
// holds s.mu.
func (s *Store) release(now backend.Instant, d *Driver, g *backend.Grant) error {
	c := machine.Command{Op: machine.OpRelease, Name: g.Name, RequestID: g.RequestID, Token: g.Token}
	there := s.forgot(d) == nil
	if g.Token != 0 || g.Incarnation != "" {
		h := s.find(d, g)
		there = h != nil
		c.Linger = there && now < h.closes
	}
	if !there || s.apply(now, c).Code != machine.CodeOK {
		return s.notHeld(d, g)
	}
	return nil
}

// forceRelease takes a name from all of its holders, whatever minimum they asked for, and tells them the reason. It
// reports whether there was one.
//
// by and why are what watchers are told. The caller holds s.mu.
func (s *Store) forceRelease(now backend.Instant, name, by, why string, reason backend.Reason) bool {
	held := s.held(name)
	for _, h := range held {
		s.lose(h, reason)
	}
	if len(held) > 0 {
		s.apply(now, machine.Command{Op: machine.OpForceRelease, Name: name, Reason: why, By: by})
	}
	return len(held) > 0
}

// forgot is a *backend.HistoryError if the store has been wiped since d was made, and nil otherwise. The caller holds
// s.mu.
func (s *Store) forgot(d *Driver) error {
	if d.space == s.space {
		return nil
	}
	return &backend.HistoryError{What: "token space", Was: d.space, Now: s.space}
}
