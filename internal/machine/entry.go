package machine

import (
	"cmp"
	"slices"
)

// entry is one name that is held or waited for, or an ancestor of such a name. Other names have no entry.
type entry struct {
	name  string
	limit uint32 // of permits; zero for all other kinds
	tree  bool   // in use hierarchically

	touched bool // among Machine.touched
	stirred bool // an ended claim may let a waiter in

	held    tally
	permits uint32  // held
	holds   holdSet // of this very name
	intents holdSet // of names below
	line    *line   // nil: nobody has waited yet
}

// line has the waiters of a name. Most names have no line.
type line struct {
	queue   []place             // by ticket
	places  [modeCount][]uint64 // the tickets of the queue by mode, each list in order
	waiting tally
}

// nobody is the line of names without one. It stays empty.
var nobody line

// waits returns the line, for reading.
func (e *entry) waits() *line {
	if e.line == nil {
		return &nobody
	}
	return e.line
}

// place is one wait in one queue.
type place struct {
	wait  *wait
	claim *claim // one of wait.claims
}

// tally counts claims by mode.
type tally [modeCount]int32

func (t *tally) add(m modes, n int32) {
	for i := range t {
		if m&(1<<i) != 0 {
			t[i] += n
		}
	}
}

func (t *tally) modes() (m modes) {
	for i, n := range t {
		if n > 0 {
			m |= 1 << i
		}
	}
	return m
}

// mixes reports whether c has the hierarchy and the limit that the name is in use with.
func (e *entry) mixes(c claim) bool { return e.tree == c.tree && e.limit == c.limit }

// holders returns the claim of all holders together.
func (e *entry) holders() claim {
	return claim{modes: e.held.modes(), permits: e.permits, limit: e.limit}
}

// waiters returns the claim of all waiters together. A waiter for permits stands before all later ones.
func (e *entry) waiters() claim {
	return claim{modes: e.waits().waiting.modes(), permits: e.limit, limit: e.limit}
}

// ahead returns the claims of the waiters with a ticket below the given one.
func (e *entry) ahead(ticket uint64) claim {
	all := claim{permits: e.limit, limit: e.limit}
	for i, tickets := range e.waits().places {
		if len(tickets) > 0 && tickets[0] < ticket {
			all.modes |= 1 << i
		}
	}
	return all
}

// frees reports whether the end of c, the claim of a holder or a waiter of the entry, may let a waiter in.
func (e *entry) frees(c claim) bool {
	if c.modes&permits != 0 {
		return len(e.waits().queue) > 0
	}
	gone := c.modes &^ e.held.modes() // others hold the name in the same way
	return !compatible(claim{modes: gone}, claim{modes: e.waits().waiting.modes()})
}

func (e *entry) empty() bool {
	return e.holds.len() == 0 && e.intents.len() == 0 && len(e.waits().queue) == 0
}

// list returns the set for h.
func (e *entry) list(h *hold) *holdSet {
	if e.name == h.Name {
		return &e.holds
	}
	return &e.intents
}

func (e *entry) addHold(h *hold, c claim) {
	e.list(h).put(h)
	e.held.add(c.modes, 1)
	e.permits += c.permits
}

func (e *entry) removeHold(h *hold, c claim) {
	if e.list(h).remove(h) {
		e.held.add(c.modes, -1)
		e.permits -= c.permits
	}
}

// replaceHold replaces the hold with the same token by h.
func (e *entry) replaceHold(h *hold) {
	e.list(h).put(h)
}

func (e *entry) addWait(w *wait, c *claim) {
	if e.line == nil {
		e.line = &line{}
	}
	l := e.line
	l.queue = append(l.queue, place{w, c})
	l.waiting.add(c.modes, 1)
	for i := range l.places {
		if c.modes&(1<<i) != 0 {
			l.places[i] = append(l.places[i], w.ticket)
		}
	}
}

func (e *entry) removeWait(w *wait, c *claim) {
	l := e.waits()
	i, found := l.place(w.ticket)
	switch {
	case !found:
		return
	case i == 0: // the usual case, without moving the others
		l.queue[0] = place{}
		l.queue = l.queue[1:]
	default:
		l.queue = slices.Delete(l.queue, i, i+1)
	}
	l.waiting.add(c.modes, -1)
	for i := range l.places {
		if c.modes&(1<<i) == 0 {
			continue
		}
		switch at, found := slices.BinarySearch(l.places[i], w.ticket); {
		case !found:
		case at == 0:
			l.places[i] = l.places[i][1:]
		default:
			l.places[i] = slices.Delete(l.places[i], at, at+1)
		}
	}
}

// replaceWait replaces the place with the same ticket by w, with claim c.
func (e *entry) replaceWait(w *wait, c *claim) {
	if i, found := e.waits().place(w.ticket); found {
		e.line.queue[i] = place{w, c}
	}
}

func (l *line) place(ticket uint64) (int, bool) {
	return slices.BinarySearchFunc(l.queue, ticket, func(p place, ticket uint64) int {
		return cmp.Compare(p.wait.ticket, ticket)
	})
}

func (h *hold) lingering() bool { return h.session == SessionID{} }
