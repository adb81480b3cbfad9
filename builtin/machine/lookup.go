package machine

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Hold is one hold, for those who look.
type Hold struct {
	Name      string
	Token     fencing.Token
	Session   SessionID // zero if Lingering
	RequestID string
	Owner     string
	Agent     string
	Kind      Kind
	Permits   uint32
	Limit     uint32
	Metadata  map[string]string
	MinHold   time.Duration
	Since     int64 // Unix nanoseconds by the leader's clock; for people
	// Hierarchical, and the hold therefore excludes others on ancestors and descendants of Name.
	Hierarchical bool
	// Lingering: nobody holds it, its minimum keeps the name closed until OpFree.
	Lingering bool
}

// Wait is one place in one or several queues, for those who look.
type Wait struct {
	Ticket   uint64
	Session  SessionID
	Requests []Request
	Since    int64 // Unix nanoseconds by the leader's clock; for people
}

// Info is one name.
type Info struct {
	Name    string
	Holders []Hold // by token; of this very name, not of its descendants
	Waiters int    // waits that have a request for this very name
	// Revision of the machine when it was looked at: EventsSince it follows without a gap.
	Revision uint64
}

// Session is one session, for those who look.
type Session struct {
	ID    SessionID
	TTL   time.Duration
	Holds []Hold // by token
	Waits []Wait // by ticket
}

// SessionTTL is what the leader needs to time a session.
type SessionTTL struct {
	ID  SessionID
	TTL time.Duration
}

// Holder returns the state of name. A name that nobody holds has no holders.
func (m *Machine) Holder(name string) Info {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.info(name)
}

func (m *Machine) info(name string) Info {
	info := Info{Name: name, Revision: m.revision}
	if e := m.names[name]; e != nil {
		info.Holders = show(e.holds)
		info.Waiters = e.waitingHere()
	}
	return info
}

// waitingHere counts the waits that have a request for this very name.
func (e *entry) waitingHere() (n int) {
	for _, p := range e.queue {
		if p.claim.isOwn() {
			n++
		}
	}
	return n
}

func show(holds []*hold) []Hold {
	shown := make([]Hold, 0, len(holds))
	for _, h := range holds {
		shown = append(shown, h.show())
	}
	return shown
}

func (h *hold) show() Hold {
	return Hold{
		Name: h.Name, Token: h.token, Session: h.session, RequestID: h.ID, Owner: h.Owner, Agent: h.Agent, Kind: h.Kind,
		Permits: h.Permits, Limit: h.Limit, Metadata: h.Metadata, MinHold: h.MinHold, Since: h.since,
		Hierarchical: h.Hierarchical, Lingering: h.lingering(),
	}
}

// List returns up to limit names that start with prefix and come after the name after, sorted by bytes, and whether there
// are more. Names that are only held by lingering holds or only waited for are included; names that are only ancestors
// of others are not. It looks at every name: some milliseconds for 100,000, during which Apply waits.
func (m *Machine) List(prefix, after string, limit int) (infos []Info, more bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	names := m.firstNames(prefix, after, min(max(limit, 0), len(m.names))+1)
	if more = len(names) > limit; more {
		names = names[:max(limit, 0)]
	}
	for _, name := range names {
		infos = append(infos, m.info(name))
	}
	return infos, more
}

// firstNames returns up to limit names, sorted. It never collects many more than that.
func (m *Machine) firstNames(prefix, after string, limit int) []string {
	var names []string
	last, full := "", false // no name after last is among the first, once there are enough
	for name, e := range m.names {
		if name <= after || full && name > last || !strings.HasPrefix(name, prefix) {
			continue
		}
		if len(e.holds) == 0 && e.waitingHere() == 0 {
			continue
		}
		names = append(names, name)
		if len(names) >= 2*limit {
			slices.Sort(names)
			names = names[:limit]
			last, full = names[limit-1], true
		}
	}
	slices.Sort(names)
	return names[:min(limit, len(names))]
}

// Session returns a session with all that hangs on it.
func (m *Machine) Session(id SessionID) (Session, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	s := m.sessions[id]
	if s == nil {
		return Session{}, false
	}
	shown := Session{ID: id, TTL: s.ttl, Holds: show(sorted(s.holds))}
	for _, w := range sorted(s.waits) {
		shown.Waits = append(shown.Waits, Wait{Ticket: w.ticket, Session: w.session, Requests: w.requests, Since: w.since})
	}
	return shown, true
}

// SessionOpen tells whether the session is open, and its TTL. It costs one look into a map.
func (m *Machine) SessionOpen(id SessionID) (time.Duration, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	s := m.sessions[id]
	if s == nil {
		return 0, false
	}
	return s.ttl, true
}

// Sessions returns all open sessions, sorted by id: for a new leader, who gives each a full TTL.
func (m *Machine) Sessions() []SessionTTL {
	m.mu.RLock()
	defer m.mu.RUnlock()
	all := make([]SessionTTL, 0, len(m.sessions))
	for _, s := range m.sessionsByID() {
		all = append(all, SessionTTL{s.id, s.ttl})
	}
	return all
}

// HoldOf returns the hold of that request for name, lingering ones not among them: for the leader, who decides about
// Command.Linger. Unless t is zero, only a hold with that token.
func (m *Machine) HoldOf(name, requestID string, t fencing.Token) (Hold, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	h, _ := m.find(name, requestID)
	if h == nil || t != 0 && t != h.token {
		return Hold{}, false
	}
	return h.show(), true
}

// Lingering returns all lingering holds, by token: for a new leader, who gives each a full MinHold. It looks at every
// hold.
func (m *Machine) Lingering() []Hold {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var left []*hold
	for _, h := range m.holds {
		if h.lingering() {
			left = append(left, h)
		}
	}
	slices.SortFunc(left, func(a, b *hold) int { return cmp.Compare(a.token.Order(), b.token.Order()) })
	return show(left)
}
