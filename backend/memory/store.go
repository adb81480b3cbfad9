package memory

// The store: the lock machine, and its surroundings. The machine decides who gets a lock; it measures no time, and
// reports the effects of a command on other clients by notices. The store times each hold and each waiter, and turns
// notices into messages.
//
// Locks. Store.mu protects all of it. Messages are not sent and no function of a caller runs under it: messages go into
// the outbox, and unlock sends them. So no mutex of a driver or of a network is ever taken under Store.mu, and a holder
// that is notified of a loss may call the store.

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/btree"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/principal"
)

// Options are the settings of New and NewStore. The zero value, or nil, means defaults.
type Options struct {
	// Clock by which the store ends holds, and by which its drivers report instants. Default backend.SystemClock();
	// backend.GoClock() under testing/synctest. The store finds ends that the clock has passed on each call, and
	// sleeps by package time's timers between calls.
	Clock backend.Clock
	// Chance returns numbers from 0 up to, and not including, 1, by which drivers spread the times of their
	// retries. Default: random numbers. A test that replays exactly sets it.
	Chance func() float64
}

// Store is a lock service in memory: the lock machine of the bundled server, and the time, which the machine leaves to
// others. All methods are safe for concurrent use.
//
// A store has no goroutine, and one timer, which is set while a claim can end. It need not be closed.
type Store struct {
	clock  backend.Clock
	chance func() float64
	// origin is the time of day of the clock's instant zero.
	origin time.Time

	mu sync.Mutex // protects the following fields
	// space is the token space; another one after Wipe.
	space string
	// state is set by Pause, Stop and the like.
	state serverState
	// refuses is set by Refuse.
	refuses Refusal
	// inbox has the requests that arrived while the server was paused, in order. Stop empties it, and the requests are
	// not answered: their callers get the error of the broken connection.
	inbox []func()
	// machine is replaced by Wipe; all other entries by token or ticket belong to one machine.
	machine *machine.Machine
	// claims are by number, and due has the same in the order in which they end.
	claims map[uint64]*claim
	due    *btree.BTreeG[*claim]
	// timer runs tick. It is nil before the first claim, and never stopped; armed is when it fires, or zero.
	timer *time.Timer
	armed backend.Instant
	// endings is a ring, at the place given by the order of the token: a later token overwrites an older one.
	endings [endingsKept]ending
	// floor is the revision up to which Compact has forgotten all events.
	floor uint64
	// watches are by name. A name without watches has no entry, so that wake immediately knows that there are no
	// listeners.
	watches map[string][]*watch
	// outbox has the messages to send once mu is free. The answer to a request comes after all effects of the
	// request.
	outbox []func()
	// clients are the clients with connections that Stop breaks, until their Close.
	clients []*client
}

// eventsKept is the number of events, of all names together, that the store keeps for watchers, and the number for one
// name that it keeps for a slow watch.
const eventsKept = 4096

// NewStore returns an empty store with a random token space.
//
// Contenders in one test share it:
//
//	store := memory.NewStore(&memory.Options{Clock: backend.GoClock()}) // under testing/synctest
//	a, b := store.Driver(), store.Driver()
func NewStore(o *Options) *Store {
	s := &Store{clock: backend.SystemClock(), chance: rand.Float64, watches: map[string][]*watch{}}
	if o != nil && o.Clock != nil {
		s.clock = o.Clock
	}
	if o != nil && o.Chance != nil {
		s.chance = o.Chance
	}
	s.origin = time.Now().Round(0).Add(-time.Duration(s.clock.Now()))
	s.begin()
	return s
}

// Sessions of the machine. The store times each hold, so one session has them all; a due hold
// moves to another one and ends with it. A session for each hold would do the same with two commands more for each
// lock.
var (
	everybody = machine.SessionID{1}
	expired   = machine.SessionID{2}
)

// begin empties the store and gives it a new token space. The limits are the widest that the machine knows:
// they protect a server from its clients, and here both are one process. The caller holds s.mu, or has the store alone.
func (s *Store) begin() {
	s.space = "memory-" + backend.NewRequestID()
	s.machine = machine.New(eventsKept)
	limits := machine.DefaultLimits()
	for _, l := range limits.All() {
		*l.Value = l.Most
	}
	s.apply(0, machine.Command{Op: machine.OpSetLimits, Limits: &limits})
	s.apply(0, machine.Command{Op: machine.OpRaiseLevel, Level: machine.MaxLevel})
	s.empty()
}

// empty makes the store one of a machine without holds. The caller holds s.mu, or has the store alone.
func (s *Store) empty() {
	s.floor = s.machine.Revision()
	s.claims, s.due = map[uint64]*claim{}, newAlarms()
	s.endings = [endingsKept]ending{}
	s.apply(0, machine.Command{Op: machine.OpOpenSession, Session: everybody, TTL: maxTTL})
}

