package machine

// Usage is what the sessions of one client have together.
type Usage struct {
	Sessions, Holds, Waits int
}

// use adds to what a client has.
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

// overShare refuses what would be more than a client may have; more is what it asks for.
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

// SessionUsage is one session, for operators.
type SessionUsage struct {
	SessionTTL
	Client       string // whose it is; empty: nobody's
	Holds, Waits int
}
