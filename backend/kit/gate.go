package kit

// The gate of a driver. Its life is open → closing → over, in this order and never back:
//
//   - open: Enter lets calls in, Go starts work.
//   - closing, from Close on: Enter refuses, bound contexts end, and calls that are inside may still start work; Wait
//     waits for both.
//   - over, when Wait has returned: the context of the work has ended, and Go refuses.
//
// Calls and work share one counter, because Close has to wait for both and the last call may leave while its work goes
// on. A sync.WaitGroup would not do: it cannot be waited for with a context, and adding to it from zero while somebody
// waits is a race.

import (
	"context"
	"sync"

	"github.com/fencelock/fencelock/backend"
)

// Gate lets the calls of a driver in, and lets its Close wait for them and for what they left to do. All methods may be
// called by several goroutines. Gate takes no mutex of the driver and calls none of its code while it holds its own, so
// it may be used under any lock.
type Gate struct {
	// closing ends when closing starts, with cause backend.ErrClosed; work ends when Wait has waited. Neither has a
	// parent: a caller's context must not end what belongs to the driver.
	closing      context.Context // ends when closing starts, with cause backend.ErrClosed
	beginClosing context.CancelCauseFunc
	work         context.Context // ends when Wait has waited
	endWork      context.CancelFunc

	mu sync.Mutex // protects the following fields
	// closed is what closing tells, under the mutex, so that Enter and Close cannot cross.
	closed bool
	// running counts the calls inside and the work under way.
	running int
	// idle has one channel for each Wait that waits. Leave closes them when nothing runs any more.
	idle []chan struct{}
}

// NewGate returns an open gate. It holds no goroutine and no timer; a gate that is never closed costs memory only.
func NewGate() *Gate {
	g := &Gate{}
	g.closing, g.beginClosing = context.WithCancelCause(context.Background())
	g.work, g.endWork = context.WithCancel(context.Background())
	return g
}

// Closing returns a context that ends when Close is called, with cause backend.ErrClosed. It is for goroutines of the
// driver that serve all calls.
func (g *Gate) Closing() context.Context { return g.closing }

// Closed reports whether Close was called.
func (g *Gate) Closed() bool { return g.closing.Err() != nil }

// Work returns the context of the work that Go starts. It outlives Closing: what calls left to do is done while the
// driver closes.
func (g *Gate) Work() context.Context { return g.work }

// Enter counts a call in, until Leave. After Close it is backend.ErrClosed, and Leave must not be called.
func (g *Gate) Enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return backend.ErrClosed
	}
	g.running++
	return nil
}

// Leave ends what Enter began. The call must not touch the service afterwards.
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

// Bind returns a context that ends with ctx and with Close, then with cause backend.ErrClosed. A call that waits uses
// it, and asks Ended why it ended. The function frees what Bind took, and must be called.
//
//	bound, free := d.gate.Bind(ctx)
//	defer free()
//	answer, err := d.service.Wait(bound, key)
//	if bound.Err() != nil {
//		return kit.Ended(bound) // ErrClosed, or the caller's own end
//	}
func (g *Gate) Bind(ctx context.Context) (context.Context, func()) {
	bound, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(g.closing, func() { cancel(backend.ErrClosed) })
	return bound, func() {
		unhook()
		cancel(nil)
	}
}

// Go starts work that goes on after its call has returned, such as giving back what an abandoned acquire left. Its
// context ends when Wait has waited for long enough; the work has to end then, because the goroutine is the driver's.
//
// While the gate closes, work is accepted from calls that entered before: it is what closing waits for. False: it was
// not started, and nobody will do it. That is so only when nothing is inside any more, or after Wait.
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

// Close lets nobody in any more, and ends the bound contexts. It does not wait. It is false if that was done before:
// then another goroutine closes, or has closed, and this one has nothing to do.
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

// Wait waits until nothing runs, and ends the context of the work in any case. If ctx ends first it returns its error:
// then calls or work may still be running, and see an ended context.
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
