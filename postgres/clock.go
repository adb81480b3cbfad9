// This file compares the server's clock with the client's. TTLs pass on the server's wall clock, which an operator or
// NTP can set, so no client ends another client's session after a single reading of it. A request carries the client's
// readings of that clock (known), and the server ends a session only if the client has seen the clock pass evenly
// since the last renewal, or if the session was marked as late a third of its TTL and a second ago (fencelock.over).

package postgres

import (
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// serverClock compares one server's clock with ours. It is safe for concurrent use.
type serverClock struct {
	mu sync.Mutex

	// Microseconds of the server's clock: the first reading after which it passed evenly. Zero before any reading.
	since int64

	// The bounds of the server's time minus ours, in microseconds, at the instant of the last reading.
	low, high int64
	at        backend.Instant

	// A reading was beyond the bounds.
	jumped bool
}

const (
	// maxDrift bounds the rate at which two clocks drift apart if neither is set. NTP slews by 1/2,000 at most.
	maxDrift = 1000

	// clockSlack is the step of the server's clock that does not count as a jump, in microseconds.
	clockSlack = 10_000
)

// read takes a reading of the server's clock, in microseconds, from an answer that arrived at got to a request that
// left after sent. It returns the size of a jump of the clock, or 0.
func (c *serverClock) read(sent, got backend.Instant, server int64) (jump time.Duration) {
	low, high := server-int64(got)/1000, server-int64(sent)/1000
	c.mu.Lock()
	defer c.mu.Unlock()
	drift := max(0, got.Sub(c.at).Microseconds()) / maxDrift
	switch {
	case c.since == 0:
		c.since = server
	case low > c.high+drift+clockSlack || high < c.low-drift-clockSlack:
		jump = time.Duration(low-c.low) * time.Microsecond
		c.since, c.jumped = server, true
	default:
		low, high = max(low, c.low-drift), min(high, c.high+drift)
		low = min(low, high) // a step within the slack
	}
	c.low, c.high, c.at = low, high, max(c.at, got)
	return jump
}

// known is the argument of fencelock.seen for a request that leaves after now: since, the least time that the server
// has if its clock has not jumped since the last reading, whether it had jumped before, and the greatest time that the
// server has at now. It is empty before any reading.
func (c *serverClock) known(now backend.Instant) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.since == 0 {
		return ""
	}
	jumped := 0
	if c.jumped {
		jumped = 1
	}
	drift := max(0, now.Sub(c.at).Microseconds()) / maxDrift
	return fmt.Sprint(c.since, int64(now)/1000+c.low-drift, jumped, int64(now)/1000+c.high+drift+clockSlack)
}

// clockWas notes a reading of the server's clock that an answer carried.
func (s *service) clockWas(sent backend.Instant, server int64) {
	if jump := s.time.read(sent, s.clock.Now(), server); jump != 0 {
		s.log.Warn("fencelock: the clock of the PostgreSQL server has jumped", "by", jump.Round(time.Millisecond))
	}
}

// clockKnown returns the argument of fencelock.seen, for a request that leaves after now.
func (s *service) clockKnown() string { return s.time.known(s.clock.Now()) }
