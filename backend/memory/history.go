package memory

import (
	"fmt"

	"github.com/fencelock/fencelock/backend"
)

// eventsKept is how many events of all names together the store keeps for watchers.
const eventsKept = 4096

// history is the ring of the last events. Revisions have no gaps in it, so that a revision tells the place.
type history struct {
	ring  []backend.Change // grows up to eventsKept, then wraps
	start int              // of the oldest
	floor uint64           // the revision before that of the oldest: events up to it are gone
}

func (h *history) add(e backend.Change) {
	if len(h.ring) < eventsKept {
		h.ring = append(h.ring, e)
		return
	}
	h.ring[h.start] = e
	h.start = (h.start + 1) % eventsKept
	h.floor++
}

// at returns the event of a revision above the floor and not above the last.
func (h *history) at(revision uint64) *backend.Change {
	return &h.ring[(h.start+int(revision-h.floor-1))%len(h.ring)]
}

// forget drops all events up to revision, the last.
func (h *history) forget(revision uint64) {
	clear(h.ring) // they hold on to names and owners
	*h = history{ring: h.ring[:0], floor: revision}
}

// revision is that of the last event. It is one above the last number given out, so that the revision of a store in
// which nothing has happened is not 0, which asks Watch for what is to come only.
func (s *Store) revision() uint64 { return uint64(s.last) + 1 }

// record notes what happened to a hold as the event of the present revision, and wakes those who watch the name.
// Whoever calls it has counted s.last: a grant for its token, an end for its event.
func (s *Store) record(h *hold, what backend.ChangeType, reason string) {
	s.past.add(backend.Change{
		Type: what, Name: h.claim.name, Owner: h.owner, Token: h.token, Reason: reason, Revision: s.revision(),
	})
	if len(s.watches) == 0 {
		return
	}
	for w := range s.watches[h.claim.name] {
		s.wake(w)
	}
}

// forgetHistory begins the count of tokens and events anew, and wakes every watch, which ends by that.
func (s *Store) forgetHistory() {
	s.last = 0
	s.past.forget(s.revision())
	for _, each := range s.watches {
		for w := range each {
			s.wake(w)
		}
	}
}

// watch is the store's side of one Driver.Watch. Store.mu protects the fields below over.
//
// The store keeps no events for it: the driver asks with the revision up to which it has read, and the ring answers.
// What the store remembers is which event it has to start with next, so that a watch of a quiet name does not fall
// behind while others fill the ring.
type watch struct {
	name string
	push func() // tells the driver to ask

	over  bool   // unwatch was called; a request may arrive later
	told  uint64 // the revision up to which the last answer went; 0: there was none
	first uint64 // the first event of the name after that; 0: none
}

func (s *Store) wake(w *watch) {
	if w.first == 0 {
		w.first = s.revision()
		s.outbox = append(s.outbox, w.push)
	}
}

// news is what a watch has not seen.
type news struct {
	events []backend.Change
	upTo   uint64 // nothing of the name up to here is missing
	more   bool   // there are events above upTo already
	err    error
}

// newsAtOnce is how many events one answer carries.
const newsAtOnce = 128

// read answers w, which has seen everything up to since, with what follows.
func (s *Store) read(d *Driver, w *watch, since uint64) news {
	if w.over {
		return news{}
	}
	if err := s.forgot(d); err != nil {
		return news{err: err}
	}
	last := s.revision()
	from := since + 1
	switch {
	case since > last:
		return news{err: &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "revision", Value: fmt.Sprint(since),
			Why: fmt.Sprintf("this store has come to %d", last),
		}}
	case w.told == 0:
		s.watch(w)
		if since == 0 {
			from = last + 1
		}
	case w.told != since:
		// The last answer got lost.
	case w.first == 0:
		from = last + 1
	default:
		from = w.first
	}
	if from <= s.past.floor {
		return news{err: backend.ErrCompacted}
	}
	n := news{upTo: last}
	w.first = 0
	for r := from; r <= last; r++ {
		if e := s.past.at(r); e.Name == w.name {
			if len(n.events) == newsAtOnce {
				n.more, w.first = true, r
				n.upTo = n.events[newsAtOnce-1].Revision
				break
			}
			n.events = append(n.events, *e)
		}
	}
	w.told = n.upTo
	return n
}

func (s *Store) watch(w *watch) {
	if s.watches[w.name] == nil {
		s.watches[w.name] = map[*watch]struct{}{}
	}
	s.watches[w.name][w] = struct{}{}
}

// unwatch forgets w.
func (s *Store) unwatch(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.over = true
	delete(s.watches[w.name], w)
	if len(s.watches[w.name]) == 0 {
		delete(s.watches, w.name)
	}
}
