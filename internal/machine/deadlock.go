package machine

import (
	"math"
	"slices"
)

// link is one step of a search for a cycle: a holder or a waiter that blocks the previous link, because of one name.
type link struct {
	name   string
	hold   *hold
	wait   *wait
	parent int // index of the link before; -1 for a direct blocker of the newcomer
}

// cycle returns the cycle that a wait of c, in session s, for claims would close, or nil.
//
// It searches breadth first, from the newcomer's blockers towards the holds in its Under.
func (m *Machine) cycle(s SessionID, c *Command, claims []claim) []Blocker {
	if len(c.Under) == 0 {
		return nil // no cycle can close
	}
	var links []link
	steps := m.limits.DeadlockSteps
	seen := map[*wait]bool{}
	follow := func(parent int, claims []claim, ticket uint64) {
		m.blockers(claims, ticket, &steps, func(name string, h *hold, w *wait) bool {
			links = append(links, link{name, h, w, parent})
			return true
		})
	}
	followWait := func(parent int, w *wait) {
		if !seen[w] {
			seen[w] = true
			follow(parent, w.claims, w.ticket)
		}
	}
	follow(-1, claims, math.MaxUint64)
	for i := 0; i < len(links); i++ {
		switch h, w := links[i].hold, links[i].wait; {
		case w != nil:
			followWait(i, w)
		case h.lingering(): // it has no owner
		case slices.Contains(c.Under, h.ID):
			r := &c.Requests[0]
			return path(links, i, Blocker{Session: s, Owner: r.Owner, HoldID: r.HoldID, Waits: true})
		default:
			for _, w := range m.under[h.ID] {
				followWait(i, w)
			}
		}
	}
	return nil
}

// path returns the newcomer and all links from its blocker to the last one, which is its own hold.
func path(links []link, last int, newcomer Blocker) []Blocker {
	var cycle []Blocker
	for i := last; i >= 0; i = links[i].parent {
		newcomer.Name = links[i].name
		cycle = append(cycle, blockerOf(links[i].name, links[i].hold, links[i].wait))
	}
	cycle = append(cycle, newcomer)
	slices.Reverse(cycle)
	return cycle
}

// blockers yields every holder, and every waiter before ticket, that claims must wait for, with the name that both
// want, until yield returns false or it has visited *steps names, holders and waiters.
func (m *Machine) blockers(claims []claim, ticket uint64, steps *int, yield func(string, *hold, *wait) bool) {
	for _, c := range claims {
		if *steps--; *steps < 0 {
			return
		}
		if e := m.names[c.name]; e != nil && !e.blockers(c, ticket, steps, yield) {
			return
		}
	}
}

func (e *entry) blockers(c claim, ticket uint64, steps *int, yield func(string, *hold, *wait) bool) bool {
	if !compatible(e.holders(), c) { // otherwise no holder is in the way
		for h := range e.holds.all {
			if *steps--; *steps < 0 || !compatible(h.own(), c) && !yield(e.name, h, nil) {
				return false
			}
		}
		for h := range e.intents.all {
			if *steps--; *steps < 0 || !compatible(claim{modes: h.intent()}, c) && !yield(e.name, h, nil) {
				return false
			}
		}
	}
	if compatible(e.ahead(ticket), c) {
		return true
	}
	for _, p := range e.waits().queue {
		if p.wait.ticket >= ticket {
			break
		}
		if *steps--; *steps < 0 {
			return false
		}
		if !compatible(claim{modes: p.claim.modes, permits: e.limit, limit: e.limit}, c) &&
			!yield(e.name, nil, p.wait) {
			return false
		}
	}
	return true
}
