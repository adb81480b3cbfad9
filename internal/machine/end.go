package machine

import (
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/rules"
)

var done = &Result{Code: CodeOK}

func notHeld() *Result { return &Result{Code: CodeNotHeld} }

// openSession makes the session of c. s is the session with that id, if there is one.
func (m *Machine) openSession(s *session, c *Command) *Result {
	switch {
	case c.TTL <= 0:
		return invalid("TTL", "%v is not positive", c.TTL)
	case s != nil && s.ttl != c.TTL:
		return &Result{Code: CodeConflict, Field: "Session", Detail: "it is open with another TTL"}
	case s != nil && !c.Principal.MayUse(s.principal):
		return denied("Session")
	case s != nil:
		return done
	case len(m.sessions) >= m.limits.Sessions:
		return limited("Sessions")
	}
	if bad := checkText("Client", c.Client, maxOwnerBytes); bad != nil {
		return bad
	}
	if bad := checkText("Principal", string(c.Principal), maxOwnerBytes); bad != nil {
		return bad
	}
	if c.Client != "" && m.level < LevelDeadlines || c.Principal != "" && m.level < LevelHiddenIDs {
		return invalid("Client", "the level is %d", m.level)
	}
	if r := m.overShare(c.Client, Usage{Sessions: 1}); r != nil {
		return r
	}
	m.sessions[c.Session] = &session{id: c.Session, ttl: c.TTL, client: c.Client, principal: c.Principal}
	m.use(c.Client, Usage{Sessions: 1})
	return done
}

// endSession ends s with all its holds and waits.
func (m *Machine) endSession(s *session, as EventType, why Cause, linger bool) *Result {
	for _, w := range sorted(s.waits) {
		m.cancel(w)
	}
	for _, h := range sorted(s.holds) {
		m.end(h, eventOf(as, h), linger)
	}
	delete(m.sessions, s.id)
	m.use(s.client, Usage{Sessions: -1})
	m.notices = append(m.notices, Notice{Type: NoticeSessionEnded, Session: s.id, Cause: why})
	return done
}

// end ends h, or lets it linger if it may and has a minimum.
func (m *Machine) end(h *hold, as Event, linger bool) {
	m.record(as)
	if h.max > 0 {
		m.notices = append(m.notices, Notice{Type: NoticeUntimed, Token: h.token})
	}
	if !linger || h.MinHold == 0 {
		m.removeHold(h)
		return
	}
	m.moveHold(h, SessionID{}, "")
	m.notices = append(m.notices, Notice{
		Type: NoticeLingering, Name: h.Name, RequestID: h.ID, Token: h.token, MinHold: h.MinHold,
	})
}

func (m *Machine) cancel(w *wait) {
	m.record(waitEvent(EventCancelled, w))
	m.removeWait(w)
}

// endWait ends a wait of which r is a request, and notifies its session.
func (m *Machine) endWait(w *wait, r *Request, why Cause, detail string) {
	m.cancel(w)
	m.notices = append(m.notices, Notice{
		Type: NoticeLost, Session: w.session, Ticket: w.ticket, Name: r.Name, RequestID: r.ID, Sealed: r.Sealed,
		Cause: why, Detail: detail,
	})
}

func (m *Machine) cancelWait(c *Command) *Result {
	h, w := m.find(c.Name, c.RequestID)
	switch {
	case !m.mayUse(c, h, w):
		return denied("RequestID")
	case h != nil:
		return &Result{Code: CodeGranted, Grants: []Grant{h.grant()}}
	case w == nil:
		return notHeld()
	}
	m.cancel(w)
	m.tellWaiter(w, c, CauseGivenBack)
	return done
}

func (m *Machine) release(c *Command) *Result {
	h, w := m.find(c.Name, c.RequestID)
	if c.Own && (h != nil && h.session != c.Session || w != nil && w.session != c.Session) {
		return notHeld()
	}
	switch {
	case !m.mayUse(c, h, w):
		return denied("RequestID")
	case h != nil && (c.Token == 0 || c.Token == h.token):
		m.end(h, eventOf(EventReleased, h), c.Linger)
		m.tellHolder(h, c, CauseGivenBack, "")
	case w != nil && c.Token == 0:
		m.cancel(w)
		m.tellWaiter(w, c, CauseGivenBack)
	default:
		return notHeld()
	}
	return done
}

