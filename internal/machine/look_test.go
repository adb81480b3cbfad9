package machine

import (
	"slices"
	"time"
)

// Views of the state for tests only.

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

// Session returns a session with its holds and waits.
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

// Lingering returns all lingering holds, by token.
func (m *Machine) Lingering() []Hold {
	return slices.DeleteFunc(m.Timed(), func(h Hold) bool { return !h.Lingering })
}
