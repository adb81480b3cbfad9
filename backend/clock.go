package backend

import "time"

// Instant is a point in time on a Clock, in nanoseconds from an origin of that clock's own. Instants of two clocks, or
// of two processes, do not compare. The zero Instant means "none".
type Instant int64

// Add returns t + d.
func (t Instant) Add(d time.Duration) Instant { return t + Instant(d) }

// Sub returns t − u.
func (t Instant) Sub(u Instant) time.Duration { return time.Duration(t - u) }

// IsZero reports whether t is "none".
func (t Instant) IsZero() bool { return t == 0 }

// Clock measures elapsed time. It never runs backwards and, as far as the operating system allows, never stands still:
// time during which the machine was suspended counts. A driver and the core above it use the same clock.
//
// The wall clock is no substitute (an administrator or NTP can set it back, and a lease would be believed for too
// long), and Go's monotonic clock alone is none either (it stands still while the machine is suspended).
type Clock interface {
	Now() Instant
}

// SystemClock is the clock to use outside tests. On Linux it reads CLOCK_BOOTTIME, which counts suspended time. On
// other systems each step is the larger of the monotonic and the wall clock's step.
//
// No clock of a guest counts the time for which a hypervisor froze it unnoticed. Fencing covers that; time cannot.
func SystemClock() Clock { return systemClock{} }

type systemClock struct{}

func (systemClock) Now() Instant { return systemNow() }

// GoClock reads only package time's monotonic clock. It is for tests that run under testing/synctest, where that clock
// is simulated. Do not use it in production: it stands still while the machine is suspended.
func GoClock() Clock { return goClock{} }

type goClock struct{}

// The origin lies an hour before the start, so that no instant is zero. Under synctest time starts in the year 2000,
// before the origin; a fixed origin far in the past keeps instants positive there.
var goClockOrigin = time.Date(1990, 1, 1, 0, 0, 0, 0, time.UTC)

func (goClock) Now() Instant { return Instant(time.Since(goClockOrigin)) }
