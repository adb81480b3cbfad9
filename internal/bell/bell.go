// Package bell has one goroutine tell another that there is something to do. What there is to do stands elsewhere,
// under a mutex: the goroutine that was woken looks there, and may find nothing.
package bell

// Bell is received from by the goroutine that it wakes, one at a time. It has room for one ring and is never closed:
// who listens also waits for the end of its context. New makes one; a nil one wakes nobody.
type Bell chan struct{}

// New returns a bell that has not rung.
func New() Bell { return make(Bell, 1) }

// Ring wakes the listener, now or when it listens next. It never blocks, and may be called under a mutex. Two rings
// that nobody heard in between are one, so the news must be in its place before the ring.
func (b Bell) Ring() {
	select {
	case b <- struct{}{}:
	default:
	}
}
