package backend

// The clock by which leases live. All decisions about validity are differences of two Instants of one Clock. No instant
// of the wall clock takes part, so that setting a machine's time cannot prolong a lease.

import "time"

// Instant is a point in time on a Clock, in nanoseconds from an origin of that clock's own. Instants of two clocks, or
// of two processes, do not compare. The zero Instant means "unset", so no Clock returns it. Instants are never sent
// over a network: TTLs travel as durations.
type Instant int64

// Add returns t + d, later for a positive d. It does not preserve the zero Instant: check IsZero first.
func (t Instant) Add(d time.Duration) Instant { return t + Instant(d) }

// Sub returns t − u: positive if t is later.
func (t Instant) Sub(u Instant) time.Duration { return time.Duration(t - u) }

// IsZero reports whether t is the zero Instant.
func (t Instant) IsZero() bool { return t == 0 }

// Clock measures elapsed time. It never runs backwards and includes the time during which the machine was suspended,
// if the operating system allows. A driver and the core use the same clock.
//
// The wall clock is no substitute (an administrator or NTP can set it back, and a lease would stay valid for too
// long), nor is Go's monotonic clock (it stops while the machine is suspended).
type Clock interface {
	// Now returns the current instant, never zero and never less than an earlier result. It is called on every
	// acquire, renewal and Lease.Err, from any goroutine, so it should take nanoseconds.
	Now() Instant
}

// SystemClock is the clock to use outside tests. On Linux it reads CLOCK_BOOTTIME, which counts suspended time. On
// other systems each step is the larger of the monotonic and the wall clock's step.
//
// No clock of a guest counts the time for which a hypervisor froze it unnoticed. Fencing covers that; time cannot.
func SystemClock() Clock { return systemClock{} }

// systemClock has no state: all values are one clock, and their instants compare within the process.
type systemClock struct{}

func (systemClock) Now() Instant { return systemNow() }

// GoClock reads only package time's monotonic clock. It is for tests that run under testing/synctest, where that clock
// is simulated. Do not use it in production: it stops while the machine is suspended, and a lease would stay valid for
// all that time. All GoClocks are one clock.
func GoClock() Clock { return goClock{} }

type goClock struct{}

// goClockOrigin lies far in the past, so that no instant is zero or negative: under synctest time starts in the year
// 2000.
var goClockOrigin = time.Date(1990, 1, 1, 0, 0, 0, 0, time.UTC)

func (goClock) Now() Instant { return Instant(time.Since(goClockOrigin)) }
