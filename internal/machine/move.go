package machine

// move takes the hold or the wait of a request over to s. It touches no name: no hold or wait begins or ends.
func (m *Machine) move(s *session, c *Command) *Result {
	if bad := m.checkSealed(c.Sealed); bad != nil {
		return bad
	}
	h, w := m.find(c.Name, c.RequestID)
	switch {
	case h != nil && (c.Token == 0 || c.Token == h.token):
		if h.session != s.id {
			if !s.principal.MayUse(m.sessions[h.session].principal) {
				return denied("RequestID")
			}
			m.tellHolder(h, c, CauseMoved, "")
		}
		if h.session != s.id || h.Sealed == "" && c.Sealed != "" {
			m.moveHold(h, s.id, c.Sealed)
		}
		return &Result{Code: CodeGranted, Grants: []Grant{h.grant()}}
	case w != nil && c.Token == 0:
		if w.session != s.id {
			if !s.principal.MayUse(m.sessions[w.session].principal) {
				return denied("RequestID")
			}
			m.tellWaiter(w, c, CauseMoved)
		}
		if w.session != s.id || w.sealed(c.Name, c.RequestID) == "" && c.Sealed != "" {
			m.moveWait(w, s.id, c)
		}
		return &Result{Code: CodeQueued, Ticket: w.ticket}
	}
	return notHeld()
}

// denied refuses access to another principal's hold or session.
func denied(field string) *Result {
	return &Result{Code: CodeDenied, Field: field, Detail: "it is another principal's"}
}

// moveHold moves h to another session, for which its id is sealed anew; without a session, it lingers, and still
// excludes others.
func (m *Machine) moveHold(h *hold, to SessionID, sealed string) {
	moved := *h
	moved.session, moved.Sealed = to, sealed
	if moved.lingering() {
		moved.max = 0 // its minimum alone counts
	}
	m.replaceHold(h, &moved)
}

// replaceHold replaces h by another hold with the same token and, except for their limit, the same claims.
func (m *Machine) replaceHold(h, by *hold) {
	m.disown(h)
	m.holds[h.token.Order()] = by
	for _, c := range m.claimsOf(h) {
		m.names[c.name].replaceHold(by)
	}
	m.own(by)
}

// moveWait moves w to another session, as c asks. The command seals the id of one request anew; the ids of the others
// are unknown until they are moved, too.
func (m *Machine) moveWait(w *wait, to SessionID, c *Command) {
	moved := *w
	moved.session, moved.requests = to, make([]Request, len(w.requests))
	for i, r := range w.requests {
		switch {
		case r.ID == c.RequestID:
			r.Sealed = c.Sealed
		case w.session != to:
			r.Sealed = ""
		}
		moved.requests[i] = r
	}
	m.replaceWait(w, &moved)
}

// replaceWait replaces w by another wait with the same ticket and, except for their limit, the same claims.
func (m *Machine) replaceWait(w, by *wait) {
	m.disownWait(w)
	m.waits[w.ticket] = by
	for i := range by.claims {
		m.names[by.claims[i].name].replaceWait(by, &by.claims[i])
	}
	m.ownWait(by)
}

// sealed returns the sealed id of one request of w, or "".
func (w *wait) sealed(name, id string) string {
	for i := range w.requests {
		if r := &w.requests[i]; r.Name == name && r.ID == id {
			return r.Sealed
		}
	}
	return ""
}
