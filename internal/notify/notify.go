// Package notify wakes one goroutine from another. What there is to do is stored elsewhere, under a mutex: the
// goroutine that was woken reads it there, and may find nothing.
package notify

// Signal wakes the goroutine that receives from it. One goroutine receives at a time. A Signal keeps one notification
// and is never closed: its receiver also waits for the end of its context. New makes a Signal; a nil Signal wakes
// no goroutine.
type Signal chan struct{}

// New returns a Signal without a notification.
func New() Signal { return make(Signal, 1) }

// Notify wakes the receiver, now or when it next receives. It never blocks, and may be called under a mutex. Two
// notifications without a receive between them are one, so the news must be stored before the call.
func (s Signal) Notify() {
	select {
	case s <- struct{}{}:
	default:
	}
}
