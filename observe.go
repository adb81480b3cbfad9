package fencelock

import (
	"time"

	"github.com/fencelock/fencelock/fencing"
)

// Observer learns what happens to the locks of a client: for metrics, logs and traces. Observe is called synchronously
// from the goroutine where the thing happened, possibly from several at once; it must return quickly and must not call
// the client or a lease. New event types may appear: ignore those you do not know.
type Observer interface {
	Observe(Event)
}

// ObserverFunc makes an Observer of a function.
type ObserverFunc func(Event)

// Observe calls f.
func (f ObserverFunc) Observe(e Event) { f(e) }

// EventType says what happened.
type EventType string

const (
	// EventAcquired: a lease began. Wait is how long the acquire took, Contended whether it had to queue.
	EventAcquired EventType = "acquired"
	// EventContended: an acquire ended without the lock because somebody else holds it. Wait is how long it took.
	EventContended EventType = "contended"
	// EventFailed: an acquire ended without the lock for another reason, in Err.
	EventFailed EventType = "failed"
	// EventRenewed: the service confirmed the lease. Left is the time until the new deadline.
	EventRenewed EventType = "renewed"
	// EventSuspect: a renewal failed with Err and is retried. Left is the time until the deadline.
	EventSuspect EventType = "suspect"
	// EventLost: the lease ended against the holder's will, with Reason. Held is how long it was held.
	EventLost EventType = "lost"
	// EventReleased: the lease was given back. Held is how long it was held; Err is what the service answered, if not
	// success.
	EventReleased EventType = "released"
)

// Event is one thing that happened. Fields that do not belong to its type are zero.
type Event struct {
	Type      EventType
	Name      string
	Owner     string
	Token     fencing.Token
	Contended bool
	Wait      time.Duration
	Held      time.Duration
	Left      time.Duration
	Reason    Reason
	Err       error
}
