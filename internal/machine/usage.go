package machine

import "github.com/fencelock/fencelock/internal/principal"

// Usage counts the state of all sessions of one client.
type Usage struct {
	Sessions, Holds, Waits int
}

// use adds to a client's usage.
func (m *Machine) use(client string, more Usage) {
	if client == "" {
		return
	}
	u := m.clients[client]
	u.Sessions, u.Holds, u.Waits = u.Sessions+more.Sessions, u.Holds+more.Holds, u.Waits+more.Waits
	if m.clients[client] = u; u == (Usage{}) {
		delete(m.clients, client)
	}
}

// overShare refuses a request beyond a client's share; more is the requested amount.
func (m *Machine) overShare(client string, more Usage) *Result {
	if client == "" {
		return nil
	}
	u, l := m.clients[client], &m.limits
	switch {
	case more.Sessions > 0 && u.Sessions+more.Sessions > l.Share(l.Sessions):
		return limited("ClientSessions")
	case more.Holds > 0 && u.Holds+more.Holds > l.Share(l.Holds):
		return limited("ClientHolds")
	case more.Waits > 0 && u.Waits+more.Waits > l.Share(l.Waits):
		return limited("ClientWaits")
	}
	return nil
}

// Total counts the state of all sessions.
func (m *Machine) Total() Usage {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return Usage{Sessions: len(m.sessions), Holds: len(m.holds), Waits: len(m.waits)}
}

// SessionUsage is one session, for operators.
type SessionUsage struct {
	SessionTTL
	Client       string // empty if unknown
	Principal    principal.Principal
	Holds, Waits int
	// Owner is the owner of its last hold, or of a wait if it has no hold; Names are the first ten names that it
	// holds.
	Owner string
	Names []string
}
