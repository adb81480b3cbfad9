package memory

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/machine"
)

// watch is an engine.Feed: one Driver.Watch of a client. Store.mu protects the fields below wake. The store keeps the
// news of each watch rather than a position in the machine's events: a watch of a quiet name must not fall behind
// because events of other names fill the machine's list.
type watch struct {
	client *client
	name   string
	// wake has the client read. It travels as a reply does.
	wake func()

	// begun: the first Read has come. Events count from the moment at which it arrives.
	begun bool
	// news has the events that the client has not confirmed, oldest first; at most eventsKept.
	news []backend.Change
	// overrun: some of the news are gone. This is final, and ends the watch at the next Read.
	overrun bool
}

// Follow begins a watch.
func (c *client) Feed(name string, wake func()) engine.Feed {
	w := &watch{client: c, name: name, wake: func() { c.net.send(replies, wake) }}
	s := c.store
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches[name] = append(s.watches[name], w)
	return w
}

// Stop ends the watch.
func (w *watch) Stop() {
	s := w.client.store
	s.mu.Lock()
	defer s.mu.Unlock()
	rest := slices.DeleteFunc(s.watches[w.name], func(other *watch) bool { return other == w })
	if s.watches[w.name] = rest; len(rest) == 0 {
		delete(s.watches, w.name)
	}
}

// Read returns the changes after the revision since. The store keeps them until a later Read shows that they were seen.
func (w *watch) Read(ctx context.Context, since uint64) ([]backend.Change, error) {
	return ask(ctx, w.client, func(backend.Instant) ([]backend.Change, error) {
		return w.client.store.read(w, since)
	})
}

// wake notifies watchers of the events after the revision since. The caller holds s.mu.
func (s *Store) wake(since uint64) {
	if len(s.watches) == 0 {
		return
	}
	events, _ := s.machine.EventsSince(since, math.MaxInt)
	for i := range events {
		for _, w := range s.watches[events[i].Name] {
			if w.begun {
				s.tell(w, events[i:i+1])
				s.outbox = append(s.outbox, w.wake)
			}
		}
	}
}

// tell adds the events that w sees to its news. A watch that has fallen behind by more than eventsKept drops all of
// them: it could not continue without a gap. The caller holds s.mu.
func (s *Store) tell(w *watch, events []machine.Event) {
	for i := range events {
		if c, shown := s.changeOf(&events[i]); shown && c.Name == w.name {
			w.news = append(w.news, c)
		}
	}
	if len(w.news) > eventsKept {
		w.news, w.overrun = nil, true
	}
}

// read returns the events after since, up to which w has seen all. It returns a copy, since the
// driver may read it while later events are added. The caller holds s.mu.
func (s *Store) read(w *watch, since uint64) ([]backend.Change, error) {
	if err := s.forgot(w.client); err != nil {
		return nil, err
	}
	if !w.begun {
		last := s.machine.Revision()
		if since > last {
			return nil, kit.InvalidOption("revision", fmt.Sprint(since), fmt.Sprintf("this store has come to %d", last))
		}
		if since == 0 {
			since = last
		}
		events, err := s.machine.EventsSince(since, math.MaxInt)
		w.begun, w.overrun = true, err != nil || since < s.floor
		s.tell(w, events)
	}
	if w.overrun {
		return nil, backend.ErrCompacted
	}
	w.news = slices.DeleteFunc(w.news, func(c backend.Change) bool { return c.Revision <= since })
	return slices.Clone(w.news), nil
}

// shown are the events that watchers see: not places in queues, nor the end of a minimum.
var shown = map[machine.EventType]backend.ChangeType{
	machine.EventAcquired: backend.ChangeAcquired,
	machine.EventReleased: backend.ChangeReleased,
	machine.EventExpired:  backend.ChangeExpired,
	machine.EventForced:   backend.ChangeForceReleased,
}

// changeOf returns an event as a watcher sees it; false if watchers do not see it. An eviction is shown as a release,
// with its own reason, since there was no forced release.
func (s *Store) changeOf(e *machine.Event) (backend.Change, bool) {
	c := backend.Change{
		Type: shown[e.Type], Name: e.Name, Owner: e.Owner, Token: e.Token, Reason: e.Reason, Revision: e.Revision,
		By: e.By, Principal: e.Principal, Time: s.timeOf(e.At),
	}
	if e.Type == machine.EventForced && e.By == byEviction {
		c.Type = backend.ChangeReleased
	}
	return c, c.Type != ""
}
