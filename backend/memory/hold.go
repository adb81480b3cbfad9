package memory

import (
	"maps"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
)

// hold is what the store keeps of one hold besides what the machine does. Once it has ended it may go on to keep the
// name closed, for what is left of its minimum.
type hold struct {
	name, requestID string
	token           fencing.Token
	incarnation     string
	ttl             time.Duration
	since           backend.Instant
	expires         backend.Instant
	closes          backend.Instant // the end of the minimum; zero: none
	vacant          bool            // over, and only keeps the name closed
	queued          bool            // granted out of the queue
	lost            func(backend.Reason)
	driver          *Driver // whom lost belongs to
	alarm           alarm
}

// keep makes the store time a hold that was granted now.
func (s *Store) keep(now backend.Instant, d *Driver, r *backend.Request, t fencing.Token, queued bool) *hold {
	h := &hold{
		name: r.Name, requestID: r.RequestID, token: t, incarnation: t.String(), ttl: r.TTL, since: now,
		expires: now.Add(r.TTL), queued: queued, lost: r.Lost, driver: d,
	}
	if r.MinHold > 0 {
		h.closes = now.Add(r.MinHold)
	}
	h.alarm = alarm{hold: h}
	s.holds[t] = h
	s.setAlarm(&h.alarm, h.expires)
	return h
}

func (s *Store) prolong(now backend.Instant, h *hold, ttl time.Duration) {
	h.ttl = ttl
	h.expires = max(h.expires, now.Add(ttl))
	s.setAlarm(&h.alarm, h.expires)
}

// find returns the living hold that g is, by request and by incarnation, never by name alone.
func (s *Store) find(d *Driver, g *backend.Grant) *hold {
	h := s.holds[g.Token]
	if h == nil || h.vacant || s.forgot(d) != nil ||
		h.name != g.Name || h.requestID != g.RequestID || h.incarnation != g.Incarnation {
		return nil
	}
	return h
}

// living returns the holds of a name that are not over.
func (s *Store) living(name string) []*hold {
	var living []*hold
	for _, h := range s.machine.Holder(name).Holders {
		if !h.Lingering {
			living = append(living, s.holds[h.Token])
		}
	}
	return living
}

// ends is when a hold stops to keep others out, unless it is renewed.
func (h *hold) ends() backend.Instant {
	if h.vacant {
		return h.closes
	}
	return max(h.expires, h.closes)
}

// over ends a hold as its TTL does.
func (s *Store) over(now backend.Instant, h *hold) {
	s.lose(h, backend.ReasonExpired)
	s.apply(now, machine.Command{Op: machine.OpOpenSession, Session: expired, TTL: maxTTL}, "")
	s.apply(now, machine.Command{
		Op: machine.OpMove, Session: expired, Name: h.name, RequestID: h.requestID, Token: h.token,
	}, "")
	linger := now < h.closes
	if !linger {
		s.forget(h)
	}
	s.apply(now, machine.Command{Op: machine.OpExpire, Session: expired, Linger: linger}, "")
}

// lose tells the holder of h through his own network why it is gone, unless he gave it back.
func (s *Store) lose(h *hold, reason backend.Reason) {
	if reason == "" {
		return
	}
	s.ended.add(h.token, reason)
	if lost, d := h.lost, h.driver; lost != nil {
		s.outbox = append(s.outbox, func() { d.pushLost(lost, reason) })
	}
}

func (s *Store) forget(h *hold) {
	s.setAlarm(&h.alarm, 0)
	delete(s.holds, h.token)
}

// waiter is one set of requests that waits for all of its names at once.
type waiter struct {
	ticket   uint64
	requests []backend.Request
	driver   *Driver
	push     func(answer)
	alarm    alarm
}

// waiting returns those who wait, by arrival; with a name, those who wait for that.
func (s *Store) waiting(name string) []*waiter {
	var found []*waiter
	for _, ticket := range slices.Sorted(maps.Keys(s.waiters)) {
		w := s.waiters[ticket]
		if name == "" || slices.ContainsFunc(w.requests, func(r backend.Request) bool { return r.Name == name }) {
			found = append(found, w)
		}
	}
	return found
}

// leave takes a waiter out of all queues.
func (s *Store) leave(now backend.Instant, w *waiter) {
	s.apply(now, machine.Command{Op: machine.OpCancelWait, Name: w.requests[0].Name, RequestID: w.requests[0].RequestID}, "")
}

func (s *Store) forgetWaiter(w *waiter) {
	s.setAlarm(&w.alarm, 0)
	delete(s.waiters, w.ticket)
}
