package simulation

import (
	"time"

	"github.com/fencelock/fencelock/backend"
)

// clock is a client's own: it began somewhere else than the service's and goes at another rate, by up to the 1 % that
// the core reckons with.
type clock struct {
	from   backend.Instant // of the service's clock, when the world began
	offset time.Duration
	ppm    int64 // how much faster than the service's, in millionths
}

// Now implements backend.Clock.
func (c *clock) Now() backend.Instant { return c.local(backend.GoClock().Now()) }

// local is what c showed at an instant of the service's clock.
func (c *clock) local(at backend.Instant) backend.Instant {
	if at.IsZero() {
		return at
	}
	passed := at.Sub(c.from)
	return at.Add(c.offset + scaled(passed, c.ppm))
}

// real turns a duration by c into one by the service's clock.
func (c *clock) real(d time.Duration) time.Duration {
	return time.Duration(float64(d) / (1 + float64(c.ppm)/1e6))
}

// scaled is d·ppm/1e6 without overflow for years.
func scaled(d time.Duration, ppm int64) time.Duration {
	whole, rest := int64(d)/1_000_000, int64(d)%1_000_000
	return time.Duration(whole*ppm + rest*ppm/1_000_000)
}
