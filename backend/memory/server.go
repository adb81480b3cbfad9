package memory

// Trouble of the server: the actions of operators, and outages. Each function acts at one moment of the store, between
// two requests, and has happened when it returns; only its effects at drivers take as long as their networks do.

import (
	"bytes"
	"maps"
	"math"
	"slices"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Refusal selects the calls that Refuse has the server refuse.
type Refusal uint8

const (
	// RefuseNothing ends a refusal.
	RefuseNothing Refusal = iota
	// RefuseReleases: Release is refused, as by a service in which the client has lost the right to delete.
	RefuseReleases
	// RefuseWrites: all changes of locks are refused, as by a read-only database.
	RefuseWrites
)

// Refuse has the server answer calls with backend.ErrMisconfigured instead of carrying them out, until its next call.
// Time passes: holds end.
func (s *Store) Refuse(what Refusal) {
	s.lock()
	defer s.unlock()
	s.refuses = what
}

// refused returns the answer to a call that needs the right to do what.
func (s *Store) refused(what Refusal) error {
	if s.refuses < what || s.refuses == RefuseNothing {
		return nil
	}
	return &backend.ConfigError{Setting: "Store.Refuse", Value: "refuses", Want: "RefuseNothing", Why: "a test asked for it"}
}

// serverState is the state of the server after an operator's action or an outage.
type serverState uint8

const (
	// serving: requests are executed, and holds end.
	serving serverState = iota
	// paused: requests are kept in the inbox, and no hold ends.
	paused
	// stopped: requests are refused. Holds due meanwhile end with Start.
	stopped
)

// Pause freezes the server: requests arrive and are not answered, nothing expires, and callers wait until their
// contexts end. Resume continues, and serves the requests that arrived meanwhile, in order. Time passes meanwhile:
// holds that are due end with Resume, before any request is served. Pause has no effect on a stopped server.
func (s *Store) Pause() {
	s.lock()
	defer s.unlock()
	if s.state == serving {
		s.state = paused
	}
}

// Resume ends Pause, and has no effect otherwise.
func (s *Store) Resume() { s.goOn(paused) }

// Stop ends the server: connections break, and calls answer backend.ErrUnavailable until Start. Its holds are kept as
// if on disk, and time passes for it; places in queues are lost.
//
// Requests that arrived during Pause are dropped, and had no effect. Waiters retry once they reach the server, and
// stand at the end of the queue then.
func (s *Store) Stop() {
	now := s.lock()
	defer s.unlock()
	s.state, s.inbox = stopped, nil
	for _, w := range s.waiting("") {
		s.end(now, w)
	}
	for _, c := range s.clients {
		s.outbox = append(s.outbox, c.net.Reset)
	}
}

// Start ends Stop, and has no effect otherwise. Holds due meanwhile end first, and their holders are notified.
func (s *Store) Start() { s.goOn(stopped) }

// Restart is Stop and Start: holds and the counter of tokens stay, connections and places in queues do not.
func (s *Store) Restart() {
	s.Stop()
	s.Start()
}

// goOn goes back to work, if the server is in that state, and serves the requests that arrived meanwhile. It is sent
// from the outbox, without s.mu, so a request that arrives at this moment may come before the kept ones.
func (s *Store) goOn(from serverState) {
	s.lock()
	defer s.unlock()
	if s.state == from {
		s.state = serving
		s.expire()
		s.outbox, s.inbox = append(s.outbox, s.inbox...), nil
	}
}

// Evict deletes the holds of name behind their holders' backs, as an eviction or a careless administrator does,
// whatever their minimum. It reports whether there was one. Waiters stay; the first of them gets the name.
// Watchers see the holds released, with backend.ReasonEvicted as the reason.
func (s *Store) Evict(name string) bool {
	now := s.lock()
	defer s.unlock()
	r := backend.ForceRequest{Name: name, By: byEviction, Reason: string(backend.ReasonEvicted)}
	return s.forceRelease(now, &r, backend.ReasonEvicted) > 0
}

// byEviction marks an eviction in the machine's event, without a caller of ForceRelease: changeOf knows it by that.
const byEviction = "eviction"

// Expire ends the holds of name, whatever their minimum, as if their TTLs had passed: their holders get
// backend.ReasonExpired. It reports whether there was one.
//
// A holder behind a held network is not notified; its renewals and its release then are a *backend.NotHeldError.
func (s *Store) Expire(name string) bool {
	now := s.lock()
	defer s.unlock()
	held := s.held(name) // later holders of the name are spared
	for _, h := range held {
		h.closes = 0
		s.end(now, h)
	}
	return len(held) > 0
}

// EvictWaiters deletes the places in the queue of name behind the waiters' backs, without a notification. It returns
// how many there were. A waiter's next request, which drivers send now and then, gets a new place.
func (s *Store) EvictWaiters(name string) int {
	now := s.lock()
	defer s.unlock()
	waiting := s.waiting(name)
	for _, w := range waiting {
		s.end(now, w)
	}
	return len(waiting)
}

// Wipe deletes everything that the store keeps, the counter of tokens and their space included: as if another server,
// an empty one, had taken the place of this one. Drivers from before notice. Their holds end with
// backend.ReasonHistoryLost, their waiters and watches, and their acquires from then on, with backend.ErrHistoryLost.
// Later drivers find an empty store, which restarts its count in its own token space.
func (s *Store) Wipe() {
	s.lock()
	defer s.unlock()
	s.endAll(backend.ReasonHistoryLost)
	s.begin()
	for _, name := range slices.Sorted(maps.Keys(s.watches)) {
		for _, w := range s.watches[name] {
			s.outbox = append(s.outbox, w.wake)
		}
	}
}

// endAll ends every hold for a reason, and wakes the waiters. The caller holds s.mu, and makes another machine.
func (s *Store) endAll(reason backend.Reason) {
	for _, number := range slices.Sorted(maps.Keys(s.claims)) {
		switch c := s.claims[number]; {
		case c.waits:
			s.notifyTurn(c)
		case !c.lingers:
			s.lose(c, backend.Loss{Reason: reason})
		}
	}
}

// Ahead makes every later token greater than token, as in a service that has counted for years. All holds end.
func (s *Store) Ahead(token fencing.Token) error {
	s.lock()
	defer s.unlock()
	var snapshot bytes.Buffer
	if _, err := s.machine.Freeze().WriteTo(&snapshot); err != nil {
		return err
	}
	s.endAll(backend.ReasonEvicted)
	if _, err := s.machine.RestoreBackup(&snapshot, uint64(token)); err != nil {
		return err
	}
	s.empty()
	return nil
}

// Compact forgets all events so far, as if that many others had happened since. Watches that have not read all of them
// end with backend.ErrCompacted.
func (s *Store) Compact() {
	s.lock()
	defer s.unlock()
	s.floor = s.machine.Revision()
	for _, watches := range s.watches {
		for _, w := range watches {
			w.overrun = w.overrun || len(w.news) > 0
		}
	}
}

// Names returns how many names are held, closed by a minimum hold, or waited for.
func (s *Store) Names() int {
	s.lock()
	defer s.unlock()
	names, _ := s.machine.List("", "", math.MaxInt)
	return len(names)
}

// handle runs op at one moment of the store, as soon as the server serves, and answers with its error; if the server
// is down, the answer is backend.ErrUnavailable, and op was not run. reply is called without s.mu, and after all
// messages of op have been sent.
func (s *Store) handle(op func(now backend.Instant) error, reply func(error)) {
	now := s.lock()
	defer s.unlock()
	err := backend.ErrUnavailable
	switch s.state {
	case paused:
		s.inbox = append(s.inbox, func() { s.handle(op, reply) })
		return
	case serving:
		err = op(now)
	}
	s.outbox = append(s.outbox, func() { reply(err) })
}

// lock locks the store for an action at one moment, and returns that instant. If the server is at work, due claims end
// first.
func (s *Store) lock() backend.Instant {
	s.mu.Lock()
	return s.expire()
}

// unlock frees the store, then sends the outbox. Sending under the lock would let a callback that looks at the store
// block indefinitely.
//
// Two goroutines may send at the same time, each the effects of its request: they have no order,
// like two connections of a server.
func (s *Store) unlock() {
	s.arm()
	out := s.outbox
	s.outbox = nil
	s.mu.Unlock()
	for _, send := range out {
		send()
	}
}