// mayUse reports whether the sender of c may end the hold or the wait that c names, if there is one.
func (m *Machine) mayUse(c *Command, h *hold, w *wait) bool {
	var owner *session
	switch {
	case h != nil:
		owner = m.sessions[h.session]
	case w != nil:
		owner = m.sessions[w.session]
	}
	return owner == nil || c.Principal.MayUse(owner.principal)
}

func (m *Machine) forceRelease(c *Command) *Result {
	if bad := checkText("Reason", c.Reason, maxReasonBytes); bad != nil {
		return bad
	}
	if bad := checkText("By", c.By, maxOwnerBytes); bad != nil {
		return bad
	}
	if bad := checkText("Principal", string(c.Principal), maxOwnerBytes); bad != nil {
		return bad
	}
	if c.conditional() && m.level < LevelNonces {
		return invalid("Op", "the level is %d", m.level)
	}
	if why := m.rules.Refusal(c.Principal, rules.Force, c.Name, false); why != "" {
		return refusedBy(why)
	}
	e := m.names[c.Name]
	if e == nil {
		return notHeld()
	}
	var victims []*hold
	for h := range e.holds.all {
		if (c.Token == 0 || c.Token == h.token) && (c.Nonce == fencing.Nonce{} || c.Nonce == h.Nonce) {
			victims = append(victims, h)
		}
	}
	if len(victims) == 0 {
		return notHeld()
	}
	for _, h := range victims {
		as := eventOf(EventForced, h)
		as.Reason, as.By, as.Principal = c.Reason, c.By, string(c.Principal)
		if h.lingering() {
			as.Type = EventFreed
		} else {
			m.tellHolder(h, c, CauseForced, c.Reason)
		}
		m.end(h, as, false)
	}
	return done
}

func (m *Machine) free(c *Command) *Result {
	h := m.holds[c.Token.Order()]
	switch {
	case h == nil || h.Name != c.Name || h.token != c.Token:
		return notHeld()
	case h.lingering() && c.Linger: // its maximum was over when it ended otherwise: the minimum goes on
		return notHeld()
	case h.lingering():
		m.end(h, eventOf(EventFreed, h), false)
	case h.max > 0:
		as := eventOf(EventExpired, h)
		as.Reason = ReasonMaxHold
		m.tellHolder(h, c, CauseMaxHold, "")
		m.end(h, as, c.Linger)
	default:
		return notHeld()
	}
	return done
}

// tellHolder notifies the session of h that the hold ended, unless the command is its own.
func (m *Machine) tellHolder(h *hold, c *Command, why Cause, detail string) {
	if why == CauseGivenBack && h.session == c.Session {
		return
	}
	n := Notice{
		Type: NoticeLost, Session: h.session, Name: h.Name, RequestID: h.ID, Sealed: h.Sealed, Token: h.token,
		Cause: why, Detail: detail,
	}
	if why == CauseForced {
		n.By, n.Principal = c.By, string(c.Principal)
	}
	m.notices = append(m.notices, n)
}

// tellWaiter notifies the session of w that the wait ended, unless the command is its own.
func (m *Machine) tellWaiter(w *wait, c *Command, why Cause) {
	if w.session != c.Session {
		m.notices = append(m.notices, Notice{
			Type: NoticeLost, Session: w.session, Ticket: w.ticket, Name: c.Name, RequestID: c.RequestID,
			Sealed: w.sealed(c.Name, c.RequestID), Cause: why,
		})
	}
}

func (m *Machine) setLimits(c *Command) *Result {
	if c.Limits == nil {
		return invalid("Limits", "there are none")
	}
	if l, wrong := c.Limits.Wrong(); wrong {
		return invalid(l.Field, "%d is not within 1 and %d", *l.Value, l.Most)
	}
	m.limits = c.Limits.At(m.level)
	return done
}

// checkpoint adopts the deadlines as they are: the leader of the entry knows of every acknowledged renewal.
func (m *Machine) checkpoint(c *Command) *Result {
	if m.level < LevelDeadlines {
		return invalid("Op", "the level is %d", m.level)
	}
	for _, d := range c.Deadlines {
		if d.At <= 0 {
			return invalid("Deadlines", "%v is not positive", d.At)
		}
	}
	m.clock = c.Clock
	for _, d := range c.Deadlines {
		if s := m.sessions[d.Session]; s != nil {
			s.due = d.At
		}
	}
	return done
}

func (m *Machine) raiseLevel(c *Command) *Result {
	if m.level < LevelHiddenIDs && c.Level >= LevelHiddenIDs {
		m.hide()
	}
	m.level = max(m.level, c.Level)
	return done
}
