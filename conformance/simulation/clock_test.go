package simulation

import (
	"time"

	"github.com/fencelock/fencelock/backend"
)

// clock is the clock of a client. It has another origin than the service's clock, and its rate differs by up to the 1
// % that the core allows for.
type clock struct {
	from   backend.Instant // the service's clock at the beginning of the world
	offset time.Duration
	ppm    int64 // the excess of its rate over the service's, in millionths
}

// Now implements backend.Clock.
func (c *clock) Now() backend.Instant { return c.local(backend.GoClock().Now()) }

// local returns the time of c at an instant of the service's clock.
func (c *clock) local(at backend.Instant) backend.Instant {
	if at.IsZero() {
		return at
	}
	passed := at.Sub(c.from)
	return at.Add(c.offset + scaled(passed, c.ppm))
}

// real converts a duration by c to one by the service's clock.
func (c *clock) real(d time.Duration) time.Duration {
	return time.Duration(float64(d) / (1 + float64(c.ppm)/1e6))
}

// scaled returns d·ppm/1e6, without overflow for durations of years.
func scaled(d time.Duration, ppm int64) time.Duration {
	whole, rest := int64(d)/1_000_000, int64(d)%1_000_000
	return time.Duration(whole*ppm + rest*ppm/1_000_000)
}
