package memory

import (
	"time"

	"github.com/google/btree"

	"github.com/fencelock/fencelock/backend"
)

// alarm is the moment at which a hold, a minimum hold or a waiter ends. One timer serves all of them; a timer each
// would cost more than the lock does, and end what is due at one moment in any order. Store.mu protects the fields.
type alarm struct {
	// at is when it rings. Zero: it is not set, and stands in no tree.
	at backend.Instant
	// number orders the alarms of one moment by when they were set: without it the tree would take two of them for one,
	// and keep only the later.
	number uint64
	// end does what is due, under Store.mu. The alarm is out of the tree by then, so end may set it anew.
	end func(now backend.Instant)
}

// newAlarms returns an empty tree, in the order in which alarms ring. A heap would need the place of each alarm in it
// to take one out, which every release does.
func newAlarms() *btree.BTreeG[*alarm] {
	return btree.NewG(32, func(a, b *alarm) bool { return a.at < b.at || a.at == b.at && a.number < b.number })
}

// setAlarm moves al to at; zero takes it out. It leaves the timer alone: arm sets that once for each request, however
// many alarms the request has moved. The caller holds s.mu.
//
// The alarm is taken out before its time is changed, because the tree finds it by that time.
func (s *Store) setAlarm(al *alarm, at backend.Instant) {
	if !al.at.IsZero() {
		s.alarms.Delete(al)
	}
	s.alarmed++
	al.at, al.number = at, s.alarmed
	if !at.IsZero() {
		s.alarms.ReplaceOrInsert(al)
	}
}

// arm sets the timer to the first alarm, if the server is at work. A timer that fires too early (its alarm was moved or
// taken out) finds nothing due and is armed again; moving it on every release would cost more than that. The caller
// holds s.mu.
//
// There is one timer for the life of the store, and nothing stops it. On a store that nobody uses any more it fires
// until the last hold and the last waiter have ended, and is not set again.
func (s *Store) arm(now backend.Instant) {
	first, some := s.alarms.Min()
	if s.state != serving || !some || !s.armed.IsZero() && s.armed <= first.at {
		return
	}
	s.armed = first.at
	wait := max(first.at.Sub(now), time.Microsecond)
	if s.timer == nil {
		s.timer = time.AfterFunc(wait, s.tick)
		return
	}
	s.timer.Reset(wait)
}

// tick is what the timer runs, in a goroutine of its own that ends with it. Losses that it brings about are told from
// that goroutine, after s.mu is unlocked.
func (s *Store) tick() {
	s.mu.Lock()
	defer s.unlock()
	s.armed = 0
	s.arm(s.expire())
}

// expire ends everything whose time has come, if the server is at work, and returns the moment. The caller holds s.mu.
//
// Every request begins with it, so that the answer does not depend on whether the timer or the request comes first: a
// hold is over at its instant, also where the timer is late. A loop is needed because an end may grant to a waiter
// whose own time is over at the same moment.
func (s *Store) expire() backend.Instant {
	now := s.clock.Now()
	for s.state == serving {
		al, some := s.alarms.Min()
		if !some || al.at > now {
			break
		}
		s.setAlarm(al, 0)
		al.end(now)
	}
	return now
}
