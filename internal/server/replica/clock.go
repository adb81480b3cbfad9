package replica

import "time"

// Clock is the time of the cluster, measured with the clock of this process. It never runs faster than the elapsed
// time.
type Clock struct {
	base time.Duration
	from time.Time
}

// NewClock returns a clock that shows base at the instant from.
func NewClock(base time.Duration, from time.Time) Clock { return Clock{base, from} }

// At returns the time of the cluster at the instant t.
func (c Clock) At(t time.Time) time.Duration { return c.base + t.Sub(c.from) }

// When returns the instant at which the time of the cluster is base.
func (c Clock) When(base time.Duration) time.Time { return c.from.Add(base - c.base) }
