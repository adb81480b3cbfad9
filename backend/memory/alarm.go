package memory

import (
	"time"

	"github.com/google/btree"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/machine"
)

// alarm is the moment at which a hold or a waiter ends. One timer serves all of them; a timer each would cost more than
// the lock does.
type alarm struct {
	at     backend.Instant // zero: not set
	number uint64          // orders alarms of one moment
	hold   *hold           // or
	waiter *waiter
}

func newAlarms() *btree.BTreeG[*alarm] {
	return btree.NewG(32, func(a, b *alarm) bool { return a.at < b.at || a.at == b.at && a.number < b.number })
}

// setAlarm moves al to at; zero takes it out.
func (s *Store) setAlarm(al *alarm, at backend.Instant) {
	if !al.at.IsZero() {
		s.alarms.Delete(al)
	}
	al.at = at
	if at.IsZero() {
		return
	}
	s.alarmed++
	al.number = s.alarmed
	s.alarms.ReplaceOrInsert(al)
}

// arm sets the timer to the first alarm. A timer that fires too early (its alarm was moved or taken out) finds nothing
// due and is armed again; moving it on every release would cost more than that.
func (s *Store) arm(now backend.Instant) {
	first, some := s.alarms.Min()
	if !some || !s.armed.IsZero() && s.armed <= first.at {
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
	s.armed = 0
	if s.state == serving {
		now := s.clock.Now()
		s.expire(now)
		s.arm(now)
	}
	s.unlock()
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
