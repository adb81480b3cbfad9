package memory

import (
	"fmt"
	"math"
	"slices"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/machine"
)

// eventsKept is how many events of all names together the store keeps for watchers.
const eventsKept = 4096

// changeOf is an event as a watcher sees it; false if it sees none.
func changeOf(e *machine.Event) (backend.Change, bool) {
	c := backend.Change{Name: e.Name, Owner: e.Owner, Token: e.Token, Reason: e.Reason, Revision: e.Revision}
	switch e.Type {
	case machine.EventAcquired:
		c.Type = backend.ChangeAcquired
	case machine.EventReleased:
		c.Type = backend.ChangeReleased
	case machine.EventExpired:
		c.Type = backend.ChangeExpired
	case machine.EventForced:
		c.Type = backend.ChangeForceReleased
		if e.By == byEviction {
			c.Type = backend.ChangeReleased
		}
	default:
		return c, false
	}
	return c, true
}

// watch is the store's side of one Driver.Watch. Store.mu protects the fields below over.
//
// The store keeps no events for it: the driver asks with the revision up to which it has read, and the machine's events
// answer. What the store remembers is which event it has to start with next, so that a watch of a quiet name does not
// fall behind while others fill the ring.
type watch struct {
	name string
	push func() // tells the driver to ask

	over  bool   // unwatch was called; a request may arrive later
	told  uint64 // the revision up to which the last answer went; 0: there was none
	first uint64 // the first event of the name after that; 0: none
}

// wake tells those who watch of the events since a revision.
func (s *Store) wake(since uint64) {
	if len(s.watches) == 0 {
		return
	}
	events, _ := s.machine.EventsSince(since, math.MaxInt) // what is gone already, the watch finds out by asking
	for i := range events {
		for _, w := range s.watches[events[i].Name] {
			s.ring(w, events[i].Revision)
		}
	}
}

func (s *Store) ring(w *watch, revision uint64) {
	if w.first == 0 {
		w.first = revision
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

// newsAtOnce is how many events, of all names, one answer looks at.
const newsAtOnce = 512

// read answers w, which has seen everything up to since, with what follows.
func (s *Store) read(d *Driver, w *watch, since uint64) news {
	if w.over {
		return news{}
	}
	if err := s.forgot(d); err != nil {
		return news{err: err}
	}
	last := s.machine.Revision()
	from := since
	switch {
	case since > last:
		return news{err: &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "revision", Value: fmt.Sprint(since),
			Why: fmt.Sprintf("this store has come to %d", last),
		}}
	case w.told == 0:
		s.watches[w.name] = append(s.watches[w.name], w)
		if since == 0 {
			from = last
		}
	case w.told != since:
		// The last answer got lost.
	case w.first == 0:
		from = last
	default:
		from = w.first - 1
	}
	if from < s.floor {
		return news{err: backend.ErrCompacted}
	}
	events, err := s.machine.EventsSince(from, newsAtOnce)
	if err != nil {
		return news{err: backend.ErrCompacted}
	}
	n := news{upTo: from + uint64(len(events))}
	for i := range events {
		if c, seen := changeOf(&events[i]); seen && c.Name == w.name {
			n.events = append(n.events, c)
		}
	}
	w.first = 0
	if n.more = n.upTo < last; n.more {
		w.first = n.upTo + 1
	}
	w.told = n.upTo
	return n
}

// unwatch forgets w.
func (s *Store) unwatch(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.over = true
	rest := slices.DeleteFunc(s.watches[w.name], func(other *watch) bool { return other == w })
	if s.watches[w.name] = rest; len(rest) == 0 {
		delete(s.watches, w.name)
	}
}
