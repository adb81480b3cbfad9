package fencelock

// What an observer is told, and how it gets there: tell ─► telling.put ─► queue ─► deliver ─► Observer.Observe.
//
// put never blocks and runs under locks of the core; Observe runs on a goroutine of telling, under no lock. That
// goroutine begins with the first event of an empty queue and ends with the last; close waits for it for a moment. A
// queue in between is what lets no lease wait for an observer (TestManyLossesAreToldWhateverTheObserverDoes). A channel
// would do for that until it is full; then its senders would wait, or the latest events be lost, uncounted.

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Observer learns what happens to the locks of a client: for metrics, logs and traces.
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
// Events are delivered by one goroutine of the client, one after the other, in the order in which they happened; so
// those of one lease come in its order, from EventAcquired to EventReleased or EventLost. No lease and no call waits
// for an observer: one that is slow falls behind, and when more than 131,072 events wait, later ones are dropped and
// counted in an EventShed. A panic in Observe is recovered and counted there too. Close delivers what waits, for at
// most a second, and nothing is delivered after it has returned.
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

// EventType says what happened. New types may appear: ignore those you do not know.
//
// What an observer sees of one lease, in order:
//
//	at once                acquired, renewed …, released
//	after a wait           waiting, acquired (Contended), renewed …, released
//	in vain                waiting, contended
//	a fault that passes    acquired, renewed, suspect, suspect, renewed …, released
//	a fault that stays     acquired, renewed, suspect …, lost
//	an election            acquired, elected, renewed …, released, deposed
//	Close                  acquired, renewed …, lost with ReasonClosed
//
// Beside them stand abandoned, for what the background gave up, and shed, for events that were dropped.
type EventType string

const (
	// EventWaiting: an acquire has waited for 50 ms and goes on. Holder is for whom, where the driver can tell.
	EventWaiting EventType = "waiting"
	// EventAcquired: a lease began. Wait is how long the acquire took, Contended whether it had to queue.
	EventAcquired EventType = "acquired"
	// EventContended: an acquire ended without the lock because somebody else holds it. Wait is how long it took.
	EventContended EventType = "contended"
	// EventFailed: an acquire ended without the lock for another reason, in Err.
	EventFailed EventType = "failed"
	// EventRenewed: the service confirmed the lease. Took is how long it took, Left the time until the new deadline.
	EventRenewed EventType = "renewed"
	// EventSuspect: a renewal failed with Err after Took, and is tried again. Left is the time until the deadline.
	EventSuspect EventType = "suspect"
	// EventLost: the lease ended against the holder's will, with Reason. Held is how long it was held.
	EventLost EventType = "lost"
	// EventReleased: the lease was given back. Held is how long it was held, Took how long the release took; Err is
	// what the service answered, if not success.
	EventReleased EventType = "released"
	// EventElected: Lead begins to run its function. EventAcquired came before.
	EventElected EventType = "elected"
	// EventDeposed: the function of Lead has returned, with Err. Held is how long it led.
	EventDeposed EventType = "deposed"
	// EventAbandoned: the background release of something that nobody holds was given up with Err; the service ends it
	// with its TTL, if it is there at all.
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
	// HoldID names the hold in logs; it moves nothing. Holder.HoldID is the same.
	HoldID string
	Token  fencing.Token

	// Contended: an acquire found the name taken. Holder is who held it, where the driver could tell.
	Contended bool
	// Holder is who holds the name that is waited for, where known.
	Holder *Holder
	// Wait is how long an acquire took or has waited, Took how long a call of the service took, Held how long a lease
	// was held or a leader led, and Left how long it is until the deadline. All are measured by the lease clock.
	Wait time.Duration
	Took time.Duration
	Held time.Duration
	Left time.Duration
	// Reason is why the lease was lost.
	Reason Reason
	// Count is how many events were dropped.
	Count int
	// Err is what the call answered, if not success.
	Err error
}

const (
	// maxEvents bounds the events that wait, and with them the memory of an observer that hangs. It is more than a
	// client of 100,000 leases has to tell when all of them are lost at once.
	maxEvents = 1 << 17
	// farewell is how long Close waits for the observer.
	farewell = time.Second
	// waitingAfter is how long an acquire takes before it counts as a wait: an uncontended one is usually over by then.
	waitingAfter = 50 * time.Millisecond
)

