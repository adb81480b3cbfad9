//go:build !linux

package backend

// The clock of systems without CLOCK_BOOTTIME. It takes the larger of two steps, because each clock alone can stand
// still or go back, and an error that makes time pass faster ends leases early, which is safe. The price is that a wall
// clock which an administrator sets forward ends leases.

import (
	"sync"
	"time"
)

// combined is the one clock of the process: the reading of the last step, and the instant that it led to.
var combined struct {
	mu   sync.Mutex // protects the following fields
	last time.Time  // carries both a monotonic and a wall reading
	now  Instant
}

// systemNow advances by the larger of the two clocks' steps since the previous call, so that neither a suspended
// monotonic clock nor a wall clock that was set back can stretch a lease.
func systemNow() Instant {
	t := time.Now()
	combined.mu.Lock()
	defer combined.mu.Unlock()
	if combined.last.IsZero() {
		combined.last, combined.now = t, Instant(time.Hour)
		return combined.now
	}
	mono := t.Sub(combined.last)
	wall := t.Round(0).Sub(combined.last.Round(0))
	if step := max(mono, wall); step > 0 {
		combined.now = combined.now.Add(step)
		combined.last = t
	}
	return combined.now
}
