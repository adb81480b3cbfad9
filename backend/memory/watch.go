package memory

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/machine"
)

// Watch yields what happens to a name from now on, or since any revision of the store whose later events are among the
// 4096 kept. It needs no goroutine of its own. Events are read from the store when the loop asks for them, so a loop
// that is slow holds nothing up; one so slow that events of its name are gone meanwhile gets backend.ErrCompacted. A
// since that the store has not reached is backend.ErrInvalidOption.
//
// Holds that ended by Store.Evict are reported as released, with backend.ReasonEvicted as the reason; Store.Wipe ends
// the watch with backend.ErrHistoryLost. If the store cannot be reached when the watch starts, that is its end; later
// it waits for the store to come back and misses nothing.
//
// The error comes last, with an empty change. ctx's end and Close end the watch, and so does leaving the loop, which
// costs nothing then or later:
//
//	for c, err := range d.Watch(ctx, "orders", 0) {
//		if err != nil {
//			return err
//		}
//		fmt.Println(c.Type, c.Owner, c.Token)
//	}
func (d *Driver) Watch(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		if err := d.watch(ctx, name, since, yield); err != nil {
			yield(backend.Change{}, callError("watch", name, err))
		}
	}
}

// watch returns nil if the loop was left. It does not count as waiting: the body of the loop may call Close.
//
// It asks at the bell, when the connection breaks, and once a second at least. What a lost answer brought is asked for
// again: the store keeps news until a later question shows that they have been seen.
func (d *Driver) watch(ctx context.Context, name string, since uint64, yield func(backend.Change, error) bool) error {
	again, ring := d.bell()
	w := &watch{name: name, ring: ring}
	d.store.watch(w)
	defer d.store.unwatch(w)
	for first := true; ; first = false {
		// A message may be delivered late: it has variables of its own.
		var changes []backend.Change
		seen := since
		err := d.try(ctx, func(backend.Instant) (err error) {
			changes, err = d.store.read(d, w, seen)
			return err
		})
		if end := d.alive(ctx); end != nil {
			return end
		}
		switch {
		case err == nil:
			for _, c := range changes {
				if !yield(c, nil) {
					return nil
				}
				since = c.Revision
				if end := d.alive(ctx); end != nil {
					return end
				}
			}
		case first || !errors.Is(err, backend.ErrUnavailable) && !errors.Is(err, backend.ErrUnknown):
			return err
		}
		d.rest(ctx, again, time.Second)
	}
}

// watch is the store's side of one Driver.Watch. Store.mu protects the fields below ring. The store keeps the news of
// each watch rather than a place in the machine's events: a watch of a quiet name must not fall behind because others
// fill those.
type watch struct {
	name string
	// ring tells the driver to ask; it is called without Store.mu.
	ring func()

	// begun: the first question has come. Events count from the moment at which it arrives.
	begun bool
	// news is what the driver has not confirmed to have seen, oldest first; at most eventsKept.
	news []backend.Change
	// overrun: some of the news are gone. That is final, and the watch ends at the next question.
	overrun bool
}

// wake tells those who watch of the events after the revision since. The caller holds s.mu.
func (s *Store) wake(since uint64) {
	if len(s.watches) == 0 {
		return
	}
	events, _ := s.machine.EventsSince(since, math.MaxInt)
	for i := range events {
		for _, w := range s.watches[events[i].Name] {
			if w.begun {
				s.tell(w, events[i:i+1])
				s.outbox = append(s.outbox, w.ring)
			}
		}
	}
}

// tell adds those of events that w sees to its news. A watch that has fallen behind by more than eventsKept keeps none
// of them: it could not go on without a gap. The caller holds s.mu.
func (s *Store) tell(w *watch, events []machine.Event) {
	for i := range events {
		if c, shown := changeOf(&events[i]); shown && c.Name == w.name {
			w.news = append(w.news, c)
		}
	}
	if len(w.news) > eventsKept {
		w.news, w.overrun = nil, true
	}
}

// read answers w, which has seen everything up to since, with what followed. What it returns is a copy, since the
// driver may read it while later events are added. The caller holds s.mu.
func (s *Store) read(d *Driver, w *watch, since uint64) ([]backend.Change, error) {
	if err := s.forgot(d); err != nil {
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

// changeOf is an event as a watcher sees it; false if it sees none. An eviction is shown as a release, with its own
// reason, since nobody force-released.
func changeOf(e *machine.Event) (backend.Change, bool) {
	c := backend.Change{
		Type: shown[e.Type], Name: e.Name, Owner: e.Owner, Token: e.Token, Reason: e.Reason, Revision: e.Revision,
	}
	if e.Type == machine.EventForced && e.By == byEviction {
		c.Type = backend.ChangeReleased
	}
	return c, c.Type != ""
}

// watch has w told of events, once its first question has come.
func (s *Store) watch(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches[w.name] = append(s.watches[w.name], w)
}

// unwatch forgets w.
func (s *Store) unwatch(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	rest := slices.DeleteFunc(s.watches[w.name], func(other *watch) bool { return other == w })
	if s.watches[w.name] = rest; len(rest) == 0 {
		delete(s.watches, w.name)
	}
}
