package machine

import (
	"cmp"
	"slices"
)

// Apply carries out one command and returns its result, and its effects on others, in order.
//
// at is the leader's wall clock when it made the log entry, in Unix nanoseconds (Batch.At). It is kept for people to
// read, never goes back within the machine, and does not affect any decision.
//
// Apply returns a code for every command, and never panics. A command that was not carried out (any Code but OK,
// Granted and Queued) has no effect, except that its result is remembered, that Acked and Target count, and that it
// removes the deadline of its session.
func (m *Machine) Apply(at int64, c *Command) (Result, []Notice) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now = max(m.now, at)
	r := m.once(c)
	notices := m.notices
	m.notices = nil
	return *r, notices
}

// once carries out c, unless it was carried out before.
func (m *Machine) once(c *Command) *Result {
	s := m.sessions[c.Session]
	if s != nil && c.Op != OpExpire {
		s.due = 0
	}
	if r := checkCall(c); r != nil {
		return r
	}
	if s == nil && c.Session != (SessionID{}) && c.Op != OpOpenSession {
		return &Result{Code: CodeNoSession}
	}
	if c.Seq == 0 && c.Target == 0 {
		return m.carryOut(s, c)
	}
	s.acknowledge(c.Acked)
	if c.Seq != 0 {
		if c.Seq <= s.acked {
			return &Result{Code: CodeStale}
		}
		if i, found := s.find(c.Seq); found {
			return m.again(s, c, s.results[i].result)
		}
	}
	_, found := s.find(c.Target)
	giveUp := !found && c.Target > s.acked
	if len(s.results)+oneIf(c.Seq != 0)+oneIf(giveUp) > m.limits.Unacked {
		return limited("Unacked")
	}
	r := m.carryOut(s, c)
	if c.Seq != 0 {
		s.remember(c.Seq, memorable(r))
	}
	if giveUp {
		s.remember(c.Target, cancelled)
	}
	return r
}

var cancelled = &Result{Code: CodeCancelled}

func oneIf(b bool) int {
	if b {
		return 1
	}
	return 0
}

// carryOut executes c for the first time. s is nil where no session is given.
func (m *Machine) carryOut(s *session, c *Command) *Result {
	var r *Result
	switch c.Op {
	case OpOpenSession:
		r = m.openSession(s, c)
	case OpCloseSession:
		r = m.endSession(s, EventReleased, CauseClosed, c.Linger)
	case OpExpire:
		r = m.endSession(s, EventExpired, CauseExpired, c.Linger)
	case OpAcquire:
		r = m.acquire(s, c)
	case OpCancelWait:
		r = m.cancelWait(c)
	case OpRelease:
		r = m.release(c)
	case OpForceRelease:
		r = m.forceRelease(c)
	case OpFree:
		r = m.free(c)
	case OpSetLimits:
		r = m.setLimits(c)
	case OpRaiseLevel:
		r = m.raiseLevel(c)
	case OpMove:
		r = m.move(s, c)
	case OpCheckpoint:
		r = m.checkpoint(c)
	case OpRenew:
		r = done
	case OpSetRules:
		r = m.setRules(c)
	case OpSetPolicies:
		r = m.setPolicies(c)
	}
	m.settle()
	return r
}

// settle grants waiters of the names that lost a claim.
//
// The order of the names affects only the order of tokens of different names: a grant excludes no waiter with an
// earlier ticket, because it is compatible with all of them.
func (m *Machine) settle() {
	for i := 0; i < len(m.touched); i++ { // a grant may touch more names
		e := m.touched[i]
		if e.stirred {
			m.settleName(e)
		}
		e.touched, e.stirred = false, false
		if e.empty() {
			delete(m.names, e.name)
			m.sorted.Delete(e)
		}
	}
	clear(m.touched)
	m.touched = m.touched[:0]
}

func (m *Machine) settleName(e *entry) {
	ahead := claim{permits: e.limit, limit: e.limit} // the claims of the visited waiters that still wait
	for i := 0; i < len(e.waits().queue); {
		if (ahead.modes|e.held.modes())&exclusive != 0 || ahead.modes&permits != 0 {
			return // no later waiter can have it
		}
		m.looked++
		p := e.line.queue[i]
		if compatible(ahead, *p.claim) && m.fits(p.wait.claims, p.wait.ticket) {
			m.grantWait(p.wait) // leaves the queue
			continue
		}
		ahead.modes |= p.claim.modes
		i++
	}
}

// fits reports whether all of claims are compatible with every holder and with every waiter before ticket.
func (m *Machine) fits(claims []claim, ticket uint64) bool {
	for _, c := range claims { // cheap, and usually enough to refuse
		if e := m.names[c.name]; e != nil && !compatible(e.holders(), c) {
			return false
		}
	}
	for _, c := range claims {
		if e := m.names[c.name]; e != nil && !compatible(e.ahead(ticket), c) {
			return false
		}
	}
	return true
}

func (m *Machine) grantWait(w *wait) {
	m.removeWait(w)
	m.notices = append(m.notices, Notice{
		Type: NoticeGranted, Session: w.session, Ticket: w.ticket, Grants: m.grant(w.session, w.requests, w.ticket),
	})
}

// acknowledge forgets the results up to seq.
func (s *session) acknowledge(seq uint64) {
	if seq <= s.acked {
		return
	}
	s.acked = seq
	n, found := s.find(seq)
	if found {
		n++
	}
	clear(s.results[:n])
	s.results = s.results[n:]
	if len(s.results) == 0 {
		s.results = nil
	}
}

func (s *session) find(seq uint64) (int, bool) {
	return slices.BinarySearchFunc(s.results, seq, func(r remembered, seq uint64) int {
		return cmp.Compare(r.seq, seq)
	})
}

// remembered is the result of one command of a session.
type remembered struct {
	seq uint64
	// result never changes. It is nil after a grant or a place in the queue: the answer is the present state.
	result *Result
}

func (s *session) remember(seq uint64, r *Result) {
	i, _ := s.find(seq)
	s.results = slices.Insert(s.results, i, remembered{seq, r})
}

func memorable(r *Result) *Result {
	if r.Code == CodeGranted || r.Code == CodeQueued {
		return nil
	}
	return r
}

// again answers a repeated command with its remembered result.
func (m *Machine) again(s *session, c *Command, r *Result) *Result {
	if r != nil {
		return r
	}
	var now *Result
	switch c.Op {
	case OpAcquire:
		now = m.known(s.id, c.Requests)
	case OpCancelWait, OpMove:
		now = m.standing(s.id, c)
	default:
		return &Result{Code: CodeConflict, Field: "Seq", Detail: "the number is that of another command"}
	}
	if now == nil || now.Code == CodeConflict {
		return notHeld()
	}
	return now
}

// standing returns the state of the request that c names in session s, as the result of a command that found it
// granted or queued.
func (m *Machine) standing(s SessionID, c *Command) *Result {
	h, w := m.find(c.Name, c.RequestID)
	switch {
	case h != nil && (h.session == s || c.Op == OpCancelWait):
		return &Result{Code: CodeGranted, Grants: []Grant{h.grant()}}
	case w != nil && w.session == s && c.Op == OpMove:
		return &Result{Code: CodeQueued, Ticket: w.ticket}
	}
	return nil
}
