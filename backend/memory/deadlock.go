package memory

import (
	"github.com/fencelock/fencelock/backend"
)

// agent is one line of work of one client: see backend.Request.Agent.
type agent struct {
	driver *Driver
	text   string
}

// link is one step of the search for a cycle: a holder or waiter that the step before waits for, because of a name.
type link struct {
	name   string
	owner  string
	agent  agent
	parent int // index of the step before; -1: the newcomer
}

// cycle returns the error for a newcomer whose wait would close a cycle of agents that wait for each other; nil if it
// would not. It searches from what the newcomer waits for towards what it holds.
func (s *Store) cycle(d *Driver, rs []backend.Request, claims []claim) error {
	self := agent{d, rs[0].Agent}
	if self.text == "" {
		return nil
	}
	links := s.blockers(nil, -1, claims, nil)
	seen := map[agent]bool{}
	for i := 0; i < len(links); i++ {
		at := links[i]
		if at.agent == self {
			return cycleOf(links, i, rs[0].Owner)
		}
		if at.agent.text == "" || seen[at.agent] {
			continue
		}
		seen[at.agent] = true
		for w := range s.agents[at.agent] {
			links = s.blockers(links, i, w.claims, w)
		}
	}
	return nil
}

// blockers appends those whom claims have to wait for: holders, and waiters before w.
func (s *Store) blockers(links []link, parent int, claims []claim, w *waiter) []link {
	for i := range claims {
		c := &claims[i]
		e := s.names[c.name]
		if e == nil {
			continue
		}
		if e.bars(c) {
			s.holders(e, c, func(h *hold) {
				links = append(links, link{c.name, h.owner, h.agent, parent})
			})
		}
		for _, ahead := range e.queue {
			if ahead == w {
				break
			}
			if c.behind(ahead) {
				links = append(links, link{c.name, ahead.requests[0].Owner, ahead.agent(), parent})
			}
		}
	}
	return links
}

// holders calls do with the living holds that keep c out of e: of the name, and of those below.
func (s *Store) holders(e *entry, c *claim, do func(*hold)) {
	for _, h := range e.holds {
		if !h.vacant && (excludes[c.use][h.claim.use] || c.use == permits) {
			do(h)
		}
	}
	if e.claimed[belowShared]+e.claimed[belowExclusive] == 0 {
		return
	}
	for _, other := range s.names {
		if !other.tree || len(other.name) <= len(e.name) || other.name[:len(e.name)] != e.name || other.name[len(e.name)] != '/' {
			continue
		}
		for _, h := range other.holds {
			if !h.vacant && excludes[c.use][belowOf(h.claim.use)] {
				do(h)
			}
		}
	}
}

func belowOf(u use) use {
	if u == shared {
		return belowShared
	}
	return belowExclusive
}

// cycleOf writes down the way from the newcomer to its own hold, links[last].
func cycleOf(links []link, last int, newcomer string) error {
	var way []link
	for i := last; i >= 0; i = links[i].parent {
		way = append(way, links[i])
	}
	cycle := make([]backend.DeadlockEdge, 0, len(way))
	owner, holds := newcomer, links[last].name
	for i := len(way) - 1; i >= 0; i-- {
		cycle = append(cycle, backend.DeadlockEdge{Owner: owner, Holds: holds, Wants: way[i].name})
		owner, holds = way[i].owner, way[i].name
	}
	return &backend.DeadlockError{Cycle: cycle}
}

// waitsAs keeps the waiters of each agent.
func (s *Store) waitsAs(w *waiter, waits bool) {
	a := w.agent()
	switch {
	case a.text == "":
	case !waits:
		delete(s.agents[a], w)
		if len(s.agents[a]) == 0 {
			delete(s.agents, a)
		}
	case s.agents[a] == nil:
		s.agents[a] = map[*waiter]struct{}{w: {}}
	default:
		s.agents[a][w] = struct{}{}
	}
}
