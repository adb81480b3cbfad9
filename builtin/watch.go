package builtin

// Watches: events of names, as the server pushes them, across connections.

import (
	"cmp"
	"context"
	"iter"
	"strconv"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/fencing"
)

// watch follows one name across connections: each begins where the one before ended.
type watch struct {
	d    *Driver
	name string
	wake chan struct{} // has room for one: there are events, or an end

	// The following fields are protected by Driver.mu.

	call   *call // that began it on the present connection
	since  uint64
	events []backend.Change
	paused bool // the caller is slow: the watch is to begin again when it has caught up
	err    error
}

// mostEvents is how many events wait for a slow caller. The service keeps the rest, as long as it keeps events at all.
const mostEvents = 4096

// Watch yields what happens to a name from now on, or since any revision that the service still keeps; one that it does
// not is backend.ErrCompacted. The loop ends with an error when ctx ends, or with Close.
func (d *Driver) Watch(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		err := d.watch(ctx, name, since, func(e backend.Change) bool { return yield(e, nil) })
		if err != nil {
			yield(backend.Change{}, d.callError("watch", name, err))
		}
	}
}

// watch registers one watch and yields its events until the caller, ctx, the driver or the service ends it. It runs in
// the caller's goroutine: a caller that is slow keeps its own events waiting, and nothing else.
func (d *Driver) watch(ctx context.Context, name string, since uint64, yield func(backend.Change) bool) error {
	if err := backend.ValidateName(name); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	w := &watch{d: d, name: name, since: since, wake: make(chan struct{}, 1)}
	d.mu.Lock()
	if d.ctx.Err() != nil {
		d.mu.Unlock()
		return backend.ErrClosed
	}
	if err := cmp.Or(d.unfit, d.past.lost); err != nil {
		d.mu.Unlock()
		return err
	}
	d.watches[w] = struct{}{}
	w.start()
	d.mu.Unlock()
	defer w.stop()
	for {
		select {
		case <-w.wake:
		case <-ctx.Done():
			return ctx.Err()
		case <-d.ctx.Done():
			return backend.ErrClosed
		}
		events, err := w.take()
		for _, e := range events {
			if ctx.Err() != nil || d.ctx.Err() != nil {
				break // it ended while the caller was busy with the event before
			}
			if !yield(e) {
				return nil
			}
		}
		if err != nil {
			return err
		}
	}
}

// start begins the watch on the present or the next connection, where it ended on the one before. The caller holds
// d.mu.
func (w *watch) start() {
	d := w.d
	if w.call != nil {
		delete(d.calls, w.call.number)
		delete(d.followed, w.call.number)
	}
	this := &call{
		request: &lockpb.Request{Call: &lockpb.Request_Watch{Watch: &lockpb.Watch{Name: w.name, Since: w.since}}},
		looks:   true,
	}
	w.call = this
	this.then = func(r *lockpb.Reply, err error) {
		if w.call == this {
			w.began(r, err)
		}
	}
	d.start(this)
	if _, on := d.watches[w]; on {
		d.followed[this.number] = w
	}
}

// began takes the answer to the request that begins the watch. The caller holds d.mu.
func (w *watch) began(r *lockpb.Reply, err error) {
	switch wire := r.GetError(); {
	case err != nil:
		w.end(err)
	case r.GetWatching() != nil:
		w.since = max(w.since, r.GetWatching().Revision)
	case wire != nil && wire.Code == lockpb.Code_CODE_UNAVAILABLE:
		this := w.call
		w.d.background(func() { w.startLater(this) })
	case wire != nil && wire.Code == lockpb.Code_CODE_INVALID && wire.Field == "since" && w.since <= w.call.seen:
		d := w.d
		d.forgotten("revision", strconv.FormatUint(w.call.seen, 10), "less than "+strconv.FormatUint(w.since, 10))
	case wire != nil:
		w.end(replyError(wire))
	default:
		w.end(errNoAnswer)
	}
}

// startLater begins the watch again after a pause, unless it has begun meanwhile on another connection.
func (w *watch) startLater(before *call) {
	d := w.d
	if d.pause(d.ctx, busyPause) != nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, on := d.watches[w]; on && w.call == before {
		w.start()
	}
}

// end lets the caller know that no more events come, after those that are here. The caller holds d.mu.
func (w *watch) end(err error) {
	w.err = err
	delete(w.d.watches, w)
	delete(w.d.followed, w.call.number)
	signal(w.wake)
}

// happened takes events. The caller holds d.mu.
func (d *Driver) happened(m *lockpb.Events) {
	if w := d.followed[m.Watch]; w != nil {
		w.happened(m)
	}
}

// happened takes the events of one push. Those up to since are repetitions, from the connection before. A caller that
// is too slow is not sent more; the service keeps events, and this driver must not keep them all. The caller holds
// d.mu.
func (w *watch) happened(m *lockpb.Events) {
	for _, e := range m.Events {
		if e.Revision <= w.since {
			continue
		}
		w.since = e.Revision
		w.d.saw(e.Revision)
		if event, ok := w.d.eventOf(e); ok {
			w.events = append(w.events, event)
		}
	}
	switch {
	case m.Error != nil && m.Error.Code != lockpb.Code_CODE_COMPACTED:
		w.end(replyError(m.Error))
	case m.Error != nil, len(w.events) > mostEvents:
		// Once the caller has caught up the watch begins again, and learns whether the service has kept what follows.
		w.paused = true
		w.unwatch()
	}
	signal(w.wake)
}

// unwatch ends the watch in the service. Nobody waits for the answer; events that were on their way meet no watch. The
// caller holds d.mu.
func (w *watch) unwatch() {
	d, was := w.d, w.call
	delete(d.calls, was.number)
	delete(d.followed, was.number)
	w.call = &call{}
	if was.on == nil || was.on != d.conn || d.ctx.Err() != nil {
		return // it ended with its connection
	}
	d.start(&call{
		request: &lockpb.Request{Call: &lockpb.Request_Unwatch{Unwatch: &lockpb.Unwatch{Watch: was.number}}},
		once:    true, looks: true,
	})
}

// take returns what has come since the last time.
func (w *watch) take() ([]backend.Change, error) {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	events := w.events
	w.events = nil
	if len(events) == 0 && w.paused && w.err == nil {
		w.paused = false
		w.start()
	}
	if w.paused {
		signal(w.wake)
	}
	return events, w.err
}

// stop ends the watch for good: its caller has gone.
func (w *watch) stop() {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	delete(w.d.watches, w)
	if w.err == nil && !w.paused {
		w.unwatch()
	}
}

var eventTypes = map[lockpb.EventType]backend.ChangeType{
	lockpb.EventType_EVENT_ACQUIRED:       backend.ChangeAcquired,
	lockpb.EventType_EVENT_RELEASED:       backend.ChangeReleased,
	lockpb.EventType_EVENT_EXPIRED:        backend.ChangeExpired,
	lockpb.EventType_EVENT_FORCE_RELEASED: backend.ChangeForceReleased,
}

// eventOf leaves out what the contract has no word for: waits, and minimum holds that end.
func (d *Driver) eventOf(e *lockpb.Event) (backend.Change, bool) {
	typ, ok := eventTypes[e.Type]
	event := backend.Change{Type: typ, Name: e.Name, Owner: e.Owner, Reason: e.Reason, Revision: e.Revision}
	if d.Describe().Capabilities.Has(backend.CapFencing) {
		event.Token = fencing.Token(e.Token)
	}
	return event, ok
}