// telling hands events to the observer, on a goroutine that lives while there are any.
type telling struct {
	to Observer

	mu sync.Mutex // protects the following fields
	// queue has what deliver has not taken yet.
	queue []told
	// waiting counts what put has taken and Observe has not finished, so that a batch in delivery counts too.
	waiting int
	// shed counts what was dropped since the last EventShed.
	shed int
	// running: deliver runs. It clears this under mu, in the same step in which it finds nothing more to do.
	running bool
	// closed: nothing more is taken in or delivered.
	closed bool
	// idle is made by close, and closed when nothing waits.
	idle chan struct{}
}

// told is one event in the queue, with the context for Observe.
type told struct {
	ctx   context.Context
	event Event
}

// put queues an event, or counts it as shed. It never blocks. The caller may hold any mutex of the core.
func (t *telling) put(ctx context.Context, e Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return
	case t.waiting >= maxEvents:
		t.shed++
		return
	}
	t.queue = append(t.queue, told{ctx, e})
	t.waiting++
	if !t.running {
		t.running = true
		go t.deliver()
	}
}

// deliver runs until nothing waits. It takes the queue in batches, and releases mu around each call of the observer. An
// event is forgotten as soon as it is delivered, so that the batch keeps no context alive.
func (t *telling) deliver() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(t.queue) > 0 && !t.closed {
		batch := t.queue
		t.queue = nil
		for i := range batch {
			if t.closed {
				break
			}
			t.mu.Unlock()
			err := t.observe(&batch[i])
			batch[i] = told{}
			t.mu.Lock()
			t.waiting--
			if err != nil {
				t.dropped(1, err)
			}
		}
		if t.shed > 0 {
			n := t.shed
			t.shed = 0
			t.dropped(n, nil)
		}
	}
	t.running = false
	if t.idle != nil {
		close(t.idle)
		t.idle = nil
	}
}

// dropped queues an EventShed, also beyond maxEvents: it stands for those that were dropped. A panic about that one is
// not told again. The caller holds mu.
func (t *telling) dropped(n int, err error) {
	t.waiting++
	t.queue = append(t.queue, told{context.Background(), Event{Type: EventShed, Time: time.Now(), Count: n, Err: err}})
}

// observe calls the observer, and returns an error if it panicked: a fault of an observer must not end a program that
// holds locks.
func (t *telling) observe(x *told) (err error) {
	defer func() {
		if p := recover(); p != nil && x.event.Type != EventShed {
			err = fmt.Errorf("the observer panicked: %v", p)
		}
	}()
	t.to.Observe(x.ctx, x.event)
	return nil
}

// close waits until everything is delivered, at most for farewell and until ctx ends, and lets nothing through
// afterwards: a call of Observe that hangs may still be running then, but no other begins.
func (t *telling) close(ctx context.Context) {
	t.mu.Lock()
	idle := make(chan struct{})
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
	t.closed, t.queue = true, nil
	t.mu.Unlock()
}

// observed reports whether there is anybody to tell. What is made for events only is made behind it.
func (c *Client) observed() bool { return c.telling.to != nil }

// observedNow reads the clock if there is an observer to tell; reading costs as much as the rest of the core.
func (c *Client) observedNow() instant {
	if !c.observed() {
		return 0
	}
	return c.set.Clock.Now()
}

// tell completes an event and queues it. ctx is the acquire's; its end is taken out, so that an observer can work with
// it after the call has returned.
func (c *Client) tell(ctx context.Context, e Event) {
	if !c.observed() {
		return
	}
	if ctx == nil {
		ctx = context.Background()
	}
	e.Time, e.Driver, e.Tier, e.Owner = time.Now(), c.driver.Describe().Name, c.tier, c.set.Owner
	c.telling.put(context.WithoutCancel(ctx), e)
}

// tell completes an event of the hold and queues it. The caller may hold mu; the hold has begun.
func (h *hold) tell(e Event) {
	if !h.client.observed() {
		return
	}
	e.Name, e.Kind, e.HoldID, e.Token = h.name, h.grant.Kind, h.grant.HoldID, h.token()
	h.client.tell(h.values, e)
}
