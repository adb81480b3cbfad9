package fencelock

// Events, and their way to the observer: tell ─► telling.put ─► queue ─► deliver ─► Observer.Observe.
//
// put never blocks and runs under locks of the core; Observe runs on a goroutine of telling, under no lock. That
// goroutine begins gatherTime after the first event of an empty queue, immediately if the event is urgent, and ends
// with the last event; close waits for it for at most farewell. Waking a goroutine for each acquire would cost more
// than the events. Because of the queue no lease waits for an observer
// (TestObserverDoesNotDelayLosses). A full channel would block its senders, or lose the latest events
// uncounted.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Observer receives the events of a client's locks: for metrics, logs and traces.
//
//	metrics := fencelock.ObserverFunc(func(ctx context.Context, e fencelock.Event) {
//		switch e.Type {
//		case fencelock.EventAcquired:
//			waits.Observe(e.Wait.Seconds())
//		case fencelock.EventLost:
//			slog.WarnContext(ctx, "lock lost", "name", e.Name, "hold", e.HoldID, "reason", e.Reason)
//		}
//	})
//
// One goroutine of the client delivers the events, one after the other, in the order in which they happened; so the
// events of one lease come in order, from EventAcquired to EventReleased or EventLost. EventAcquired, EventRenewed
// and EventReleased wait up to 5 ms for others, so that a busy client wakes the goroutine once for many of them. No
// lease and no call waits for an observer: a slow observer falls behind, and when more than 131,072 events wait,
// later events are dropped and counted in an EventShed. A panic or runtime.Goexit in Observe is counted there too,
// and has no other effect. Close delivers queued events for at most a second, and no event is delivered after it has
// returned.
//
// Observe may call methods of the client, and of other clients; the lock that the event is about may have changed hands
// meanwhile.
type Observer interface {
	// Observe gets the event and a context for it: the values, and not the end, of the context of the acquire to which
	// the event belongs, so that a span can be found there.
	Observe(ctx context.Context, e Event)
}

// ObserverFunc makes an Observer of a function.
type ObserverFunc func(ctx context.Context, e Event)

// Observe calls f.
func (f ObserverFunc) Observe(ctx context.Context, e Event) { f(ctx, e) }

// MetadataObserver is an Observer that adds metadata to the holds of its client, where the driver has CapMetadata:
// observe/otel adds the traceparent of the caller, so that a waiter finds the trace of the holder.
type MetadataObserver interface {
	Observer
	// Metadata returns pairs to add to a hold that is acquired with ctx, or nil. It runs on the caller's goroutine
	// before the request is sent, so it must be quick. Keys of the option Metadata win, and no pair is added if all
	// together would exceed MaxMetadataBytes.
	Metadata(ctx context.Context) map[string]string
}

// Observers returns one Observer of several; nil ones are left out. Each gets each event, in order, on one goroutine. A
// panic in one of them does not keep an event from the others.
//
//	fencelock.Options{Observer: fencelock.Observers(logs.New(nil), metrics)}
func Observers(all ...Observer) Observer {
	return observers(slices.DeleteFunc(slices.Clone(all), func(o Observer) bool { return o == nil }))
}

type observers []Observer

// Observe calls all of them. A panic or runtime.Goexit in one call continues after the last.
func (os observers) Observe(ctx context.Context, e Event) {
	if len(os) == 0 {
		return
	}
	defer os[1:].Observe(ctx, e)
	os[0].Observe(ctx, e)
}

// Metadata implements MetadataObserver. If two add the same key, the later one wins.
func (os observers) Metadata(ctx context.Context) map[string]string {
	var all map[string]string
	for _, o := range os {
		if adds, ok := o.(MetadataObserver); ok {
			all = joined(all, adds.Metadata(ctx))
		}
	}
	return all
}

// joined returns the pairs of both maps; over wins. It changes neither map.
func joined(under, over map[string]string) map[string]string {
	switch {
	case len(over) == 0:
		return under
	case len(under) == 0:
		return over
	}
	all := maps.Clone(under)
	maps.Copy(all, over)
	return all
}

