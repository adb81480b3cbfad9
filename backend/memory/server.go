package memory

import (
	"maps"
	"math"
	"slices"

	"github.com/fencelock/fencelock/backend"
)

// serverState is what an operator, or an outage, made of the server.
type serverState uint8

const (
	serving serverState = iota
	paused
	stopped
)

// Pause freezes the server: requests arrive and are not answered, nothing expires, and callers wait until their
// contexts end. Resume goes on, and serves what has arrived meanwhile, in order.
func (s *Store) Pause() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == serving {
		s.state = paused
	}
}

// Resume ends Pause.
func (s *Store) Resume() {
	s.mu.Lock()
	if s.state != paused {
		s.mu.Unlock()
		return
	}
	s.goOn()
}

// Stop ends the server: connections break, and calls answer backend.ErrUnavailable until Start. What it held is kept
// as if on disk, and time goes on for it; places in queues are lost.
func (s *Store) Stop() {
	s.mu.Lock()
	s.state = stopped
	s.inbox = nil
	for _, w := range s.waiting("") {
		s.leave(s.clock.Now(), w)
	}
	drivers := slices.Clone(s.drivers)
	s.unlock()
	for _, d := range drivers {
		d.net.Reset()
	}
}

// Start ends Stop.
func (s *Store) Start() {
	s.mu.Lock()
	if s.state != stopped {
		s.mu.Unlock()
		return
	}
	s.goOn()
}

// Restart is Stop and Start.
func (s *Store) Restart() {
	s.Stop()
	s.Start()
}

// goOn goes back to work with s.mu held, and frees it.
func (s *Store) goOn() {
	s.state = serving
	inbox := s.inbox
	s.inbox = nil
	now := s.clock.Now()
	s.expire(now)
	s.arm(now)
	s.unlock()
	for _, request := range inbox {
		request()
	}
}

// Evict deletes the holds of name behind their holders' backs, as an eviction or a careless administrator does,
// whatever minimum was asked for. It reports whether there was one. Waiters stay; the first of them gets the name.
// Watchers see the holds released, with backend.ReasonEvicted as the reason.
func (s *Store) Evict(name string) bool {
	s.mu.Lock()
	defer s.unlock()
	now := s.clock.Now()
	there := s.forceRelease(now, name, byEviction, string(backend.ReasonEvicted), backend.ReasonEvicted)
	s.arm(now)
	return there
}

// byEviction is who takes holds away where nobody does.
const byEviction = "eviction"

// Expire ends the holds of name, whatever minimum was asked for, as if their TTLs had passed: their holders are told
// backend.ReasonExpired. It reports whether there was one.
func (s *Store) Expire(name string) bool {
	s.mu.Lock()
	defer s.unlock()
	now := s.clock.Now()
	holds := s.living(name) // those who get the name meanwhile are spared
	for _, h := range holds {
		h.closes = 0
		s.over(now, h)
	}
	s.arm(now)
	return len(holds) > 0
}

// EvictWaiters deletes the places in the queue of name behind the waiters' backs, and tells nobody. It returns how
// many there were. A waiter that asks again, as drivers do now and then, gets a new place.
func (s *Store) EvictWaiters(name string) int {
	s.mu.Lock()
	defer s.unlock()
	waiters := s.waiting(name)
	for _, w := range waiters {
		s.leave(s.clock.Now(), w)
	}
	return len(waiters)
}

// Wipe deletes everything that the store keeps, the counter of tokens and their space included: as if another server,
// an empty one, had taken the place of this one. Drivers from before notice. Their holds end with
// backend.ReasonHistoryLost, their waiters and watches, and what they acquire from then on, with
// backend.ErrHistoryLost. Drivers that are made later find an empty store, which begins to count anew in a token space
// of its own.
func (s *Store) Wipe() {
	s.mu.Lock()
	defer s.unlock()
	waiters, holds := s.waiting(""), s.holds
	s.begin()
	for _, w := range waiters {
		err := s.forgot(w.driver)
		s.outbox = append(s.outbox, func() { w.push(answer{err: err}) })
	}
	for _, t := range slices.Sorted(maps.Keys(holds)) {
		s.lose(holds[t], backend.ReasonHistoryLost)
	}
	s.ended = endings{} // of other tokens
	for _, name := range slices.Sorted(maps.Keys(s.watches)) {
		for _, w := range s.watches[name] {
			s.ring(w, s.machine.Revision())
		}
	}
}

// Compact forgets all events so far, as if that many others had happened since. Watches that have not read all of them
// end with backend.ErrCompacted.
func (s *Store) Compact() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.floor = s.machine.Revision()
}

// Names returns how many names are held, closed by a minimum hold, or waited for.
func (s *Store) Names() int {
	s.mu.Lock()
	defer s.unlock()
	if s.state == serving {
		now := s.clock.Now()
		s.expire(now)
		s.arm(now)
	}
	names, _ := s.machine.List("", "", math.MaxInt)
	return len(names)
}

// handle runs op as soon as the server serves, and refuse if it is down. op reports false if it found the server not
// serving.
func (s *Store) handle(op func() bool, refuse func()) {
	for !op() {
		s.mu.Lock()
		switch s.state {
		case paused:
			s.inbox = append(s.inbox, func() { s.handle(op, refuse) })
			s.mu.Unlock()
			return
		case stopped:
			s.mu.Unlock()
			refuse()
			return
		}
		s.mu.Unlock()
	}
}
