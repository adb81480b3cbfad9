package replica

import "time"

// Clock is the time of the cluster by the clock of this process. It counts what has passed, or less.
type Clock struct {
	base time.Duration
	from time.Time
}

// NewClock is a clock that says base at the instant from.
func NewClock(base time.Duration, from time.Time) Clock { return Clock{base, from} }

// At is the time of the cluster at the instant t.
func (c Clock) At(t time.Time) time.Duration { return c.base + t.Sub(c.from) }

// When is the instant at which the time of the cluster is base.
func (c Clock) When(base time.Duration) time.Time { return c.from.Add(base - c.base) }