// apply carries out c, and passes its effects on to others. The machine's stamps are the store's instants, so its times
// are subtracted from instants and never from the time of day. The caller holds s.mu.
func (s *Store) apply(now backend.Instant, c machine.Command) machine.Result {
	before := s.machine.Revision()
	r, notices := s.machine.Apply(int64(now), &c)
	for i := range notices {
		s.notice(now, &notices[i])
	}
	s.wake(before)
	return r
}

// notice applies the effect of a command to one holder or waiter. The caller holds s.mu.
//
//	granted                the holds are timed from now on, and the waiter is notified to ask
//	lingering              the name is freed when the minimum is over
//	lost                   forgotten: a waiter notices with its next request, and lose has notified a holder
//	lost, because moved    no effect: end has moved it, and continues
//
// A grant carries no token to the waiter. It asks for it, so that the validity counts from its own request, however
// long it has waited.
func (s *Store) notice(now backend.Instant, n *machine.Notice) {
	c := s.claims[max(n.Ticket, n.Token.Order())]
	switch {
	case c == nil:
	case n.Type == machine.NoticeGranted:
		s.forget(c)
		for _, g := range n.Grants { // in the order of who asked first, and c.requests in that of who asked last
			i := slices.IndexFunc(c.requests, func(r backend.Request) bool { return r.Name == g.Name })
			s.keep(now, c.client, c.requests[i:i+1], 0, g.Token).queued = true
		}
		s.notifyTurn(c)
	case n.Type == machine.NoticeLingering:
		c.lingers = true
		s.schedule(c, c.closes)
	case n.Type == machine.NoticeLost && n.Cause != machine.CauseMoved && !c.lingers:
		s.forget(c)
	}
}

