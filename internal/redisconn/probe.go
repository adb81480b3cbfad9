package redisconn

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// When a service is looked at again: after a while, and sooner after a fault, since another server may have taken its
// place.
const (
	ProbeAgain = 30 * time.Second
	ProbeSoon  = time.Second // at most once in that time
)

// What the last look at the service has found.
const (
	fits  uint32 = iota // or has not been made
	stale               // that is long ago, or there was a fault since
	misfit
)

// Probe looks at a service before the first call, once for all who wait for it, and again later. The zero Probe is
// ready.
type Probe struct {
	passed atomic.Bool
	found  atomic.Uint32
	at     atomic.Int64 // of the last look, a backend.Instant

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

// Ready lets a call pass whose service was found fit, and looks at it first if it was not, or not yet. A look that is
// stale is made again beside the calls, and what it finds is for those that come later. look ends with Note.
func (p *Probe) Ready(ctx context.Context, gate *kit.Gate, look func(context.Context) error) error {
	if !p.Passed() || p.found.Load() == misfit {
		return p.Join(ctx, gate, look)
	}
	if p.found.CompareAndSwap(stale, fits) {
		gate.Go(func(ctx context.Context) { _ = p.Join(ctx, gate, look) }) // Note has the outcome
	}
	return nil
}

// Suspect has the service looked at again with the next call.
func (p *Probe) Suspect(now backend.Instant) {
	if now.Sub(p.LastAt()) > ProbeSoon {
		p.found.CompareAndSwap(fits, stale)
	}
}

// LastAt is when the last look ended.
func (p *Probe) LastAt() backend.Instant { return backend.Instant(p.at.Load()) }

// Note keeps what a look has found. A service that does not answer is as fit as it was.
func (p *Probe) Note(now backend.Instant, err error) {
	p.at.Store(int64(now))
	again := ProbeAgain
	switch {
	case err == nil:
		p.found.Store(fits)
	case errors.Is(err, backend.ErrMisconfigured):
		p.found.Store(misfit)
		return
	default:
		again = ProbeSoon
	}
	time.AfterFunc(redisscript.Jitter(again), func() { p.found.CompareAndSwap(fits, stale) })
}

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
