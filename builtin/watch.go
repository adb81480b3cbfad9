package builtin

import (
	"context"
	"iter"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/notify"
)

// feed follows one name: each connection continues where the last one ended.
type feed struct {
	s    *service
	name string
	wake notify.Signal // rings when there are events or an end

	// The following fields are protected by service.mu.

	on     *conn // on which it began, with number; nil: it has not begun, or was ended
	number uint64
	since  uint64           // the revision from which it continues; 0: from now on, until the server has said the present one
	events []backend.Change // that the caller has not taken; at most maxEvents and one push
	err    error            // why the server has ended it
}

// maxEvents bounds the events that wait for a slow caller. The server keeps later events, within its own limit.
const maxEvents = 4096

// Changes is engine.Changes's. A change of leader, a restart of the servers and a slow caller neither lose nor repeat an
// event, as long as the server keeps events. It runs on the caller's goroutine: a slow caller delays only its own events.
func (s *service) Changes(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		f := &feed{s: s, name: name, since: since, wake: notify.New()}
		defer f.stop()
		for {
			events, on, err := f.take()
			for _, e := range events {
				if ctx.Err() == nil && !yield(e, nil) {
					return
				}
			}
			switch {
			case ctx.Err() != nil:
				err = ctx.Err()
			case len(events) > 0:
				continue
			case err == nil && on == nil:
				err = f.begin(ctx)
			case err == nil:
				select {
				case <-f.wake:
				case <-on.gone:
					f.end(on)
				case <-ctx.Done():
				}
			}
			if err != nil {
				yield(backend.Change{}, err)
				return
			}
		}
	}
}

// begin begins the feed on the present or the next connection, at the point where it ended on the last one.
func (f *feed) begin(ctx context.Context) error {
	s := f.s
	s.mu.Lock()
	watch := &lockpb.Watch{Name: f.name, Since: f.since}
	s.mu.Unlock()
	_, err := s.ask(ctx, &call{
		request: onBehalf(ctx, &lockpb.Request{Call: &lockpb.Request_Watch{Watch: watch}}), looks: true,
		note: func(x *call, r *lockpb.Reply) {
			if r.GetWatching() != nil {
				f.since = max(f.since, r.GetWatching().Revision)
				f.on, f.number = x.on, x.number
				x.on.watches[x.number] = f
			} else if e := r.GetError(); e.GetCode() == lockpb.Code_CODE_INVALID && e.Field == "since" && f.since <= x.seen {
				// The service had reported this revision. Otherwise the caller has passed a wrong one.
				s.forgotten("revision", strconv.FormatUint(x.seen, 10), "less than "+strconv.FormatUint(f.since, 10))
			}
		},
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.past.lost != nil {
		return s.past.lost
	}
	return err
}

// happened handles the events of one push. Events up to since are repetitions. A feed with too many events ends, until
// the caller has caught up, and also one that the server has found too slow: it may still have the next events. The
// caller holds s.mu.
func (f *feed) happened(m *lockpb.Events) {
	for _, e := range m.Events {
		if e.Revision <= f.since {
			continue
		}
		f.since = e.Revision
		f.s.saw(e.Revision)
		if event, ok := f.s.eventOf(e); ok {
			f.events = append(f.events, event)
		}
	}
	switch {
	case m.Error != nil && m.Error.Code != lockpb.Code_CODE_COMPACTED:
		f.err = replyError(m.Error)
		fallthrough
	case m.Error != nil, len(f.events) > maxEvents:
		f.unwatch()
	}
	f.wake.Notify()
}

// take returns the events since the last call, and the connection that carries the feed.
func (f *feed) take() (events []backend.Change, on *conn, err error) {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	events, f.events = f.events, nil
	if len(events) == 0 {
		err = f.err
	}
	return events, f.on, err
}

// end notes that a connection has ended.
func (f *feed) end(on *conn) {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	if f.on == on {
		f.on = nil
	}
}

// stop ends the feed when its caller leaves.
func (f *feed) stop() {
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	f.unwatch()
}

// unwatch ends the feed in the server, without waiting for the answer. Events that are still on their way have no effect.
// The caller holds s.mu.
func (f *feed) unwatch() {
	if f.on == nil {
		return
	}
	delete(f.on.watches, f.number)
	if f.on == f.s.conn {
		f.on.push(&call{
			request: &lockpb.Request{Call: &lockpb.Request_Unwatch{Unwatch: &lockpb.Unwatch{Watch: f.number}}},
			answer:  make(chan *lockpb.Reply, 1),
		})
	}
	f.on = nil
}

// eventTypes maps the types of events that have a counterpart in the contract.
var eventTypes = map[lockpb.EventType]backend.ChangeType{
	lockpb.EventType_EVENT_ACQUIRED:       backend.ChangeAcquired,
	lockpb.EventType_EVENT_RELEASED:       backend.ChangeReleased,
	lockpb.EventType_EVENT_EXPIRED:        backend.ChangeExpired,
	lockpb.EventType_EVENT_FORCE_RELEASED: backend.ChangeForceReleased,
}

// eventOf converts an event. It returns false for events without a counterpart in the contract: waits, and minimum
// holds that end.
func (s *service) eventOf(e *lockpb.Event) (backend.Change, bool) {
	typ, ok := eventTypes[e.Type]
	event := backend.Change{
		Type: typ, Name: e.Name, Owner: e.Owner, Reason: e.Reason, By: e.By, Principal: e.Principal,
		Time: time.Unix(0, e.TimeUnixNanos), Revision: e.Revision,
	}
	if s.fences() {
		event.Token = fencing.Token(e.Token)
	}
	return event, ok
}
