package kit

// The gate of a driver. Its life is open → closing → over, in this order and never back:
//
//   - open: Enter lets calls in, Go starts work.
//   - closing, from Close on: Enter refuses, bound contexts end, and calls that are inside may still start work; Wait
//     waits for both.
//   - over, when Wait has returned: the context of the work has ended, and Go refuses.
//
// Calls and work share one counter, because Close has to wait for both and the last call may leave while its work
// continues. It is not a sync.WaitGroup, which cannot be waited for with a context, and must not be raised from zero
// during a Wait.

import (
	"context"
	"sync"

	"github.com/fencelock/fencelock/backend"
)

// Gate admits the calls of a driver, and lets its Close wait for them and for their background work. All methods may
// be called by several goroutines. Gate takes no mutex of the driver and does not call its code while it holds its
// own mutex, so it may be used under any lock.
type Gate struct {
	// closing ends when closing starts, with cause errGateClosed; work ends when Wait has waited. Neither has a
	// parent: a caller's context must not end the driver's own work.
	closing      context.Context
	beginClosing context.CancelCauseFunc
	work         context.Context
	endWork      context.CancelFunc

	mu sync.Mutex // protects the following fields
	// closed is set with closing, under the mutex, so that Enter and Close cannot cross.
	closed bool
	// running counts the calls inside and the running work.
	running int
	// idle has one channel for each Wait that waits. Leave closes them when no call or work runs any more.
	idle []chan struct{}
}

// NewGate returns an open gate. It starts no goroutine and no timer; a gate that is never closed costs memory only.
func NewGate() *Gate {
	g := &Gate{}
	g.closing, g.beginClosing = context.WithCancelCause(context.Background())
	g.work, g.endWork = context.WithCancel(context.Background())
	return g
}

// Closing returns a context that ends when Close is called, with a cause that wraps backend.ErrClosed. It is for
// goroutines of the driver that serve all calls.
func (g *Gate) Closing() context.Context { return g.closing }

// Closed reports whether Close was called.
func (g *Gate) Closed() bool { return g.closing.Err() != nil }

// Work returns the context of the work that Go starts. It outlives Closing: cleanup after calls continues while the
// driver closes.
func (g *Gate) Work() context.Context { return g.work }

// Enter counts a call in, until Leave. After Close it returns backend.ErrClosed, and Leave must not be called.
func (g *Gate) Enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return backend.ErrClosed
	}
	g.running++
	return nil
}

// Leave ends a call that Enter admitted. The call must not use the service afterwards.
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

// errGateClosed is the cause of the contexts that a gate ends. It differs from backend.ErrClosed, which may be the
// cause of a caller's context.
var errGateClosed = &gateClosed{}

type gateClosed struct{}

func (*gateClosed) Error() string { return backend.ErrClosed.Error() }
func (*gateClosed) Unwrap() error { return backend.ErrClosed }

// Bind returns a context that ends with ctx and with Close, then with a cause that wraps backend.ErrClosed. A call
// that waits uses it, and gets the reason of its end from Ended. The function releases Bind's resources, and must be
// called.
//
//	bound, free := d.gate.Bind(ctx)
//	defer free()
//	answer, err := d.service.Wait(bound, key)
//	if bound.Err() != nil {
//		return kit.Ended(bound) // ErrClosed, or the caller's own end
//	}
func (g *Gate) Bind(ctx context.Context) (context.Context, func()) {
	bound, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(g.closing, func() { cancel(errGateClosed) })
	return bound, func() {
		unhook()
		cancel(nil)
	}
}

// Go starts work that continues after its call has returned, such as the cleanup of an abandoned acquire. Its context
// ends when Wait has waited for long enough; the work has to end then, because the goroutine belongs to the driver.
//
// While the gate closes, work is accepted from calls that entered before: Wait waits for it. False: the work was not
// started, and will not be, because no call is inside any more, or Wait has returned.
//
//	if !d.gate.Go(func(ctx context.Context) { d.giveUp(ctx, key) }) {
//		// closed: the entry ends with its TTL
//	}
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

// Close refuses further calls, and ends the bound contexts. It does not wait. It returns false if the gate was closed
// before: then another goroutine closes the driver, or has closed it, and this one must return.
func (g *Gate) Close() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.closed = true
	g.beginClosing(errGateClosed)
	return true
}

// Wait waits until no call and no work is running, and ends the context of the work in any case. If ctx ends first it
// returns its error: then calls or work may still be running, and see an ended context.
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
