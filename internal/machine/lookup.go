package machine

import (
	"cmp"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/principal"
)

// Hold is the public view of one hold.
type Hold struct {
	Name      string
	Token     fencing.Token
	Session   SessionID // zero if Lingering
	RequestID string
	HoldID    string
	Nonce     fencing.Nonce
	Owner     string
	Kind      Kind
	Permits   uint32
	Limit     uint32
	Metadata  map[string]string
	MinHold   time.Duration
	MaxHold   time.Duration // see Grant.MaxHold
	Since     int64         // Unix nanoseconds by the leader's clock; for people
	// Hierarchical, and the hold therefore excludes others on ancestors and descendants of Name.
	Hierarchical bool
	// Lingering: it has no holder, and its minimum keeps the name closed until OpFree.
	Lingering bool
}

// Info is one name.
type Info struct {
	Name    string
	Holders []Hold          // by token; of this very name, not of its descendants
	Waiters int             // waits that have a request for this very name
	Queue   []ExplainedWait // from Look only: the first maxShown waits in their order
	// Revision of the machine at the time of the look: EventsSince continues from it without a gap.
	Revision uint64
}

// SessionTTL is the state that the leader needs to time a session.
type SessionTTL struct {
	ID  SessionID
	TTL time.Duration
	// Due is the time by the cluster's clock at which the session ends, unless one of its commands goes through the log
	// before. Zero: a leader may have renewed it without the log, up to now.
	Due time.Duration
}

// Holder returns the state of name. A name without holders has an empty list.
func (m *Machine) Holder(name string) Info {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.info(name)
}

// Look returns the state of name with its queue.
func (m *Machine) Look(name string) Info {
	m.mu.RLock()
	defer m.mu.RUnlock()
	info := m.info(name)
	if e := m.names[name]; e != nil {
		info.Queue = m.queueOf(name, e)
	}
	return info
}

// Use describes the use of a name.
type Use struct {
	Owner string // of one holder, or of a waiter if there is no holder
	Kind  Kind
	Limit uint32
}

// Use returns the use of name; the zero value if this very name has no holders and no waiters.
func (m *Machine) Use(name string) (use Use) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	e := m.names[name]
	if e == nil {
		return use
	}
	for h := range e.holds.all {
		return Use{h.Owner, h.Kind, h.Limit}
	}
	for _, p := range e.waits().queue {
		for _, r := range p.wait.requests {
			if r.Name == name {
				return Use{r.Owner, r.Kind, r.Limit}
			}
		}
	}
	return use
}

// queueOf returns the first waits of a name that have a request for this very name.
func (m *Machine) queueOf(name string, e *entry) (queue []ExplainedWait) {
	for _, p := range e.waits().queue {
		if len(queue) == maxShown {
			break
		}
		if x := m.explainWait(name, p.wait); slices.Contains(x.Names, name) {
			queue = append(queue, x)
		}
	}
	return queue
}

func (m *Machine) info(name string) Info {
	info := Info{Name: name, Revision: m.revision}
	if e := m.names[name]; e != nil {
		info.Holders = show(e.holds.len(), e.holds.all)
		info.Waiters = e.waitingHere()
	}
	return info
}

// waitingHere counts the waits that have a request for this very name.
func (e *entry) waitingHere() int {
	n := int32(0)
	for i, waiting := range e.waits().waiting {
		if (&claim{modes: 1 << i}).isOwn() {
			n += waiting
		}
	}
	return int(n)
}

func show(n int, holds iter.Seq[*hold]) []Hold {
	shown := make([]Hold, 0, n)
	for h := range holds {
		shown = append(shown, h.show())
	}
	return shown
}

func (h *hold) show() Hold {
	return Hold{
		Name: h.Name, Token: h.token, Session: h.session, RequestID: h.ID, HoldID: h.HoldID,
		Nonce: h.Nonce, Owner: h.Owner, Kind: h.Kind, Permits: h.Permits, Limit: h.Limit, Metadata: h.Metadata,
		MinHold: h.MinHold, MaxHold: h.max, Since: h.since, Hierarchical: h.Hierarchical, Lingering: h.lingering(),
	}
}

// List returns up to limit names that start with prefix and come after the name after, sorted by bytes, and whether
// there are more. The list includes names with only lingering holds or only waiters, but not names that are only
// ancestors of others. It visits as many names as it returns, and their ancestors.
func (m *Machine) List(prefix, after string, limit int) (infos []Info, more bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	m.sorted.AscendGreaterOrEqual(&entry{name: max(prefix, after)}, func(e *entry) bool {
		switch {
		case !strings.HasPrefix(e.name, prefix):
			return false
		case e.name == after, e.holds.len() == 0 && e.waitingHere() == 0:
		case len(infos) >= limit:
			more = true
			return false
		default:
			infos = append(infos, m.info(e.name))
		}
		return true
	})
	return infos, more
}

// SessionOpen reports whether the session is open, by one lookup in a map.
func (m *Machine) SessionOpen(id SessionID) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.sessions[id] != nil
}

// Principal returns the only principal that may attach the session; false if it is not open.
func (m *Machine) Principal(id SessionID) (principal.Principal, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if s := m.sessions[id]; s != nil {
		return s.principal, true
	}
	return principal.Nobody, false
}

// Sessions returns all open sessions, sorted by id: for operators, and for a new leader, which gives each a full TTL.
func (m *Machine) Sessions() []SessionUsage {
	m.mu.RLock()
	defer m.mu.RUnlock()
	all := make([]SessionUsage, 0, len(m.sessions))
	for _, s := range m.sessionsByID() {
		all = append(all, s.usage())
	}
	return all
}

// usage returns a session's holds and waits, for operators.
func (s *session) usage() SessionUsage {
	const most = 10
	u := SessionUsage{
		SessionTTL: SessionTTL{s.id, s.ttl, s.due}, Client: s.client, Principal: s.principal,
		Holds: len(s.holds), Waits: len(s.waits), Owner: s.owner,
	}
	for _, h := range s.holds {
		u.Names = append(u.Names, h.Name)
	}
	slices.Sort(u.Names)
	u.Names = u.Names[:min(most, len(u.Names))]
	for _, w := range s.waits {
		u.Owner = cmp.Or(u.Owner, w.requests[0].Owner)
	}
	return u
}

// LongestTTL returns the longest TTL of an open session.
func (m *Machine) LongestTTL() (longest time.Duration) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, s := range m.sessions {
		longest = max(longest, s.ttl)
	}
	return longest
}

// Timed returns all holds that have a MinHold or a MaxHold, by token, lingering ones included: for a new leader,
// which gives each the full time. It visits every hold.
func (m *Machine) Timed() []Hold {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var found []*hold
	for _, h := range m.holds {
		if h.MinHold > 0 || h.max > 0 {
			found = append(found, h)
		}
	}
	slices.SortFunc(found, func(a, b *hold) int { return cmp.Compare(a.token.Order(), b.token.Order()) })
	return show(len(found), slices.Values(found))
}
