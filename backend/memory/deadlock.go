package memory

import (
	"slices"

	"github.com/fencelock/fencelock/backend"
)

// link is one step of the search for a cycle: a holder or waiter that the step before waits for, because of a name.
type link struct {
	name   string
	owner  string
	hold   string  // the request id of a holder; empty for a waiter
	waiter *waiter // nil for a holder
	parent int     // index of the step before; -1: the newcomer
}

// cycle returns the error for a newcomer whose wait would close a cycle; nil if it would not. It searches from what the
// newcomer waits for towards the holds that it is made under: a waiter goes on to what blocks it, a hold to what blocks
// those who wait under it.
func (s *Store) cycle(rs []backend.Request, claims []claim) error {
	under := rs[0].Under
	if len(under) == 0 {
		return nil
	}
	links := s.blockers(nil, -1, claims, nil)
	seen := map[*waiter]bool{}
	for i := 0; i < len(links); i++ {
		at := links[i]
		if at.waiter != nil {
			links = s.follow(links, i, at.waiter, seen)
			continue
		}
		if slices.Contains(under, at.hold) {
			return cycleOf(links, i, rs[0].Owner)
		}
		for w := range s.under[at.hold] {
			links = s.follow(links, i, w, seen)
		}
	}
	return nil
}

// follow appends what blocks w, the first time that the search comes to it.
func (s *Store) follow(links []link, parent int, w *waiter, seen map[*waiter]bool) []link {
	if seen[w] {
		return links
	}
	seen[w] = true
	return s.blockers(links, parent, w.claims, w)
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
				links = append(links, link{name: c.name, owner: h.owner, hold: h.requestID, parent: parent})
			})
		}
		for _, ahead := range e.queue {
			if ahead == w {
				break
			}
			if c.behind(ahead) {
				links = append(links, link{name: c.name, owner: ahead.requests[0].Owner, waiter: ahead, parent: parent})
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

// waitsUnder keeps the waiters under each hold.
func (s *Store) waitsUnder(w *waiter, waits bool) {
	for _, id := range w.requests[0].Under {
		switch {
		case !waits:
			delete(s.under[id], w)
			if len(s.under[id]) == 0 {
				delete(s.under, id)
			}
		case s.under[id] == nil:
			s.under[id] = map[*waiter]struct{}{w: {}}
		default:
			s.under[id][w] = struct{}{}
		}
	}
}
