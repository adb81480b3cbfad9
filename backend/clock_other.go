//go:build !linux

package backend

import (
	"sync"
	"time"
)

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