// enter grants all of rs, queues them, or returns the reason why not. Requests that hold or wait already keep their
// hold or place, with a fresh TTL: that makes repetitions harmless.
//
// Positions come in the order of rs. The store keeps rs, which must not be changed later. The caller holds s.mu.
func (s *Store) enter(now backend.Instant, by *client, rs []backend.Request) ([]engine.Position, error) {
	if err := s.forgot(by); err != nil {
		return nil, err
	}
	c := machine.Command{
		Op: machine.OpAcquire, Session: everybody, Requests: requestsOf(rs), Under: rs[0].Under, Wait: rs[0].Wait,
	}
	r := s.apply(now, c)
	if r.Code == machine.CodeConflict {
		// Some holds of a set granted before have ended. A set is granted as a whole, and its caller asks for all.
		for i := range rs {
			s.apply(now, machine.Command{Op: machine.OpRelease, Name: rs[i].Name, RequestID: rs[i].RequestID})
		}
		r = s.apply(now, c)
	}
	switch r.Code {
	case machine.CodeGranted:
		all := make([]engine.Position, len(rs))
		for i := range rs {
			h := s.keep(now, by, rs[i:i+1], 0, r.Grants[i].Token)
			all[i] = engine.Position{
				Held: true, Token: h.token, Nonce: h.nonce, Incarnation: h.token.String(), MinHoldUntil: h.closes,
				Queued: h.queued,
			}
		}
		return all, nil
	case machine.CodeQueued:
		s.keep(now, by, rs, r.Ticket, 0).waits = true
		return []engine.Position{{Placed: true, Holder: s.heldError(now, rs, r.Holder)}}, nil
	case machine.CodeHeld:
		return []engine.Position{{Holder: s.heldError(now, rs, r.Holder)}}, nil
	default:
		return nil, s.refusal(rs, &r)
	}
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

// refusal is the error for requests that can be neither granted nor queued.
//
// A cycle comes from the machine as a chain of blockers. The contract names for each owner the lock that it holds and
// the lock that it wants: it holds the lock that its predecessor wants, and the first holds the lock of the last.
func (s *Store) refusal(rs []backend.Request, r *machine.Result) error {
	switch r.Code {
	case machine.CodeDeadlock:
		all := &backend.DeadlockError{}
		holds := r.Cycle[len(r.Cycle)-1].Name
		for i, b := range r.Cycle[1:] {
			all.Cycle = append(all.Cycle, backend.DeadlockEdge{Owner: r.Cycle[i].Owner, Holds: holds, Wants: b.Name})
			holds = b.Name
		}
		return all
	case machine.CodeMismatch:
		mismatch := &backend.LimitError{Name: r.Detail}
		for _, h := range s.machine.Holder(r.Detail).Holders {
			mismatch.Kind, mismatch.Limit, mismatch.Holder = backend.Kind(h.Kind), int(h.Limit), h.Owner
		}
		return mismatch
	default:
		return kit.InvalidOption(cmp.Or(r.Field, "request"), fmt.Sprintf("of the request for %q", rs[0].Name), r.Detail)
	}
}

// heldError names the holder that blocks rs. A hold that only keeps the name closed has no holder.
//
// RetryAfter is the shortest time after which one of the holders may be gone: more than one of them may have to go
// first, and waiters may come before, so it is a hint. in is nil if the machine names no holder; then the first name
// is meant. The caller holds s.mu.
func (s *Store) heldError(now backend.Instant, rs []backend.Request, in *machine.Blocker) *backend.HeldError {
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

// leave ends the hold that g names. If g names a request only (Request.Grant), it ends the hold or place of that
// request, and no minimum applies, since no work ran under it: a hold that expired meanwhile no longer keeps the name
// closed. A wait for several names ends as a whole. The caller holds s.mu.
func (s *Store) leave(now backend.Instant, by *client, g *backend.Grant) engine.Left {
	c := machine.Command{Op: machine.OpRelease, Name: g.Name, RequestID: g.RequestID, Token: g.Token}
	there := s.forgot(by) == nil
	if g.Token != 0 || g.Incarnation != "" {
		h := s.find(by, g)
		there = h != nil
		c.Linger = there && now < h.closes
	} else if there {
		for _, h := range s.machine.Holder(g.Name).Holders {
			if h.Lingering && h.RequestID == g.RequestID {
				s.end(now, s.claims[h.Token.Order()])
			}
		}
	}
	if !there || s.apply(now, c).Code != machine.CodeOK {
		return engine.Left{Loss: s.loss(by, g)}
	}
	return engine.Left{Was: true}
}

// forceRelease ends the holds that r names, whatever their minimum, and notifies them of the reason. It
// returns how many there were. The caller holds s.mu.
func (s *Store) forceRelease(now backend.Instant, r *backend.ForceRequest, reason backend.Reason) int {
	held := s.held(r.Name)
	held = slices.DeleteFunc(held, func(h *claim) bool { return !r.Matches(h.nonce, h.token) })
	loss := backend.Loss{Reason: reason}
	if reason == backend.ReasonForceReleased {
		loss.Text, loss.By, loss.Principal = r.Reason, r.By, r.Principal
	}
	for _, h := range held {
		s.lose(h, loss)
	}
	c := machine.Command{Op: machine.OpForceRelease, Name: r.Name, Reason: r.Reason, By: r.By, Principal: principal.Principal(r.Principal)}
	switch {
	case len(held) == 0:
	case !r.Conditional():
		s.apply(now, c)
	default:
		for _, h := range held {
			c.Token = h.token
			s.apply(now, c)
		}
	}
	return len(held)
}

// forgot is a *backend.HistoryError if the store has been wiped since the client was made, and nil otherwise. The
// caller holds s.mu.
func (s *Store) forgot(c *client) error {
	if c.space == s.space {
		return nil
	}
	return &backend.HistoryError{What: "token space", Was: c.space, Now: s.space}
}

// stateOf returns the state of a name for callers. Lingering holds, which only keep the name closed, are omitted,
// because they have no holder. The caller holds s.mu.
//
// The store counts instants of its clock and people read the time of day, see timeOf. The metadata is copied: the
// machine's own must not reach a caller, who may write to it.
func (s *Store) stateOf(now backend.Instant, info *machine.Info) backend.State {
	state := backend.State{Name: info.Name, Waiters: info.Waiters, Revision: info.Revision}
	for i := range info.Holders {
		h := &info.Holders[i]
		c := s.claims[h.Token.Order()]
		if c.lingers {
			continue
		}
		state.Held = true
		state.Holders = append(state.Holders, backend.Holder{
			Owner: h.Owner, HoldID: h.HoldID, Kind: backend.Kind(h.Kind), Permits: int(h.Permits), Limit: int(h.Limit),
			Token: h.Token, Nonce: c.nonce, Since: s.timeOf(h.Since), ExpiresIn: c.due.Sub(now),
			Metadata: maps.Clone(h.Metadata),
		})
	}
	for i := range info.Queue {
		w := &info.Queue[i]
		state.Queue = append(state.Queue, backend.Waiter{
			Owner: w.Owner, HoldID: w.HoldID, Kind: backend.Kind(w.Kind), Permits: int(w.Permits), Limit: int(w.Limit),
			Since: s.timeOf(w.Since),
		})
	}
	return state
}

// timeOf returns the time of day of a stamp of the machine, for people. It is the same each time, even if the time of
// day was set meanwhile.
func (s *Store) timeOf(stamp int64) time.Time { return s.origin.Add(time.Duration(stamp)) }
