package builtin

// Watches: events of names, as the server pushes them, across connections.

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

// watch follows one name across connections: each connection continues where the last one ended.
//
// It is in Driver.watches from the beginning until end or stop, and in Driver.followed by the number of the request
// that began it last. It has no goroutine: the caller's own takes the events.
type watch struct {
	d    *Driver
	name string
	ctx  context.Context // of the caller: see onBehalf
	// wake rings when there are events or an end, or when the caller has to check its state.
	wake notify.Signal

	// The following fields are protected by Driver.mu.

	// call began it on the present connection, or waits for one. It is not nil after start; an empty call means that the
	// watch has no call.
	call *call
	// since is the revision from which the watch continues: the caller's revision, then that of the last event that came,
	// shown to the caller or not. Zero means from now on, until the service reports the present revision.
	since uint64
	// events are the events that the caller has not taken; at most mostEvents and one push.
	events []backend.Change
	// paused: the caller is slow. The watch has ended in the service and restarts when the caller has caught up.
	paused bool
	// err is why it ended; the caller gets it after the last event.
	err error
}

// mostEvents bounds the events that wait for a slow caller. The service keeps later events, within its own limit.
//
// Without a bound, a caller that never returns from the body of its loop would fill the memory of the process.
const mostEvents = 4096

// Watch yields the changes of a name from now on, or since any revision that the service still keeps; an older one is
// backend.ErrCompacted. The loop ends with an error when ctx ends, or with Close.
//
// A change of leader, a restart of the servers and a slow caller neither lose nor repeat an event, as long as the
// service keeps events: the watch continues from the revision of its last event. Waits that begin or end are not shown,
// nor minimum holds that end.
//
// To miss no change between looking and watching, watch from the revision of the look:
//
//	state, err := d.Look(ctx, "orders")
//	if err != nil {
//		return err
//	}
//	for change, err := range d.Watch(ctx, "orders", state.Revision) {
//		if err != nil {
//			return err
//		}
//		fmt.Println(change.Type, change.Owner)
//	}
//
// Errors wrap backend.ErrInvalidName, ErrInvalidOption (a revision that the service has not reached), ErrCompacted,
// ErrUnavailable (no leader was found), ErrHistoryLost or ErrClosed, or are ctx's. The body of the loop may call
// everything, Close too.
func (d *Driver) Watch(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		err := d.watch(ctx, name, since, func(e backend.Change) bool { return yield(e, nil) })
		if err != nil {
			yield(backend.Change{}, d.callError("watch", name, err))
		}
	}
}

// watch registers one watch and yields its events until the caller, ctx, the driver or the service ends it. It runs in
// the caller's goroutine: a slow caller delays only its own events.
//
// It leaves the gate before the loop, since the body of the loop may call Close; it ends with d.ctx instead.
func (d *Driver) watch(ctx context.Context, name string, since uint64, yield func(backend.Change) bool) error {
	if err := backend.ValidateName(name); err != nil {
		return err
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	d.gate.Leave()
	w := &watch{d: d, name: name, ctx: ctx, since: since, wake: notify.New()}
	d.mu.Lock()
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

// start begins the watch on the present or the next connection, at the point where it ended on the last one. The
// caller holds d.mu.
//
// start removes the last call and its number without an answer: events that are still on their way for that call find
// no watch, and come again after since. A call that d.start finishes immediately ends the watch; hence the check of
// d.watches.
func (w *watch) start() {
	d := w.d
	if w.call != nil {
		delete(d.calls, w.call.number)
		delete(d.followed, w.call.number)
	}
	this := &call{
		request: onBehalf(w.ctx, &lockpb.Request{
			Call: &lockpb.Request_Watch{Watch: &lockpb.Watch{Name: w.name, Since: w.since}},
		}),
		looks: true,
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

// began handles the answer to the request that begins the watch. The caller holds d.mu.
//
//	watching                        events follow
//	UNAVAILABLE                     again after a pause
//	the revision is too great       the service has lost changes, if it had reported this revision
//	other errors                    the watch ends with them
//
// If the service never reported that revision to this driver, the caller has passed a wrong one: only the watch ends.
func (w *watch) began(r *lockpb.Reply, err error) {
	switch wire := r.GetError(); {
	case err != nil:
		w.end(err)
	case r.GetWatching() != nil:
		w.since = max(w.since, r.GetWatching().Revision)
	case wire != nil && wire.Code == lockpb.Code_CODE_UNAVAILABLE:
		this := w.call
		w.d.later(func() {
			if _, on := w.d.watches[w]; on && w.call == this { // it has not restarted meanwhile on another connection
				w.start()
			}
		})
	case wire != nil && wire.Code == lockpb.Code_CODE_INVALID && wire.Field == "since" && w.since <= w.call.seen:
		d := w.d
		d.forgotten("revision", strconv.FormatUint(w.call.seen, 10), "less than "+strconv.FormatUint(w.since, 10))
	case wire != nil:
		w.end(replyError(wire))
	default:
		w.end(errNoAnswer)
	}
}

// end ends the watch: the caller gets err after the events that wait for it. The caller holds d.mu.
func (w *watch) end(err error) {
	w.err = err
	delete(w.d.watches, w)
	delete(w.d.followed, w.call.number)
	w.wake.Notify()
}

// happened handles the events of one push. Events up to since are repetitions from the previous connection. A watch
// with too many events pauses, because the service keeps events and this driver must not keep them all. The caller
// holds d.mu.
//
//	events                          kept for the caller
//	too many for a slow caller      the watch pauses
//	COMPACTED                       it pauses too: the server found it too slow, and may still have the next events
//	another error                   it ends
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
		// The watch restarts once the caller has caught up. The answer shows whether the service has kept the next events.
		w.paused = true
		w.unwatch()
	}
	w.wake.Notify()
}

// unwatch ends the watch in the service, without waiting for the answer. Events that are still on their way find no
// watch. The caller holds d.mu.
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

// take returns the events since the last call, and the error of an ended watch. A paused watch restarts only when a
// call finds no events: the caller has then handled all earlier events, and not only received them.
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
		w.wake.Notify()
	}
	return events, w.err
}

// stop ends the watch when its caller leaves. An ended or paused watch has no state in the service.
func (w *watch) stop() {
	w.d.mu.Lock()
	defer w.d.mu.Unlock()
	delete(w.d.watches, w)
	if w.err == nil && !w.paused {
		w.unwatch()
	}
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
func (d *Driver) eventOf(e *lockpb.Event) (backend.Change, bool) {
	typ, ok := eventTypes[e.Type]
	event := backend.Change{
		Type: typ, Name: e.Name, Owner: e.Owner, Reason: e.Reason, By: e.By, Principal: e.Principal,
		Time: time.Unix(0, e.TimeUnixNanos), Revision: e.Revision,
	}
	if d.fences() {
		event.Token = fencing.Token(e.Token)
	}
	return event, ok
}
