package machine

// move takes the hold or the wait of a request over to s. It touches no name: nothing begins and nothing ends.
func (m *Machine) move(s *session, c *Command) *Result {
	h, w := m.find(c.Name, c.RequestID)
	switch {
	case h != nil && (c.Token == 0 || c.Token == h.token):
		if h.session != s.id {
			m.tellHolder(h, c, CauseMoved, "")
			m.moveHold(h, s.id)
		}
		return &Result{Code: CodeGranted, Grants: []Grant{h.grant()}}
	case w != nil && c.Token == 0:
		if w.session != s.id {
			m.tellWaiter(w, c, CauseMoved)
			m.moveWait(w, s.id)
		}
		return &Result{Code: CodeQueued, Ticket: w.ticket}
	}
	return notHeld()
}

// moveHold has h hang on another session; on none, it lingers, and goes on excluding others.
func (m *Machine) moveHold(h *hold, to SessionID) {
	m.disown(h)
	moved := *h
	moved.session = to
	m.holds[h.token.Order()] = &moved
	for _, c := range m.claimsOf(h) {
		m.names[c.name].replaceHold(&moved)
	}
	m.own(&moved)
}

func (m *Machine) moveWait(w *wait, to SessionID) {
	m.disownWait(w)
	moved := *w
	moved.session = to
	m.waits[w.ticket] = &moved
	for i := range moved.claims {
		m.names[moved.claims[i].name].replaceWait(&moved, &moved.claims[i])
	}
	m.ownWait(&moved)
}
