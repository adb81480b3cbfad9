package machine

import (
	"cmp"
	"iter"
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
	HoldID    string
	Owner     string
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

// Info is one name.
type Info struct {
	Name    string
	Holders []Hold // by token; of this very name, not of its descendants
	Waiters int    // waits that have a request for this very name
	// Revision of the machine when it was looked at: EventsSince it follows without a gap.
	Revision uint64
}

// SessionTTL is what the leader needs to time a session.
type SessionTTL struct {
	ID  SessionID
	TTL time.Duration
	// Due is when the session ends by the cluster's clock, if nothing of it goes through the log before. Zero: some
	// leader may have renewed it without the log, up to now.
	Due time.Duration
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
		Owner: h.Owner, Kind: h.Kind, Permits: h.Permits, Limit: h.Limit, Metadata: h.Metadata,
		MinHold: h.MinHold, Since: h.since, Hierarchical: h.Hierarchical, Lingering: h.lingering(),
	}
}

// List returns up to limit names that start with prefix and come after the name after, sorted by bytes, and whether
// there are more. Names that are only held by lingering holds or only waited for are included; names that are only
// ancestors of others are not. It looks at as many names as it returns, and at their ancestors.
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

// SessionOpen tells whether the session is open. It costs one look into a map.
func (m *Machine) SessionOpen(id SessionID) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.sessions[id] != nil
}

// Sessions returns all open sessions, sorted by id: for operators, and for a new leader, who gives each a full TTL.
func (m *Machine) Sessions() []SessionUsage {
	m.mu.RLock()
	defer m.mu.RUnlock()
	all := make([]SessionUsage, 0, len(m.sessions))
	for _, s := range m.sessionsByID() {
		all = append(all, SessionUsage{SessionTTL{s.id, s.ttl, s.due}, s.client, len(s.holds), len(s.waits)})
	}
	return all
}

// Minimums returns all holds that have a MinHold, by token, lingering ones among them: for a new leader, who gives each
// the full time. It looks at every hold.
func (m *Machine) Minimums() []Hold {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var found []*hold
	for _, h := range m.holds {
		if h.MinHold > 0 {
			found = append(found, h)
		}
	}
	slices.SortFunc(found, func(a, b *hold) int { return cmp.Compare(a.token.Order(), b.token.Order()) })
	return show(len(found), slices.Values(found))
}