// EventType is the type of an Event. New types may appear: ignore unknown types.
//
// The events of one lease, in order:
//
//	no wait acquired, renewed …, released
//	after a wait           waiting, acquired (Contended), renewed …, released
//	wait without success waiting, contended
//	a fault that passes    acquired, renewed, suspect, renewed …, released
//	a fault that stays     acquired, renewed, suspect, lost
//	an election            acquired, elected, renewed …, released, deposed
//	Close                  acquired, renewed …, lost with ReasonClosed
//
// Others are abandoned, for background releases that the service refuses, forced, for calls of ForceRelease, and
// shed, for dropped events. An acquire that is refused before a request is sent is failed if the cause is a lease
// that the caller holds, or Close; invalid options, and a context that has already ended, cause no event.
type EventType string

const (
	// EventWaiting: an acquire has waited for 50 ms. Holder is the holder that it waits for, if the driver reports it.
	EventWaiting EventType = "waiting"
	// EventAcquired: a lease began. Wait is the duration of the acquire; Contended reports whether it had to queue.
	EventAcquired EventType = "acquired"
	// EventContended: an acquire ended without the lock because another client holds it. Wait is its duration.
	EventContended EventType = "contended"
	// EventFailed: an acquire ended without the lock for another reason, in Err.
	EventFailed EventType = "failed"
	// EventRenewed: the service confirmed the lease. Took is the duration of the renewal, Left the time until the new
	// deadline.
	EventRenewed EventType = "renewed"
	// EventSuspect: a renewal failed with Err after Took, and is retried. Left is the time until the deadline.
	// There is one until a renewal succeeds, however many attempts fail.
	EventSuspect EventType = "suspect"
	// EventLost: the lease ended before its release, with Reason. Held is the time for which it was held.
	EventLost EventType = "lost"
	// EventReleased: the lease was released. Held is the time for which it was held, Took the duration of the
	// release; Err is the error of the release, or nil.
	EventReleased EventType = "released"
	// EventElected: Lead begins to run its function. EventAcquired came before.
	EventElected EventType = "elected"
	// EventDeposed: the function of Lead has returned, with Err. Held is the time for which it led.
	EventDeposed EventType = "deposed"
	// EventForced: a ForceRelease of this client ended after Took, with Err if it failed. Why and By are its caller's
	// arguments. The victim, if it lives, gets an EventLost with ReasonForceReleased at its own observer.
	EventForced EventType = "forced"
	// EventAbandoned: the service has refused the background release of a leftover hold with Err for a minute. The
	// client keeps retrying, and repeats the event every minute. The name is free when the service accepts the
	// release, or at the latest when the TTL ends: the driver no longer renews the hold. A permanent Err, such as
	// ErrUnsupported, drops the release, and so does a backlog of more than 131,072 releases, which drops the oldest;
	// the event comes once then.
	EventAbandoned EventType = "abandoned"
	// EventShed: Count events were dropped, because the observer was too slow or panicked (Err).
	EventShed EventType = "shed"
)

// Event is one thing that happened. Fields that do not belong to its type are zero.
type Event struct {
	Type EventType
	// Time is when it happened, by the wall clock; the delivery may be later.
	Time time.Time

	// Driver is Description.Name.
	Driver string
	Tier   Tier
	// Name is the lock's, without the namespace; Kind, HoldID and Token belong to it. Owner is the client's.
	Name  string
	Owner string
	Kind  Kind
	// HoldID names the hold in logs; it gives no power over the hold. Holder.HoldID is the same.
	HoldID string
	Token  fencing.Token

	// Contended: an acquire found the name taken. Holder is who held it, where the driver could tell.
	Contended bool
	// Waited: there was an EventWaiting for this acquire. Each EventWaiting is followed by one event with Waited.
	Waited bool
	// Holder is the hold for which an acquire waits, where known. An event with Waited repeats the Holder of its
	// EventWaiting, unless Err names a later holder.
	Holder *Holder
	// Wait is the time that an acquire took or has waited, Took the duration of a call of the service, Held the time
	// for which a lease was held or a leader led, and Left the time until the deadline. All are measured by the lease
	// clock.
	Wait time.Duration
	Took time.Duration
	Held time.Duration
	Left time.Duration
	// Reason is why the lease was lost.
	Reason Reason
	// By and Why are the author and the reason of a forced release.
	By  string
	Why string
	// Count is the number of dropped events.
	Count int
	// Err is the error of the call, or nil.
	Err error
}

