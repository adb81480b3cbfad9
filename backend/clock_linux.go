package backend

// CLOCK_BOOTTIME on Linux, read without a system call most of the time. bootSkew is replaced whole, so readers take no
// lock; callers that measure again take turns.

import (
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// systemNow returns CLOCK_BOOTTIME.
//
// Asking for it is a system call in Go, as expensive as the rest of an acquire, unlike time.Now. The boot
// clock differs from the monotonic one by the time spent suspended, and that shows in the wall clock: as long as wall
// and monotonic clock have advanced by the same, within driftAllowed and for no longer than recheckAfter, the machine
// was not suspended, and the known difference holds. Otherwise the system is asked again.
func systemNow() Instant {
	t := time.Now()
	mono := t.Sub(startOfProcess)
	wall := time.Duration(t.UnixNano() - startOfProcess.UnixNano())
	known := bootSkew.Load()
	if known == nil || mono-known.at > recheckAfter || (wall-mono-known.drift).Abs() > driftAllowed {
		known = askBootTime()
		mono = known.at
	}
	return Instant(mono + known.skew)
}

const (
	// driftAllowed bounds the drift of the wall clock against the monotonic one before the system is asked: slewing by
	// NTP stays below it within recheckAfter, a suspension worth noticing does not.
	driftAllowed = time.Millisecond
	// recheckAfter bounds the age of the known skew, for a suspension that ends with a step of the wall
	// clock.
	recheckAfter = 100 * time.Millisecond
)

// startOfProcess carries both a monotonic and a wall reading; the other readings are relative to it.
var startOfProcess = time.Now()

// skew is the last measurement of the boot clock.
type skew struct {
	skew  time.Duration // boot clock minus monotonic clock
	drift time.Duration // wall clock minus monotonic clock, when asked
	at    time.Duration // monotonic clock, when asked
}

var (
	bootSkew atomic.Pointer[skew]
	asking   sync.Mutex // orders the writers of bootSkew
)

// askBootTime reads the boot clock first and the monotonic clock second. The skew that this gives is too small by the
// time in between, and never too large; the true one only grows. So the larger of the old and the new value is nearer
// to the truth, instants never run backwards, and a pause between the two readings makes elapsed time longer, never
// shorter.
func askBootTime() *skew {
	asking.Lock()
	defer asking.Unlock()
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// CLOCK_BOOTTIME exists since Linux 2.6.39; a sandbox that forbids it must fail loudly, not fall back to a
		// clock with another origin.
		panic("fencelock/backend: clock_gettime(CLOCK_BOOTTIME): " + err.Error())
	}
	t := time.Now()
	mono := t.Sub(startOfProcess)
	s := &skew{
		skew:  time.Duration(ts.Nano()) - mono,
		drift: time.Duration(t.UnixNano()-startOfProcess.UnixNano()) - mono,
		at:    mono,
	}
	if known := bootSkew.Load(); known != nil {
		s.skew = max(s.skew, known.skew)
	}
	bootSkew.Store(s)
	return s
}
