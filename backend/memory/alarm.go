package memory

import (
	"time"

	"github.com/google/btree"

	"github.com/fencelock/fencelock/backend"
)

// alarm is the moment at which a hold or a waiter ends. One timer serves all of them; a timer each would cost more than
// the lock does, and end what is due at one moment in any order.
type alarm struct {
	at     backend.Instant // zero: not set
	number uint64          // orders alarms of one moment
	end    func(now backend.Instant)
}

func newAlarms() *btree.BTreeG[*alarm] {
	return btree.NewG(32, func(a, b *alarm) bool { return a.at < b.at || a.at == b.at && a.number < b.number })
}

// setAlarm moves al to at; zero takes it out.
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

// arm sets the timer to the first alarm, if the server is at work. A timer that fires too early (its alarm was moved or taken out) finds nothing
// due and is armed again; moving it on every release would cost more than that.
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

func (s *Store) tick() {
	s.mu.Lock()
	defer s.unlock()
	s.armed = 0
	s.arm(s.expire())
}

// expire ends everything whose time has come, if the server is at work. It returns the moment.
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
