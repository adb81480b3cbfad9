package machine

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// SessionEntry is one hold or one place in a queue of a session.
type SessionEntry struct {
	Name      string
	RequestID string
	Sealed    string        // see Request.Sealed
	Token     fencing.Token // zero: it waits
}

// SessionPage is a part of a session's holds and waits.
type SessionPage struct {
	TTL time.Duration
	// Revision of the machine at the time of the look.
	Revision uint64
	Entries  []SessionEntry // by name, then by request id
	More     bool           // there are names after the last one
}

// SessionPage returns the first limit entries of a session whose names come after the name after, and all further
// entries of the last name; false if there is no such session. It visits the whole session: some milliseconds for
// 100,000 holds, during which Apply waits.
func (m *Machine) SessionPage(id SessionID, after string, limit int) (SessionPage, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	s := m.sessions[id]
	if s == nil {
		return SessionPage{}, false
	}
	limit = max(limit, 1)
	first := firstEntries{
		after: after, limit: limit, entries: make([]SessionEntry, 0, min(4*limit, len(s.holds)+len(s.waits))),
	}
	for _, h := range s.holds {
		first.add(&h.Request, h.token)
	}
	for _, w := range s.waits {
		for i := range w.requests {
			first.add(&w.requests[i], 0)
		}
	}
	first.prune()
	return SessionPage{TTL: s.ttl, Revision: m.revision, Entries: first.entries, More: first.more}, true
}

// firstEntries are the first of the added entries, and a bounded number of others until prune.
type firstEntries struct {
	after   string
	limit   int
	entries []SessionEntry
	more    bool   // some entries were dropped
	last    string // the name of the last kept entry; valid if more
}

func (f *firstEntries) add(r *Request, token fencing.Token) {
	switch {
	case r.Name <= f.after:
	case f.more && r.Name > f.last:
	default:
		f.entries = append(f.entries, SessionEntry{r.Name, r.ID, r.Sealed, token})
		if len(f.entries) >= 4*f.limit && len(f.entries) == cap(f.entries) { // instead of more memory
			f.prune()
		}
	}
}

// prune sorts the entries and drops the names beyond the limit.
func (f *firstEntries) prune() {
	slices.SortFunc(f.entries, func(a, b SessionEntry) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.RequestID, b.RequestID))
	})
	for n := f.limit; n < len(f.entries); n++ {
		if f.entries[n].Name != f.entries[n-1].Name {
			f.more, f.last = true, f.entries[n-1].Name
			clear(f.entries[n:])
			f.entries = f.entries[:n]
		}
	}
}