const (
	// maxEvents bounds the events that wait, and with them the memory of an observer that hangs. It is more than a
	// client of 100,000 leases has to report when it loses all of them together.
	maxEvents = 1 << 17
	// gatherTime is the maximum time for which events that are not urgent wait for others.
	gatherTime = 5 * time.Millisecond
	// maxKept bounds the events for which an empty queue keeps its memory.
	maxKept = 256
	// farewell bounds the time for which Close waits for the observer.
	farewell = time.Second
	// waitingAfter is the time after which an acquire counts as a wait: an uncontended acquire usually takes less.
	waitingAfter = 50 * time.Millisecond
)

// telling hands events to the observer, on a goroutine that lives while there are any.
type telling struct {
	to Observer
	// adds is to, if it adds metadata.
	adds MetadataObserver

	mu sync.Mutex // protects the following fields
	// queue has the events that deliver has not taken yet, from first on.
	queue []queuedEvent
	first int
	// shed counts the events dropped since the last EventShed.
	shed int
	// running: deliver runs. It clears this under mu, in the same step in which it finds the queue empty.
	running bool
	// timer calls gathered, and gathering is set until then: deliver does not run yet.
	timer     *time.Timer
	gathering bool
	// closed: no event is queued or delivered any more.
	closed bool
	// idle is made by close, and closed when the queue is empty.
	idle chan struct{}
}

// queuedEvent has the context for Observe.
type queuedEvent struct {
	ctx   context.Context
	event Event
}

// put queues an event, or counts it as shed. It never blocks. The caller may hold any mutex of the core.
func (t *telling) put(ctx context.Context, e *Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return
	case len(t.queue)-t.first >= maxEvents:
		t.shed++
		return
	}
	t.add(ctx, e)
	switch {
	case t.running || t.gathering && !urgent(e.Type):
	case urgent(e.Type):
		t.start()
	default:
		t.gather()
	}
}

// urgent reports whether an event is delivered immediately. The others are most of all, and come with every acquire.
func urgent(t EventType) bool { return t != EventAcquired && t != EventRenewed && t != EventReleased }

// gather starts deliver after gatherTime. The caller holds mu.
func (t *telling) gather() {
	t.gathering = true
	if t.timer == nil {
		t.timer = time.AfterFunc(gatherTime, t.gathered)
	} else {
		t.timer.Reset(gatherTime)
	}
}

// gathered is called by the timer.
func (t *telling) gathered() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.gathering {
		t.start()
	}
}

// start starts deliver. The caller holds mu, and deliver does not run.
func (t *telling) start() {
	if t.gathering {
		t.gathering = false
		t.timer.Stop() // a call of gathered that is on its way finds gathering cleared
	}
	t.running = true
	go t.deliver()
}

// add appends an event to the queue. The caller holds mu.
func (t *telling) add(ctx context.Context, e *Event) {
	if t.first > 0 && t.first >= cap(t.queue)/2 && len(t.queue) == cap(t.queue) {
		n := copy(t.queue, t.queue[t.first:])
		clear(t.queue[n:])
		t.queue, t.first = t.queue[:n], 0
	}
	t.queue = append(t.queue, queuedEvent{ctx, *e})
}

// deliver runs until the queue is empty. If an observer ends the goroutine, as testing.T.FailNow does, another
// goroutine goes on.
func (t *telling) deliver() {
	for {
		x, ok := t.next()
		if !ok {
			return
		}
		t.observe(&x)
	}
}

// next takes the first event. ok is false if the queue is empty: deliver has ended then.
//
// It clears the event in the queue, which would keep its context alive.
func (t *telling) next() (x queuedEvent, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.shed > 0 && len(t.queue)-t.first <= maxEvents/2 {
		n := t.shed
		t.shed = 0
		t.dropped(n, nil)
	}
	if t.first < len(t.queue) && !t.closed {
		x, t.queue[t.first] = t.queue[t.first], queuedEvent{}
		t.first++
		return x, true
	}
	t.queue, t.first, t.running = t.queue[:0], 0, false
	if cap(t.queue) > maxKept {
		t.queue = nil
	}
	if t.idle != nil {
		close(t.idle)
		t.idle = nil
	}
	return x, false
}

