package memory

import (
	"container/heap"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// alarm is the moment at which a hold or a waiter ends. One heap and one
// timer serve all of them; a timer each would cost more than the lock does.
type alarm struct {
	at     backend.Instant
	index  int   // in the heap, or idle
	hold   *hold // or
	waiter *waiter
}

const idle = -1

type alarmHeap []*alarm

func (h alarmHeap) Len() int           { return len(h) }
func (h alarmHeap) Less(i, j int) bool { return h[i].at < h[j].at }
func (h alarmHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *alarmHeap) Push(x any) {
	al := x.(*alarm)
	al.index = len(*h)
	*h = append(*h, al)
}

// Pop implements heap.Interface.
func (h *alarmHeap) Pop() any {
	old := *h
	al := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	al.index = idle
	return al
}

// setAlarm moves al to at; zero takes it out.
func (s *Store) setAlarm(al *alarm, at backend.Instant) {
	al.at = at
	switch {
	case at.IsZero() && al.index == idle:
	case at.IsZero():
		heap.Remove(&s.alarms, al.index)
	case al.index == idle:
		heap.Push(&s.alarms, al)
	default:
		heap.Fix(&s.alarms, al.index)
	}
}

// arm sets the timer to the first alarm. A timer that fires too early (its alarm was moved or taken out) finds nothing
// due and is armed again; moving it on every release would cost more than that.
func (s *Store) arm(now backend.Instant) {
	if len(s.alarms) == 0 {
		return
	}
	at := s.alarms[0].at
	if !s.armed.IsZero() && s.armed <= at {
		return
	}
	s.armed = at
	wait := max(at.Sub(now), time.Microsecond)
	if s.timer == nil {
		s.timer = time.AfterFunc(wait, s.ring)
		return
	}
	s.timer.Reset(wait)
}

func (s *Store) ring() {
	s.mu.Lock()
	s.armed = 0
	if s.state == serving {
		now := s.clock.Now()
		s.expire(now)
		s.arm(now)
	}
	s.unlock()
}
