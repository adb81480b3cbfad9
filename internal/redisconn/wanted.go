package redisconn

// This file briefly keeps a driver's knowledge about contended names. The memory is bounded and may be lost: it saves
// round trips, and no promise depends on it.

import (
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxWanted is the maximum number of names; then all are forgotten, and their next calls take one more round trip.
	maxWanted = 10000
	// wantedTime is the time for which a name counts as wanted.
	wantedTime = time.Second
)

// Wanted knows the locks for which several have contended just now. The zero Wanted is ready. All methods may be called
// by several goroutines.
type Wanted struct {
	// any is true if until is not empty. It spares callers the lock as long as nothing is contended, which is the common
	// case.
	any atomic.Bool

	mu    sync.Mutex // protects the following field
	until map[string]time.Time
}

// Note records that a lock is contended.
func (w *Wanted) Note(lock string) {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.until == nil || len(w.until) >= maxWanted {
		w.until = map[string]time.Time{}
	}
	w.until[lock] = now.Add(wantedTime)
	w.any.Store(true)
}

// Has reports whether a lock is known as contended.
func (w *Wanted) Has(lock string) bool {
	if !w.any.Load() {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	until, ok := w.until[lock]
	// An entry that is over is removed by the next question, and needs no timer.
	if ok && time.Now().After(until) {
		delete(w.until, lock)
		w.any.Store(len(w.until) > 0)
		return false
	}
	return ok
}
