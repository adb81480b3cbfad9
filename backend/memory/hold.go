package memory

import (
	"maps"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
)

// hold is what the store keeps of one hold besides what the machine does.
type hold struct {
	name, requestID string
	token           fencing.Token
	expires         backend.Instant
	closes          backend.Instant // until then its minimum keeps the name closed; zero: none
	queued          bool            // granted out of the queue
	lost            func(backend.Reason)
	driver          *Driver // whom lost belongs to
	alarm           alarm
}

// keep makes the store time a hold, or time it for longer if it was granted before.
func (s *Store) keep(now backend.Instant, d *Driver, r *backend.Request, t fencing.Token, queued bool) *hold {
	h := s.holds[t]
	if h == nil {
		h = &hold{name: r.Name, requestID: r.RequestID, token: t, queued: queued}
		if r.MinHold > 0 {
			h.closes = now.Add(r.MinHold)
		}
		h.alarm.end = func(now backend.Instant) { s.end(now, h) }
		s.holds[t] = h
	}
	h.lost, h.driver = r.Lost, d
	s.prolong(now, h, r.TTL)
	return h
}

func (s *Store) prolong(now backend.Instant, h *hold, ttl time.Duration) {
	h.expires = max(h.expires, now.Add(ttl))
	s.setAlarm(&h.alarm, h.expires)
}

// find returns the hold that g is, by request and by token, never by name alone.
func (s *Store) find(d *Driver, g *backend.Grant) *hold {
	h := s.holds[g.Token]
	if h == nil || s.forgot(d) != nil || h.name != g.Name || h.requestID != g.RequestID ||
		h.token.String() != g.Incarnation {
		return nil
	}
	return h
}

// held returns the holds of a name, without those that are over and only keep it closed.
func (s *Store) held(name string) []*hold {
	var held []*hold
	for _, h := range s.machine.Holder(name).Holders {
		if !h.Lingering {
			held = append(held, s.holds[h.Token])
		}
	}
	return held
}

// end ends a hold as its TTL does.
func (s *Store) end(now backend.Instant, h *hold) {
	s.lose(h, backend.ReasonExpired)
	s.apply(now, machine.Command{Op: machine.OpOpenSession, Session: expired, TTL: maxTTL}, "")
	s.apply(now, machine.Command{
		Op: machine.OpMove, Session: expired, Name: h.name, RequestID: h.requestID, Token: h.token,
	}, "")
	s.apply(now, machine.Command{Op: machine.OpExpire, Session: expired, Linger: now < h.closes}, "")
	s.forget(h)
}

// linger frees the name of a hold that is over once its minimum is.
func (s *Store) linger(h *hold) {
	s.forget(h)
	s.setAlarm(&alarm{end: func(now backend.Instant) {
		s.apply(now, machine.Command{Op: machine.OpFree, Name: h.name, Token: h.token}, "")
	}}, h.closes)
}

// lose tells the holder of h through his own network why it is gone, unless he gave it back.
func (s *Store) lose(h *hold, reason backend.Reason) {
	if reason == "" {
		return
	}
	s.ended[h.token.Order()%endingsKept] = ending{h.token, reason}
	if lost, d := h.lost, h.driver; lost != nil {
		s.outbox = append(s.outbox, func() {
			d.net.send(replies, func() {
				if !d.gate.Closed() {
					lost(reason)
				}
			})
		})
	}
}

func (s *Store) forget(h *hold) {
	s.setAlarm(&h.alarm, 0)
	delete(s.holds, h.token)
}

// ending is why a hold ended against its holder's will. The store remembers that of the last tokens, at most.
type ending struct {
	token  fencing.Token
	reason backend.Reason
}

const endingsKept = 1024

// notHeld tells why the hold that g names is gone, if the store remembers.
func (s *Store) notHeld(d *Driver, g *backend.Grant) error {
	gone := &backend.NotHeldError{Name: g.Name}
	if last := s.ended[g.Token.Order()%endingsKept]; last.token == g.Token {
		gone.Reason = last.reason
	}
	if s.forgot(d) != nil {
		gone.Reason = backend.ReasonHistoryLost
	}
	return gone
}

// waiter is one set of requests that waits for all of its names at once.
type waiter struct {
	requests []backend.Request
	driver   *Driver
	ring     func() // tells it to ask
	alarm    alarm
}

// keepWaiter makes the store time a place in the queue. One that nobody asks for any more ends like a hold would, or a
// queue of the dead would close the name for one TTL each.
func (s *Store) keepWaiter(now backend.Instant, d *Driver, rs []backend.Request, ticket uint64, ring func()) {
	w := s.waiters[ticket]
	if w == nil {
		w = &waiter{}
		w.alarm.end = func(now backend.Instant) { s.leave(now, w) }
		s.waiters[ticket] = w
	}
	w.requests, w.driver, w.ring = rs, d, ring
	s.setAlarm(&w.alarm, now.Add(rs[0].TTL))
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
	r := &w.requests[0]
	s.apply(now, machine.Command{Op: machine.OpCancelWait, Name: r.Name, RequestID: r.RequestID}, "")
}

func (s *Store) forgetWaiter(ticket uint64) {
	s.setAlarm(&s.waiters[ticket].alarm, 0)
	delete(s.waiters, ticket)
}
