package redisconn

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Probe looks at a service before the first call, once for all who wait for it. The zero Probe is ready.
type Probe struct {
	passed atomic.Bool

	mu      sync.Mutex // protects the following field
	running *probing   // nil while none is under way
}

// probing is one look, shared by all who wait for it.
type probing struct {
	done chan struct{}
	err  error // valid after done
}

// Passed reports whether a look has ended well.
func (p *Probe) Passed() bool { return p.passed.Load() }

// Join joins the look that is under way, or starts one among gate. It returns within ctx; the look may go on without
// its caller.
func (p *Probe) Join(ctx context.Context, gate *kit.Gate, look func(context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return &Failure{Cause: err, Fatal: true}
	}
	p.mu.Lock()
	run := p.running
	if run == nil {
		run = &probing{done: make(chan struct{})}
		if !gate.Go(func(ctx context.Context) { p.end(run, look(ctx)) }) {
			p.mu.Unlock()
			return backend.ErrClosed
		}
		p.running = run
	}
	p.mu.Unlock()
	select {
	case <-run.done:
		return run.err
	case <-ctx.Done():
		return &Failure{Cause: ctx.Err()}
	}
}

func (p *Probe) end(run *probing, err error) {
	if err == nil {
		p.passed.Store(true)
	}
	p.mu.Lock()
	p.running = nil
	p.mu.Unlock()
	run.err = err
	close(run.done)
}

// Begin calls begin, which probes what has to be probed before a call, and after a fault again if the call waits. When
// ctx ends meanwhile, the last fault is the answer: it says why nothing was asked for.
func Begin(ctx context.Context, wait bool, begin func(context.Context) error) error {
	var last error
	for n := 1; ; n++ {
		err := begin(ctx)
		var f *Failure
		switch {
		case err == nil:
			return nil
		case last != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()):
			return last
		case !wait || !errors.As(err, &f) || f.Fatal || !Pause(ctx, n):
			return err
		}
		last = err
	}
}
