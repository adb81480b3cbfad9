package machine

import (
	"math"
	"slices"
)

// link is one step of a search for a cycle: the agent of a holder or waiter that somebody waits for, because of one name.
type link struct {
	name   string
	hold   *hold
	wait   *wait
	parent int // index of the link before; -1 for what the newcomer itself would wait for
}

// cycle returns the cycle that would be closed if r, in session s, waited for claims; nil if there is none.
//
// It searches breadth first, from what the newcomer would wait for towards what the newcomer has.
func (m *Machine) cycle(s SessionID, r *Request, claims []claim) []Blocker {
	if r.Agent == "" || m.agents[r.Agent] == nil {
		return nil // nobody can wait for it
	}
	var (
		found   = -1
		links   []link
		visited = map[string]bool{}
	)
	follow := func(parent int, claims []claim, ticket uint64) {
		m.blockers(claims, ticket, func(name string, h *hold, w *wait) bool {
			links = append(links, link{name, h, w, parent})
			if agentOf(h, w) == r.Agent {
				found = len(links) - 1
			}
			return found < 0 && len(links) < m.limits.DeadlockSteps
		})
	}
	follow(-1, claims, math.MaxUint64)
	for i := 0; i < len(links) && found < 0; i++ {
		a := agentOf(links[i].hold, links[i].wait)
		if a == "" || visited[a] || m.agents[a] == nil {
			continue
		}
		visited[a] = true
		for _, w := range m.agents[a].waits {
			if found < 0 && len(links) < m.limits.DeadlockSteps {
				follow(i, w.claims, w.ticket)
			}
		}
	}
	if found < 0 {
		return nil
	}
	return path(links, found, Blocker{Session: s, Owner: r.Owner, Agent: r.Agent, Waits: true})
}

// path returns the newcomer and all links from what it waits for up to the last one, which is the newcomer again.
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

// agentOf is empty for what takes no part: what lingers is nobody's.
func agentOf(h *hold, w *wait) string {
	switch {
	case h == nil:
		return w.requests[0].Agent
	case h.lingering():
		return ""
	}
	return h.Agent
}

// blockers yields every holder, and every waiter before ticket, that claims must wait for, with the name of which both want
// something, until yield returns false.
func (m *Machine) blockers(claims []claim, ticket uint64, yield func(string, *hold, *wait) bool) {
	for _, c := range claims {
		if e := m.names[c.name]; e != nil && !e.blockers(c, ticket, yield) {
			return
		}
	}
}

func (e *entry) blockers(c claim, ticket uint64, yield func(string, *hold, *wait) bool) bool {
	for _, h := range e.holds {
		if !compatible(h.own(), c) && !yield(e.name, h, nil) {
			return false
		}
	}
	for _, h := range e.intents {
		if !compatible(claim{modes: h.intent()}, c) && !yield(e.name, h, nil) {
			return false
		}
	}
	for _, p := range e.queue {
		if p.wait.ticket >= ticket {
			break
		}
		if !compatible(claim{modes: p.claim.modes, permits: e.limit, limit: e.limit}, c) && !yield(e.name, nil, p.wait) {
			return false
		}
	}
	return true
}
