package machine

import (
	"cmp"
	"slices"
)

// entry is one name that is held or waited for, or an ancestor of such a name. There is none for other names.
type entry struct {
	name  string
	limit uint32 // of permits; zero for all other kinds
	tree  bool   // in use hierarchically

	holds   []*hold // of this very name, by token
	intents []*hold // of names below, by token
	queue   []place // by ticket

	held    tally
	waiting tally
	permits uint32 // held

	touched bool // among Machine.touched
}

// place is one wait in one queue.
type place struct {
	wait  *wait
	claim *claim // one of wait.claims
}

// tally counts claims by mode.
type tally [modeCount]int

func (t *tally) add(m modes, n int) {
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

// mixes tells whether c is of the kind and limit that the name is in use with.
func (e *entry) mixes(c claim) bool { return e.tree == c.tree && e.limit == c.limit }

// holders returns what all holders together have of the name.
func (e *entry) holders() claim {
	return claim{modes: e.held.modes(), permits: e.permits, limit: e.limit}
}

// waiters returns what all waiters together want of the name. Whoever wants permits stands before all who come later.
func (e *entry) waiters() claim {
	return claim{modes: e.waiting.modes(), permits: e.limit, limit: e.limit}
}

// ahead returns what those want who wait with a ticket below the given one.
func (e *entry) ahead(ticket uint64) claim {
	all := claim{permits: e.limit, limit: e.limit}
	for _, p := range e.queue {
		if p.wait.ticket >= ticket {
			break
		}
		all.modes |= p.claim.modes
	}
	return all
}

func (e *entry) empty() bool { return len(e.holds) == 0 && len(e.intents) == 0 && len(e.queue) == 0 }

// list returns the list that h belongs into.
func (e *entry) list(h *hold) *[]*hold {
	if e.name == h.Name {
		return &e.holds
	}
	return &e.intents
}

func (e *entry) addHold(h *hold, c claim) {
	list := e.list(h)
	*list = append(*list, h)
	e.held.add(c.modes, 1)
	e.permits += c.permits
}

func (e *entry) removeHold(h *hold, c claim) {
	list := e.list(h)
	if i, found := findHold(*list, h.token.Order()); found {
		*list = slices.Delete(*list, i, i+1)
		e.held.add(c.modes, -1)
		e.permits -= c.permits
	}
}

// replaceHold puts h in the place of the hold with the same token.
func (e *entry) replaceHold(h *hold) {
	list := *e.list(h)
	if i, found := findHold(list, h.token.Order()); found {
		list[i] = h
	}
}

func findHold(list []*hold, order uint64) (int, bool) {
	return slices.BinarySearchFunc(list, order, func(h *hold, order uint64) int {
		return cmp.Compare(h.token.Order(), order)
	})
}

func (e *entry) addWait(w *wait, c *claim) {
	e.queue = append(e.queue, place{w, c})
	e.waiting.add(c.modes, 1)
}

func (e *entry) removeWait(w *wait, c *claim) {
	i, found := e.place(w.ticket)
	switch {
	case !found:
		return
	case i == 0: // the usual case, without moving the others
		e.queue[0] = place{}
		e.queue = e.queue[1:]
	default:
		e.queue = slices.Delete(e.queue, i, i+1)
	}
	e.waiting.add(c.modes, -1)
}

// replaceWait puts w, with claim c, in the place with the same ticket.
func (e *entry) replaceWait(w *wait, c *claim) {
	if i, found := e.place(w.ticket); found {
		e.queue[i] = place{w, c}
	}
}

func (e *entry) place(ticket uint64) (int, bool) {
	return slices.BinarySearchFunc(e.queue, ticket, func(p place, ticket uint64) int {
		return cmp.Compare(p.wait.ticket, ticket)
	})
}

func (h *hold) lingering() bool { return h.session == SessionID{} }