// dropped queues an EventShed for n dropped events, even beyond maxEvents. The caller holds mu.
func (t *telling) dropped(n int, err error) {
	t.add(context.Background(), &Event{Type: EventShed, Time: time.Now(), Count: n, Err: err})
}

// observe calls the observer. A panic or runtime.Goexit in it counts as an event that was dropped, except for an
// EventShed: a fault of an observer must not end a program that holds locks, nor the events.
func (t *telling) observe(x *queuedEvent) {
	returned := false
	defer func() {
		err := errors.New("the observer ended its goroutine")
		p := recover()
		if p != nil {
			err = fmt.Errorf("the observer panicked: %v", p)
		}
		if !returned && x.event.Type != EventShed {
			t.mu.Lock()
			t.dropped(1, err)
			t.mu.Unlock()
		}
		if !returned && p == nil {
			go t.deliver()
		}
	}()
	t.to.Observe(x.ctx, x.event)
	returned = true
}

// close waits until all events are delivered, at most for farewell and until ctx ends, and then stops delivery: a
// call of Observe that hangs may still be running, but no other call begins.
func (t *telling) close(ctx context.Context) {
	t.mu.Lock()
	idle := make(chan struct{})
	if t.gathering {
		t.start()
	}
	if !t.running {
		close(idle)
	} else {
		t.idle = idle
	}
	t.mu.Unlock()
	patience := time.NewTimer(farewell)
	defer patience.Stop()
	select {
	case <-idle:
	case <-ctx.Done():
	case <-patience.C:
	}
	t.mu.Lock()
	t.closed, t.queue, t.first = true, nil, 0
	t.mu.Unlock()
}

// observed reports whether there is an observer. Callers skip building events without one.
func (c *Client) observed() bool { return c.telling.to != nil }

// observedNow reads the clock if there is an observer to tell; reading costs as much as the rest of the core.
func (c *Client) observedNow() instant {
	if !c.observed() {
		return 0
	}
	return c.set.Clock.Now()
}

// annotate adds the observer's metadata to requests that are about to begin.
func (c *Client) annotate(ctx context.Context, rs []backend.Request) {
	adds := c.telling.adds
	if adds == nil || !c.driver.Describe().Capabilities.Has(backend.CapMetadata) {
		return
	}
	all := joined(adds.Metadata(ctx), rs[0].Metadata) // requests of one call have the same
	if len(all) == len(rs[0].Metadata) || backend.ValidateMetadata(all) != nil {
		return
	}
	for i := range rs {
		rs[i].Metadata = all
	}
}

// tell completes an event and queues it. ctx is the acquire's; its end is taken out, so that an observer can work with
// it after the call has returned.
func (c *Client) tell(ctx context.Context, e *Event) {
	if !c.observed() {
		return
	}
	if ctx == nil {
		ctx = context.Background()
	}
	e.Time, e.Driver, e.Tier, e.Owner = time.Now(), c.driver.Describe().Name, c.tier, c.set.Owner
	c.telling.put(context.WithoutCancel(ctx), e)
}

// abandoned reports a background release that the service refuses, or that is dropped, to the observer.
func (c *Client) abandoned(ctx context.Context, g *backend.Grant, err error) {
	c.tell(ctx, &Event{
		Type: EventAbandoned, Name: strings.TrimPrefix(g.Name, c.set.prefix), Kind: g.Kind, HoldID: g.HoldID, Err: err,
	})
}

// tell completes an event of the hold and queues it. The caller may hold mu; the hold has begun.
func (h *hold) tell(e *Event) {
	if !h.client.observed() {
		return
	}
	e.Name, e.Kind, e.HoldID, e.Token = h.name, h.grant.Kind, h.grant.HoldID, h.token()
	h.client.tell(h.values, e)
}

// tellOfLoss reports a lost hold to the observer. The caller holds mu, or the hold has ended.
func (h *hold) tellOfLoss(now instant) {
	if lost := (*LostError)(nil); errors.As(h.causeOrNil(), &lost) {
		h.tell(&Event{Type: EventLost, Held: now.Sub(h.since), Reason: lost.Reason, Err: lost.Err})
	}
}
