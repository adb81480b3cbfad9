package machine

import (
	"slices"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// What only tests look at.

// Wait is one place in one or several queues.
type Wait struct {
	Ticket   uint64
	Session  SessionID
	Requests []Request
	Since    int64 // Unix nanoseconds by the leader's clock; for people
}

// Session is one session.
type Session struct {
	ID    SessionID
	TTL   time.Duration
	Holds []Hold // by token
	Waits []Wait // by ticket
}

// Session returns a session with all that hangs on it.
func (m *Machine) Session(id SessionID) (Session, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	s := m.sessions[id]
	if s == nil {
		return Session{}, false
	}
	shown := Session{ID: id, TTL: s.ttl, Holds: show(len(s.holds), slices.Values(sorted(s.holds)))}
	for _, w := range sorted(s.waits) {
		shown.Waits = append(shown.Waits,
			Wait{Ticket: w.ticket, Session: w.session, Requests: w.requests, Since: w.since})
	}
	return shown, true
}

// HoldOf returns the hold of that request for name, lingering ones not among them. Unless t is zero, only a hold with
// that token.
func (m *Machine) HoldOf(name, requestID string, t fencing.Token) (Hold, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	h, _ := m.find(name, requestID)
	if h == nil || t != 0 && t != h.token {
		return Hold{}, false
	}
	return h.show(), true
}

// Lingering returns all lingering holds, by token.
func (m *Machine) Lingering() []Hold {
	return slices.DeleteFunc(m.Timed(), func(h Hold) bool { return !h.Lingering })
}
