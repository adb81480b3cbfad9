package kit

import (
	"context"
	"sync"

	"github.com/fencelock/fencelock/backend"
)

// Gate is what calls come in through, and what Close waits at for them and for what they left to do. All methods may be
// called by several goroutines.
type Gate struct {
	closing      context.Context // ends when closing starts, with cause backend.ErrClosed
	beginClosing context.CancelCauseFunc
	work         context.Context // ends when Wait has waited
	endWork      context.CancelFunc

	mu      sync.Mutex // protects the following fields
	closed  bool
	running int
	idle    []chan struct{} // closed when nothing runs any more
}

// NewGate returns an open gate.
func NewGate() *Gate {
	g := &Gate{}
	g.closing, g.beginClosing = context.WithCancelCause(context.Background())
	g.work, g.endWork = context.WithCancel(context.Background())
	return g
}

// Closing returns a context that ends when Close is called, with cause backend.ErrClosed.
func (g *Gate) Closing() context.Context { return g.closing }

// Closed reports whether Close was called.
func (g *Gate) Closed() bool { return g.closing.Err() != nil }

// Work returns the context of the work that Go starts.
func (g *Gate) Work() context.Context { return g.work }

// Enter counts a call in, until Leave. After Close it is backend.ErrClosed.
func (g *Gate) Enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return backend.ErrClosed
	}
	g.running++
	return nil
}

// Leave ends what Enter began.
func (g *Gate) Leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running--
	if g.running == 0 {
		for _, c := range g.idle {
			close(c)
		}
		g.idle = nil
	}
}

// Bind returns a context that ends with ctx and with Close, then with cause backend.ErrClosed. The function frees it.
func (g *Gate) Bind(ctx context.Context) (context.Context, func()) {
	bound, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(g.closing, func() { cancel(backend.ErrClosed) })
	return bound, func() {
		unhook()
		cancel(nil)
	}
}

// Go starts work that goes on after its call has returned. Its context ends when Wait has waited for long enough. While
// the gate closes, work is accepted from calls that entered before: it is what closing waits for. False: it was not
// started.
func (g *Gate) Go(work func(context.Context)) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.work.Err() != nil || g.closed && g.running == 0 {
		return false
	}
	g.running++
	go func() {
		defer g.Leave()
		work(g.work)
	}()
	return true
}

// Close lets nobody in any more. It is false if that was done before.
func (g *Gate) Close() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.closed = true
	g.beginClosing(backend.ErrClosed)
	return true
}

// Wait waits until nothing runs, and ends the context of the work. If ctx ends first it returns its error.
func (g *Gate) Wait(ctx context.Context) error {
	g.mu.Lock()
	var idle chan struct{}
	if g.running > 0 {
		idle = make(chan struct{})
		g.idle = append(g.idle, idle)
	}
	g.mu.Unlock()
	defer g.endWork()
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
