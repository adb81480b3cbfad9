package machine

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/principal"
)

// hold is one hold. It never changes, so that frozen states can share it: when it begins to linger, or moves to
// another session, it is replaced.
type hold struct {
	Request
	token   fencing.Token
	session SessionID // zero: lingering
	since   int64
	max     time.Duration // the maximum hold time, by the policy at the grant; zero: none
}

// wait is one ticket. It never changes: when it moves to another session, it is replaced.
type wait struct {
	ticket   uint64
	session  SessionID
	requests []Request
	under    []string // ids of the holds under which it waits
	since    int64
	claims   []claim // of requests
}

// session is the unit that the leader times.
type session struct {
	id     SessionID
	ttl    time.Duration
	due    time.Duration // see SessionTTL.Due
	client string        // empty if unknown
	// principal alone may attach it, and take over its holds and waits
	principal principal.Principal
	owner     string // of its last hold: most holds have the same owner, and share its memory
	acked     uint64
	results   []remembered // by seq
	holds     map[uint64]*hold
	waits     map[uint64]*wait
}

// requestKey identifies one request for one name.
type requestKey struct{ name, id string }

// claimant is the hold or the wait of a request for a name.
type claimant struct {
	hold *hold
	wait *wait
}

// Only the following functions, and the functions in move.go, add, remove and replace holds and waits. They maintain
// the state that is computed from these.

func (m *Machine) addHold(h *hold) {
	m.holds[h.token.Order()] = h
	for _, c := range m.claimsOf(h) {
		m.open(c).addHold(h, c)
	}
	m.own(h)
}

// shareOwner lets h, which is new, share the owner text of the last hold of its session, if they are the same.
func (m *Machine) shareOwner(h *hold) {
	s := m.sessions[h.session]
	switch {
	case s == nil:
	case s.owner == h.Owner:
		h.Owner = s.owner
	default:
		s.owner = h.Owner
	}
}

// own adds h to its session, unless it lingers.
func (m *Machine) own(h *hold) {
	s := m.sessions[h.session]
	if s == nil {
		return
	}
	if h.Kind != Exclusive {
		m.claimants[requestKey{h.Name, h.ID}] = claimant{hold: h}
	}
	if s.holds == nil {
		s.holds = map[uint64]*hold{}
	}
	s.holds[h.token.Order()] = h
	m.use(s.client, Usage{Holds: 1})
}

func (m *Machine) removeHold(h *hold) {
	delete(m.holds, h.token.Order())
	for _, c := range m.claimsOf(h) {
		e := m.names[c.name]
		e.removeHold(h, c)
		m.touch(e, c)
	}
	m.disown(h)
}

// disown undoes own.
func (m *Machine) disown(h *hold) {
	s := m.sessions[h.session]
	if s == nil {
		return
	}
	if h.Kind != Exclusive {
		delete(m.claimants, requestKey{h.Name, h.ID})
	}
	delete(s.holds, h.token.Order())
	m.use(s.client, Usage{Holds: -1})
}

func (m *Machine) addWait(w *wait) {
	m.waits[w.ticket] = w
	for i := range w.claims {
		m.open(w.claims[i]).addWait(w, &w.claims[i])
	}
	m.ownWait(w)
}

// ownWait adds w to its session.
func (m *Machine) ownWait(w *wait) {
	for i := range w.requests {
		m.claimants[requestKey{w.requests[i].Name, w.requests[i].ID}] = claimant{wait: w}
	}
	if s := m.sessions[w.session]; s != nil {
		if s.waits == nil {
			s.waits = map[uint64]*wait{}
		}
		s.waits[w.ticket] = w
		m.use(s.client, Usage{Waits: 1})
	}
	for _, id := range w.under {
		all := m.under[id]
		at, _ := slices.BinarySearchFunc(all, w, func(x, y *wait) int { return cmp.Compare(x.ticket, y.ticket) })
		m.under[id] = slices.Insert(all, at, w)
	}
}

func (m *Machine) removeWait(w *wait) {
	delete(m.waits, w.ticket)
	for i := range w.claims {
		e := m.names[w.claims[i].name]
		e.removeWait(w, &w.claims[i])
		m.touch(e, w.claims[i])
	}
	m.disownWait(w)
}

// disownWait undoes ownWait.
func (m *Machine) disownWait(w *wait) {
	for i := range w.requests {
		delete(m.claimants, requestKey{w.requests[i].Name, w.requests[i].ID})
	}
	if s := m.sessions[w.session]; s != nil {
		delete(s.waits, w.ticket)
		m.use(s.client, Usage{Waits: -1})
	}
	for _, id := range w.under {
		rest := slices.DeleteFunc(m.under[id], func(o *wait) bool { return o == w })
		if m.under[id] = rest; len(rest) == 0 {
			delete(m.under, id)
		}
	}
}

// find returns the hold or the wait of the request with this id for name. Lingering holds belong to no request.
func (m *Machine) find(name, id string) (*hold, *wait) {
	e := m.names[name]
	if e == nil {
		return nil, nil
	}
	if e.held.modes()&exclusive != 0 {
		if h := e.holds.first(); h.ID == id && !h.lingering() { // it is alone
			return h, nil
		}
	}
	c := m.claimants[requestKey{name, id}]
	return c.hold, c.wait
}

// claimsOf returns the claims of h. The next call overwrites the slice.
func (m *Machine) claimsOf(h *hold) []claim {
	m.scratch = appendClaims(m.scratch[:0], &h.Request)
	return m.scratch
}

// open returns the entry of the name that c claims.
func (m *Machine) open(c claim) *entry {
	e := m.names[c.name]
	if e == nil {
		e = &entry{name: c.name, limit: c.limit, tree: c.tree}
		m.names[c.name] = e
		m.sorted.ReplaceOrInsert(e)
	}
	return e
}

// touch notes that e lost c: settle checks its waiters, if one of them may be granted now, and drops e if it is
// unused.
func (m *Machine) touch(e *entry, c claim) {
	e.stirred = e.stirred || e.frees(c)
	if !e.touched {
		e.touched = true
		m.touched = append(m.touched, e)
	}
}

// sorted returns the values of by in the order of their keys. The order of a map must not affect the state or an
// answer.
func sorted[K cmp.Ordered, V any](by map[K]V) []V {
	values := make([]V, 0, len(by))
	for _, k := range slices.Sorted(maps.Keys(by)) {
		values = append(values, by[k])
	}
	return values
}
