package machine

import "slices"

// Explanation explains the state of one name: its holders, its waiters, and the waits of the holders themselves.
type Explanation struct {
	Name string
	// Holders has the first holders, Queue the first waiters in their order, and Waiters counts all.
	Holders []ExplainedHold
	Queue   []ExplainedWait
	Waiters int
	// Forced is the last forced release of the name among the events that this replica keeps, or nil.
	Forced *Event
}

// ExplainedHold is a hold with the client of its session, and the names that its holder waits for: under the hold, or on
// the same session.
type ExplainedHold struct {
	Hold
	Client   string
	WaitsFor []string
}

// ExplainedWait is one place in a queue.
type ExplainedWait struct {
	Owner, HoldID, Client string
	Session               SessionID
	Kind                  Kind
	Permits, Limit        uint32
	Since                 int64 // Unix nanoseconds by the leader's clock; for people
	// Names are all names of the wait.
	Names []string
	// Under are the hold ids of the holds under which it waits.
	Under []string
}

const (
	// maxExplained bounds the names of one explanation, and maxShown the holders and the waiters of one name.
	maxExplained = 64
	maxShown     = 100
	// maxSessionWaits bounds the waits of a session that are checked: a session may have many that belong to other
	// holders.
	maxSessionWaits = 1000
)

// Explain returns an explanation of name, and of each name that its holders wait for, and so on. It returns at most
// maxExplained, and reports whether there are more.
func (m *Machine) Explain(name string) (all []Explanation, more bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	names := []string{name}
	for i := 0; i < len(names); i++ {
		if i == maxExplained {
			return all, true
		}
		x := m.explain(names[i])
		for _, h := range x.Holders {
			for _, n := range h.WaitsFor {
				if !slices.Contains(names, n) {
					names = append(names, n)
				}
			}
		}
		all = append(all, x)
	}
	return all, false
}

func (m *Machine) explain(name string) Explanation {
	x := Explanation{Name: name, Forced: m.lastForced(name)}
	e := m.names[name]
	if e == nil {
		return x
	}
	x.Waiters = e.waitingHere()
	for h := range e.holds.all {
		if len(x.Holders) == maxShown {
			break
		}
		x.Holders = append(x.Holders, ExplainedHold{h.show(), m.clientOf(h.session), m.waitsOf(h)})
	}
	for _, p := range e.waits().queue {
		if len(x.Queue) == maxShown {
			break
		}
		x.Queue = append(x.Queue, m.explainWait(name, p.wait))
	}
	return x
}

func (m *Machine) explainWait(name string, w *wait) ExplainedWait {
	r := &w.requests[0]
	x := ExplainedWait{Client: m.clientOf(w.session), Session: w.session, Since: w.since}
	for i := range w.requests {
		if x.Names = append(x.Names, w.requests[i].Name); w.requests[i].Name == name {
			r = &w.requests[i]
		}
	}
	x.Owner, x.HoldID, x.Kind, x.Permits, x.Limit = r.Owner, r.HoldID, r.Kind, r.Permits, r.Limit
	if s := m.sessions[w.session]; s != nil && len(w.under) > 0 {
		for _, h := range sorted(s.holds) {
			if slices.Contains(w.under, h.ID) {
				x.Under = append(x.Under, h.HoldID)
			}
		}
	}
	return x
}

// waitsOf returns the names that the holder of h waits for.
func (m *Machine) waitsOf(h *hold) (names []string) {
	add := func(w *wait) {
		for i := range w.requests {
			if n := w.requests[i].Name; !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
	}
	for _, w := range m.under[h.ID] {
		add(w)
	}
	if s := m.sessions[h.session]; s != nil && len(s.waits) <= maxSessionWaits {
		for _, w := range sorted(s.waits) {
			if len(w.under) == 0 {
				add(w)
			}
		}
	}
	return names
}

func (m *Machine) clientOf(id SessionID) string {
	if s := m.sessions[id]; s != nil {
		return s.client
	}
	return ""
}

// lastForced returns the last forced release of a name among the kept events.
func (m *Machine) lastForced(name string) *Event {
	oldest := m.revision - uint64(len(m.past.events))
	for r := m.revision; r > oldest; r-- {
		if e := m.past.events[m.past.index(r)]; e.Type == EventForced && e.Name == name {
			return &e
		}
	}
	return nil
}
