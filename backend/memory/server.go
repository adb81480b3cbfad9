package memory

// Trouble of the server: what operators and outages do to it. Each function acts at one moment of the store, between
// two requests, and has happened when it returns; only what it causes at drivers takes as long as their networks do.

import (
	"maps"
	"math"
	"slices"

	"github.com/fencelock/fencelock/backend"
)

// serverState is what an operator, or an outage, made of the server.
type serverState uint8

const (
	// serving: requests are carried out, and holds end.
	serving serverState = iota
	// paused: requests are kept in the inbox, and nothing ends.
	paused
	// stopped: requests are refused. What would have ended meanwhile ends with Start.
	stopped
)

// Pause freezes the server: requests arrive and are not answered, nothing expires, and callers wait until their
// contexts end. Resume goes on, and serves what has arrived meanwhile, in order. Time goes on meanwhile: holds whose
// TTL is over end with Resume, before anything is served. It does nothing to a server that is stopped.
func (s *Store) Pause() {
	s.at(func(backend.Instant) {
		if s.state == serving {
			s.state = paused
		}
	})
}

// Resume ends Pause, and does nothing otherwise.
func (s *Store) Resume() { s.goOn(paused) }

// Stop ends the server: connections break, and calls answer backend.ErrUnavailable until Start. What it held is kept
// as if on disk, and time goes on for it; places in queues are lost.
//
// What had arrived during Pause is gone, and was not carried out. Waiters ask again once they reach the server, and
// stand at the end of the queue then.
func (s *Store) Stop() {
	s.at(func(now backend.Instant) {
		s.state = stopped
		s.inbox = nil
		for _, w := range s.waiting("") {
			s.leave(now, w)
		}
		for _, d := range s.drivers {
			s.outbox = append(s.outbox, d.net.Reset)
		}
	})
}

// Start ends Stop, and does nothing otherwise. Holds whose TTL was over meanwhile end first, and their holders are
// told.
func (s *Store) Start() { s.goOn(stopped) }

// Restart is Stop and Start: holds and the counter of tokens stay, connections and places in queues do not.
func (s *Store) Restart() {
	s.Stop()
	s.Start()
}

// goOn goes back to work, if the server is in that state, and serves what has arrived meanwhile. It is sent from the
// outbox, without s.mu, so a request that arrives at this moment may come before what was kept.
func (s *Store) goOn(from serverState) {
	s.at(func(backend.Instant) {
		if s.state == from {
			s.state = serving
			s.expire()
			s.outbox, s.inbox = append(s.outbox, s.inbox...), nil
		}
	})
}

// Evict deletes the holds of name behind their holders' backs, as an eviction or a careless administrator does,
// whatever minimum was asked for. It reports whether there was one. Waiters stay; the first of them gets the name.
// Watchers see the holds released, with backend.ReasonEvicted as the reason.
func (s *Store) Evict(name string) (there bool) {
	s.at(func(now backend.Instant) {
		there = s.forceRelease(now, name, byEviction, string(backend.ReasonEvicted), backend.ReasonEvicted)
	})
	return there
}

// byEviction stands in the machine's event for an eviction, where nobody takes the hold away: changeOf knows it by
// that.
const byEviction = "eviction"

// Expire ends the holds of name, whatever minimum was asked for, as if their TTLs had passed: their holders are told
// backend.ReasonExpired. It reports whether there was one.
//
// A holder whose network is held is not told; its renewals and its release then are a *backend.NotHeldError.
func (s *Store) Expire(name string) (there bool) {
	s.at(func(now backend.Instant) {
		for _, h := range s.held(name) { // those who get the name meanwhile are spared
			h.closes, there = 0, true
			s.end(now, h)
		}
	})
	return there
}

// EvictWaiters deletes the places in the queue of name behind the waiters' backs, and tells nobody. It returns how
// many there were. A waiter that asks again, as drivers do now and then, gets a new place.
func (s *Store) EvictWaiters(name string) (n int) {
	s.at(func(now backend.Instant) {
		for _, w := range s.waiting(name) {
			s.leave(now, w)
			n++
		}
	})
	return n
}

// Wipe deletes everything that the store keeps, the counter of tokens and their space included: as if another server,
// an empty one, had taken the place of this one. Drivers from before notice. Their holds end with
// backend.ReasonHistoryLost, their waiters and watches, and what they acquire from then on, with
// backend.ErrHistoryLost. Drivers that are made later find an empty store, which begins to count anew in a token space
// of its own.
func (s *Store) Wipe() {
	s.at(func(backend.Instant) {
		waiters, holds := s.waiting(""), s.holds
		s.begin()
		for _, w := range waiters {
			s.outbox = append(s.outbox, w.ring)
		}
		for _, t := range slices.Sorted(maps.Keys(holds)) {
			s.lose(holds[t], backend.ReasonHistoryLost)
		}
		s.ended = [endingsKept]ending{} // of other tokens
		for _, name := range slices.Sorted(maps.Keys(s.watches)) {
			for _, w := range s.watches[name] {
				s.outbox = append(s.outbox, w.ring)
			}
		}
	})
}

// Compact forgets all events so far, as if that many others had happened since. Watches that have not read all of them
// end with backend.ErrCompacted.
func (s *Store) Compact() {
	s.at(func(backend.Instant) {
		s.floor = s.machine.Revision()
		for _, watches := range s.watches {
			for _, w := range watches {
				w.overrun = w.overrun || len(w.news) > 0
			}
		}
	})
}

// Names returns how many names are held, closed by a minimum hold, or waited for.
func (s *Store) Names() (n int) {
	s.at(func(backend.Instant) {
		names, _ := s.machine.List("", "", math.MaxInt)
		n = len(names)
	})
	return n
}

// at runs op at one moment of the store, whatever its state, on the caller's goroutine: the server's trouble does not
// come over a network. If the server is at work, what is over by then ends first.
func (s *Store) at(op func(now backend.Instant)) {
	s.mu.Lock()
	defer s.unlock()
	now := s.expire()
	op(now)
	s.arm(now)
}

// handle runs op at one moment of the store and answers, as soon as the server serves; if it is down, the answer is an
// error, and op was not run. reply is called without s.mu, and after all that op brought about has been sent.
func (s *Store) handle(op func(now backend.Instant), reply func(error)) {
	s.mu.Lock()
	defer s.unlock()
	switch s.state {
	case paused:
		s.inbox = append(s.inbox, func() { s.handle(op, reply) })
	case stopped:
		s.outbox = append(s.outbox, func() { reply(backend.ErrUnavailable) })
	case serving:
		now := s.expire()
		op(now)
		s.arm(now)
		s.outbox = append(s.outbox, func() { reply(nil) })
	}
}
