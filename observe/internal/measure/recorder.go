package measure

import (
	"slices"
	"strings"
	"sync"

	"github.com/fencelock/fencelock"
)

// MaxGroups bounds the values of the program's own label. Names beyond them are counted as "other".
const MaxGroups = 100

// Key identifies a series.
type Key struct {
	Driver string
	Tier   fencelock.Tier
	Kind   fencelock.Kind
	// Group is the value of the program's own label.
	Group string
}

// Labels returns the names of an instrument's labels, in the order of Key.Values. group is the name of the program's own
// label; it may be empty.
func (in *Instrument) Labels(group string) (names []string) {
	if !in.NoLabels {
		names = append(names, "driver", "tier")
	}
	if !in.NoLabels && !in.NoKind {
		names = append(names, "kind")
		if group != "" {
			names = append(names, group)
		}
	}
	if in.Label != "" {
		names = append(names, in.Label)
	}
	return names
}

// Values returns the values of an instrument's labels.
func (k *Key) Values(in *Instrument, group, value string) (values []string) {
	if !in.NoLabels {
		values = append(values, k.Driver, k.Tier.String())
	}
	if !in.NoLabels && !in.NoKind {
		values = append(values, k.Kind.String())
		if group != "" {
			values = append(values, k.Group)
		}
	}
	if in.Label != "" {
		values = append(values, value)
	}
	return values
}

// Recorder turns events into measurements. It is safe for concurrent use.
type Recorder struct {
	// build returns what adds to the series of an instrument.
	build func(k *Key, in *Instrument, value string) func(float64)
	// group returns the value of the program's own label for a name; nil: there is no such label.
	group func(name string) string

	mu sync.Mutex // protects the following fields
	// all has the series by key, and groups the values of the program's own label.
	all    map[Key]*series
	groups map[string]bool
}

// series are the adders of one key, by instrument and value. An adder is nil until it is used; the adders of counters
// and gauges are made with the first event of the key, so that they are exported as 0.
type series [count][]func(float64)

// NewRecorder returns a Recorder.
func NewRecorder(build func(k *Key, in *Instrument, value string) func(float64), group func(string) string) *Recorder {
	return &Recorder{build: build, group: group, all: map[Key]*series{}, groups: map[string]bool{}}
}

// Observe records one event.
func (r *Recorder) Observe(e *fencelock.Event) {
	if e.Type == fencelock.EventShed {
		r.build(&Key{}, &All[dropped], "")(float64(e.Count))
		return
	}
	var group string
	if r.group != nil && e.Name != "" {
		group = strings.ToValidUTF8(r.group(e.Name), "\uFFFD")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c := call{r, Key{e.Driver, e.Tier, e.Kind, r.admitted(group)}, nil}
	switch e.Type {
	case fencelock.EventWaiting:
		c.add(waiters, 0, 1)
	case fencelock.EventAcquired:
		c.acquired(e, 0)
		c.add(leases, 0, 1)
	case fencelock.EventContended:
		c.acquired(e, 1)
		c.add(refusals, refusal(e.Err), 1)
	case fencelock.EventFailed:
		c.acquired(e, 2)
		c.add(refusals, refusal(e.Err), 1)
	case fencelock.EventRenewed:
		c.add(renew, 0, e.Took.Seconds())
	case fencelock.EventSuspect:
		c.add(suspects, 0, 1)
	case fencelock.EventReleased:
		c.add(hold, 0, e.Held.Seconds())
		c.add(leases, 0, -1)
	case fencelock.EventLost:
		c.add(hold, 1, e.Held.Seconds())
		c.add(leases, 0, -1)
		c.add(losses, loss(e.Reason), 1)
	case fencelock.EventElected:
		c.add(leaders, 0, 1)
	case fencelock.EventDeposed:
		c.add(leaders, 0, -1)
	case fencelock.EventForced:
		failed := 0
		if e.Err != nil {
			failed = 1
		}
		c.add(forced, failed, 1)
	case fencelock.EventAbandoned:
		c.add(abandoned, 0, 1)
	}
}

// loss returns the index of a reason in the values of losses.
func loss(reason fencelock.Reason) int {
	if i := slices.Index(lossReasons, string(reason)); i >= 0 {
		return i
	}
	return len(lossReasons) - 1
}

// admitted returns the group, or other if there are too many. The caller holds mu.
func (r *Recorder) admitted(group string) string {
	switch {
	case group == "" || r.groups[group]:
	case len(r.groups) >= MaxGroups:
		return other
	default:
		r.groups[group] = true
	}
	return group
}

// call is one call of Observe, which holds Recorder.mu.
type call struct {
	r   *Recorder
	key Key
	of  *series
}

// acquired records the outcome of an acquire; outcome is its index in outcomes.
func (c *call) acquired(e *fencelock.Event, outcome int) {
	c.add(acquire, outcome, e.Wait.Seconds())
	if e.Contended {
		c.add(wait, outcome, e.Wait.Seconds())
	}
	if e.Waited {
		c.add(waiters, 0, -1)
	}
}

// add adds to the series of an instrument for the value with the index label.
func (c *call) add(instrument, label int, v float64) {
	if c.of == nil {
		c.of = c.r.all[c.key]
	}
	if c.of == nil {
		c.of = c.r.begin(&c.key)
	}
	adders := c.of[instrument]
	if adders[label] == nil {
		in := &All[instrument]
		adders[label] = c.r.build(&c.key, in, in.value(label))
	}
	adders[label](v)
}

// begin makes the series of a key.
func (r *Recorder) begin(key *Key) *series {
	var of series
	for i := range All {
		in := &All[i]
		of[i] = make([]func(float64), max(len(in.Values), 1))
		for label := range of[i] {
			if in.Type != Histogram && !in.NoLabels {
				of[i][label] = r.build(key, in, in.value(label))
			}
		}
	}
	r.all[*key] = &of
	return &of
}

// value returns the value with an index; empty if the instrument has no Label.
func (in *Instrument) value(label int) string {
	if in.Label == "" {
		return ""
	}
	return in.Values[label]
}
