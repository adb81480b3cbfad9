// Package background keeps count of what a driver does beside its callers, so that Close can wait for it, and spreads what
// it does again.
package background

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// RetryPause spreads repetitions: a fortieth to a twentieth of the TTL, between 25 ms and 1 s.
func RetryPause(ttl time.Duration) time.Duration {
	longest := min(max(ttl/20, 50*time.Millisecond), time.Second)
	return longest/2 + rand.N(longest/2)
}

// Work is what goes on after a call has returned, and the calls that may start some. The driver's Close waits for
// both.
type Work struct {
	Ctx    context.Context // ends when no more work is accepted
	Shut   chan struct{}   // closed when closing starts
	cancel context.CancelFunc

	mu      sync.Mutex // protects the following fields
	closed  bool
	running int
	idle    []chan struct{} // closed when nothing runs any more
}

// Init makes the zero Work ready.
func (w *Work) Init() {
	w.Ctx, w.cancel = context.WithCancel(context.Background())
	w.Shut = make(chan struct{})
}

// Closing reports whether closing has begun.
func (w *Work) Closing() bool {
	select {
	case <-w.Shut:
		return true
	default:
		return false
	}
}

// Enter notes a call that may start work later. It is false once closing has begun.
func (w *Work) Enter() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return false
	}
	w.running++
	return true
}

// Leave is the end of what Enter or Do began.
func (w *Work) Leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running--
	if w.running == 0 {
		for _, c := range w.idle {
			close(c)
		}
		w.idle = nil
	}
}

// Do starts work. While closing it is accepted from those who entered before, because it is what closing waits for.
func (w *Work) Do(work func(context.Context)) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.Ctx.Err() != nil || w.closed && w.running == 0 {
		return false
	}
	w.running++
	go func() {
		defer w.Leave()
		work(w.Ctx)
	}()
	return true
}

// Close begins closing. It is false if that was done before.
func (w *Work) Close() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return false
	}
	w.closed = true
	close(w.Shut)
	return true
}

// Wait waits until nothing runs, and ends the work when ctx ends first.
func (w *Work) Wait(ctx context.Context) error {
	w.mu.Lock()
	var idle chan struct{}
	if w.running > 0 {
		idle = make(chan struct{})
		w.idle = append(w.idle, idle)
	}
	w.mu.Unlock()
	defer w.cancel()
	if idle == nil {
		return nil
	}
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
