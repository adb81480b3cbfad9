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
	s.lock()
	defer s.unlock()
	if s.state == serving {
		s.state = paused
	}
}

// Resume ends Pause, and does nothing otherwise.
func (s *Store) Resume() { s.goOn(paused) }

// Stop ends the server: connections break, and calls answer backend.ErrUnavailable until Start. What it held is kept
// as if on disk, and time goes on for it; places in queues are lost.
//
// What had arrived during Pause is gone, and was not carried out. Waiters ask again once they reach the server, and
// stand at the end of the queue then.
func (s *Store) Stop() {
	now := s.lock()
	defer s.unlock()
	s.state, s.inbox = stopped, nil
	for _, w := range s.waiting("") {
		s.end(now, w)
	}
	for _, d := range s.drivers {
		s.outbox = append(s.outbox, d.net.Reset)
	}
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
	s.lock()
	defer s.unlock()
	if s.state == from {
		s.state = serving
		s.expire()
		s.outbox, s.inbox = append(s.outbox, s.inbox...), nil
	}
}

// Evict deletes the holds of name behind their holders' backs, as an eviction or a careless administrator does,
// whatever minimum was asked for. It reports whether there was one. Waiters stay; the first of them gets the name.
// Watchers see the holds released, with backend.ReasonEvicted as the reason.
func (s *Store) Evict(name string) bool {
	now := s.lock()
	defer s.unlock()
	return s.forceRelease(now, name, byEviction, string(backend.ReasonEvicted), backend.ReasonEvicted)
}

// byEviction stands in the machine's event for an eviction, where nobody takes the hold away: changeOf knows it by
// that.
const byEviction = "eviction"

// Expire ends the holds of name, whatever minimum was asked for, as if their TTLs had passed: their holders are told
// backend.ReasonExpired. It reports whether there was one.
//
// A holder whose network is held is not told; its renewals and its release then are a *backend.NotHeldError.
func (s *Store) Expire(name string) bool {
	now := s.lock()
	defer s.unlock()
	held := s.held(name) // those who get the name meanwhile are spared
	for _, h := range held {
		h.closes = 0
		s.end(now, h)
	}
	return len(held) > 0
}

// EvictWaiters deletes the places in the queue of name behind the waiters' backs, and tells nobody. It returns how
// many there were. A waiter that asks again, as drivers do now and then, gets a new place.
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
// backend.ReasonHistoryLost, their waiters and watches, and what they acquire from then on, with
// backend.ErrHistoryLost. Drivers that are made later find an empty store, which begins to count anew in a token space
// of its own.
func (s *Store) Wipe() {
	s.lock()
	defer s.unlock()
	for _, number := range slices.Sorted(maps.Keys(s.claims)) {
		switch c := s.claims[number]; {
		case c.ring != nil:
			s.outbox = append(s.outbox, c.ring)
		case !c.lingers:
			s.lose(c, backend.ReasonHistoryLost)
		}
	}
	s.begin()
	for _, name := range slices.Sorted(maps.Keys(s.watches)) {
		for _, w := range s.watches[name] {
			s.outbox = append(s.outbox, w.ring)
		}
	}
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

// handle runs op at one moment of the store, as soon as the server serves, and answers with its error; if the server is
// down, the answer is backend.ErrUnavailable, and op was not run. reply is called without s.mu, and after all that op
// brought about has been sent.
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

// lock takes the store for whatever is done at one moment of it, and returns the moment. If the server is at work, what
// is over by then ends first.
func (s *Store) lock() backend.Instant {
	s.mu.Lock()
	return s.expire()
}

// unlock frees the store, then sends what piled up. Sending under the lock would let a callback that looks at the store
// block for ever.
//
// Two goroutines may send at the same time, each what its own request brought about: there is no order between the two,
// as there is none between two connections of a server.
func (s *Store) unlock() {
	s.arm()
	out := s.outbox
	s.outbox = nil
	s.mu.Unlock()
	for _, send := range out {
		send()
	}
}
