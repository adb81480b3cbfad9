package redisconn

// This file is when to look at a service: before the first call, once for all that wait for it, and beside the calls
// from then on. What to look at is the driver's (look functions of package redis and redlock); server.go reads one
// server.

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
	// ProbeAgain is for a service that was well.
	ProbeAgain = 30 * time.Second
	// ProbeSoon is after a fault, and the least that lies between two looks.
	ProbeSoon = time.Second
)

// What the last look at the service has found.
const (
	// It is fit, or no look has been made.
	fits uint32 = iota
	// That is long ago, or there was a fault since: the next call has the service looked at, and does not wait.
	stale
	// It is not fit: each call looks again before it goes on.
	misfit
)

// Probe looks at a service before the first call, once for all who wait for it, and again later. The zero Probe is
// ready. All methods may be called by several goroutines.
type Probe struct {
	// passed says that a look has ended well. It is never taken back: what is held can be kept and given back on a
	// service that has become unfit.
	passed atomic.Bool
	// found is one of the constants above.
	found atomic.Uint32
	// When the last look ended, a backend.Instant.
	at atomic.Int64

	mu sync.Mutex // protects the following field
	// nil while no look is under way.
	running *probing
}

// probing is one look, shared by all who wait for it.
type probing struct {
	done chan struct{}
	// Valid once done is closed, by end.
	err error
}

// Passed reports whether a look has ended well.
func (p *Probe) Passed() bool { return p.passed.Load() }

// Ready lets a call pass whose service was found fit, and looks at it first if it was not, or not yet. A look that is
// stale is made again beside the calls, and what it finds is for those that come later: calls do not wait for a
// question whose answer is nearly always the same. look ends with Note.
func (p *Probe) Ready(ctx context.Context, gate *kit.Gate, look func(context.Context) error) error {
	if !p.Passed() || p.found.Load() == misfit {
		return p.Join(ctx, gate, look)
	}
	// One of the calls that find it stale starts the look; the others go on, as what was found last still holds.
	if p.found.CompareAndSwap(stale, fits) {
		gate.Go(func(ctx context.Context) { _ = p.Join(ctx, gate, look) }) // Note has the outcome
	}
	return nil
}

// Suspect has the service looked at again with the next call, unless that was just done: many calls fail together when
// a server does, and one look answers for all of them.
func (p *Probe) Suspect(now backend.Instant) {
	if now.Sub(p.LastAt()) > ProbeSoon {
		p.found.CompareAndSwap(fits, stale)
	}
}

// LastAt is when the last look ended.
func (p *Probe) LastAt() backend.Instant { return backend.Instant(p.at.Load()) }

// Note keeps what a look has found. A service that does not answer is as fit as it was. The timer that makes it stale
// again holds nothing but the Probe, and may fire after Close: it sets a number that nobody reads.
func (p *Probe) Note(now backend.Instant, err error) {
	p.at.Store(int64(now))
	again := ProbeAgain
	switch {
	case err == nil:
		p.found.Store(fits)
	// No timer: the next call looks by itself, since it may not pass before.
	case errors.Is(err, backend.ErrMisconfigured):
		p.found.Store(misfit)
		return
	default:
		again = ProbeSoon
	}
	time.AfterFunc(redisscript.Jitter(again), func() { p.found.CompareAndSwap(fits, stale) })
}

// Join joins the look that is under way, or starts one among gate. It returns within ctx; the look may go on without
// its caller, since others wait for it too.
func (p *Probe) Join(ctx context.Context, gate *kit.Gate, look func(context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return &Failure{Cause: err, Fatal: true}
	}
	p.mu.Lock()
	run := p.running
	if run == nil {
		run = &probing{done: make(chan struct{})}
		// The look belongs to the gate and not to its first caller, who may leave.
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

// end passes the outcome to all who wait. The next Join starts a new look.
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
		// The fault before says more than that time is over.
		case last != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()):
			return last
		case !wait || !errors.As(err, &f) || f.Fatal || !Pause(ctx, n):
			return err
		}
		last = err
	}
}
