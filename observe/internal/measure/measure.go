// Package measure has the instruments that observe/prom and observe/otel share, with their updates by a client's
// events.
package measure

import (
	"context"
	"errors"

	"github.com/fencelock/fencelock"
)

// Type is the type of an instrument.
type Type uint8

// The types of an instrument.
const (
	// Histogram counts durations in seconds.
	Histogram Type = iota
	// Counter counts events.
	Counter
	// Gauge counts what there is now.
	Gauge
)

// Instrument is one metric. Its labels are driver, tier, kind, the program's own label, and Label.
type Instrument struct {
	// Name has dots between its words: acquire.duration.
	Name string
	Type Type
	Help string
	// Label is the label beside the client's labels, and Values are all of its values; both may be empty.
	Label  string
	Values []string
	// Buckets are the upper bounds of a histogram, in seconds.
	Buckets []float64
	// NoKind: it lacks kind and the program's own label. NoLabels: it has no labels.
	NoKind, NoLabels bool
}

// The indexes of All.
const (
	acquire = iota
	wait
	hold
	renew
	leases
	waiters
	leaders
	losses
	refusals
	suspects
	forced
	abandoned
	dropped
	count
)

var (
	brief = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}
	long  = []float64{.001, .005, .01, .05, .1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600}
)

// outcomes are the outcomes of an acquire, by the type of the event.
var outcomes = []string{
	string(fencelock.EventAcquired), string(fencelock.EventContended), string(fencelock.EventFailed),
}

// All are the instruments. Their order is that of the constants.
var All = [count]Instrument{
	acquire: {
		Name: "acquire.duration", Label: "outcome", Values: outcomes, Buckets: brief,
		Help: "Time from the call of an acquire to its outcome.",
	},
	wait: {
		Name: "wait.duration", Label: "outcome", Values: outcomes, Buckets: brief,
		Help: "The same, of acquires that found the name held.",
	},
	hold: {
		Name: "hold.duration", Label: "end", Buckets: long,
		Values: []string{string(fencelock.EventReleased), string(fencelock.EventLost)},
		Help:   "Time from the grant to the end of a lease.",
	},
	renew: {
		Name: "renew.duration", Buckets: brief,
		Help: "Time that a renewal took which the service confirmed.",
	},
	leases: {
		Name: "leases", Type: Gauge,
		Help: "Leases that the process holds.",
	},
	waiters: {
		Name: "waiters", Type: Gauge,
		Help: "Acquires that have waited for more than 50 ms.",
	},
	leaders: {
		Name: "leaders", Type: Gauge,
		Help: "Elections that the process leads.",
	},
	losses: {
		Name: "losses", Type: Counter, Label: "reason", Values: lossReasons,
		Help: "Leases that ended before they were released, by LostError.Reason.",
	},
	refusals: {
		Name: "refusals", Type: Counter, Label: "reason", Values: refusalReasons(),
		Help: "Acquires that ended without the lock, by the error.",
	},
	suspects: {
		Name: "suspects", Type: Counter,
		Help: "Leases with a renewal that failed, once until a renewal succeeds.",
	},
	forced: {
		Name: "forced_releases", Type: Counter, Label: "result", Values: []string{"released", "failed"}, NoKind: true,
		Help: "Calls of ForceRelease by the process.",
	},
	abandoned: {
		Name: "abandoned", Type: Counter, NoKind: true,
		Help: "Releases in the background that the service refused for a minute, counted every minute, and dropped ones.",
	},
	dropped: {
		Name: "dropped_events", Type: Counter, NoLabels: true,
		Help: "Events that the client dropped because an observer was too slow or panicked. Gauges may be wrong then.",
	},
}

// other is the value of a label for values that its list lacks.
const other = "other"

var lossReasons = []string{
	string(fencelock.ReasonExpired), string(fencelock.ReasonSessionExpired), string(fencelock.ReasonForceReleased),
	string(fencelock.ReasonEvicted), string(fencelock.ReasonHistoryLost), string(fencelock.ReasonReplaced),
	string(fencelock.ReasonMaxHold), string(fencelock.ReasonClosed), other,
}

// refusalErrors are in the order of the search: the service's answers before the ends of a wait.
var refusalErrors = []struct {
	reason string
	err    error
}{
	{"deadlock", fencelock.ErrDeadlock},
	{"queue-full", fencelock.ErrQueueFull},
	{"limit-mismatch", fencelock.ErrLimitMismatch},
	{"history-lost", fencelock.ErrHistoryLost},
	{"misconfigured", fencelock.ErrMisconfigured},
	{"denied", fencelock.ErrDenied},
	{"closed", fencelock.ErrClosed},
	{"held", fencelock.ErrHeld},
	{"unavailable", fencelock.ErrUnavailable},
	{"unknown", fencelock.ErrUnknown},
	{"cancelled", context.Canceled},
	{"deadline", context.DeadlineExceeded},
}

func refusalReasons() (reasons []string) {
	for _, r := range refusalErrors {
		reasons = append(reasons, r.reason)
	}
	return append(reasons, other)
}

// refusal returns the index of an error in the values of refusals.
func refusal(err error) int {
	i := 0
	for i < len(refusalErrors) && !errors.Is(err, refusalErrors[i].err) {
		i++
	}
	return i
}
