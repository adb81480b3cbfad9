package redisconn

// This file is how calls begin, and when to look at a service: before the first call, once for all that wait for it,
// and beside the calls from then on. What to look at is the driver's; server.go reads one server.

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

// The results of the last look at the service.
const (
	// It is fit, or no look has been made.
	fits uint32 = iota
	// That is long ago, or there was a fault since: the next call has the service looked at, and does not wait.
	stale
	// It is not fit: each call looks again before it goes on.
	misfit
)

// Probe counts calls in, and looks at their service before the first one, once for all who wait for it, and again
// later. It is ready when its exported fields are set. All methods may be called by several goroutines.
type Probe struct {
	// Gate counts the calls, and the looks.
	Gate *kit.Gate
	// Unfit is the error that New found. Every call answers it, as New does no I/O and returns no error.
	Unfit error
	// Look is one look at the service. It ends with Note.
	Look func(context.Context) error

	// passed says that a look has ended well. It is never taken back: holds can be kept and released on a
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

// Begin counts a call in whose service was found fit, and looks at it first if it was not, or not yet. Unless it fails,
// Gate.Leave follows. A look that is stale is made again beside the calls, and its result is for later
// calls: calls do not wait for a question whose answer is nearly always the same.
func (p *Probe) Begin(ctx context.Context) error {
	return p.enter(ctx, func() error {
		if !p.Passed() || p.found.Load() == misfit {
			return p.join(ctx, p.Look)
		}
		// One of the calls that find it stale starts the look; the others go on, as what was found last still holds.
		if p.found.CompareAndSwap(stale, fits) {
			p.Gate.Go(func(ctx context.Context) { _ = p.join(ctx, p.Look) }) // Note has the outcome
		}
		return nil
	})
}

// BeginAcquire is Begin for requests that a driver which describes itself as d can serve. If they wait, faults before
// the call are repeated for as long as ctx lasts.
func (p *Probe) BeginAcquire(ctx context.Context, d backend.Description, rs ...backend.Request) error {
	if err := kit.ValidateSet(d, rs); err != nil {
		return err
	}
	return begin(ctx, rs[0].Wait, p.Begin)
}

// BeginKnown is Begin for a service that need only have been fit once: for calls on holds, which can be kept and
// released whatever became of the service since.
func (p *Probe) BeginKnown(ctx context.Context) error {
	return p.enter(ctx, func() error {
		if p.Passed() {
			return nil
		}
		return p.join(ctx, p.Look)
	})
}

// enter counts a call in if ctx has not ended and pass lets it.
func (p *Probe) enter(ctx context.Context, pass func() error) error {
	if err := p.Gate.Enter(); err != nil {
		return err
	}
	err := p.Unfit
	if ended := ctx.Err(); err == nil && ended != nil {
		err = &Failure{Cause: ended, Fatal: true} // otherwise an answer may come first, and have an effect
	} else if err == nil {
		err = pass()
	}
	if err != nil {
		p.Gate.Leave()
	}
	return err
}

// Ping joins the look that is under way, or makes the given one.
func (p *Probe) Ping(ctx context.Context, look func(context.Context) error) error {
	switch {
	case p.Gate.Closed():
		return backend.ErrClosed
	case p.Unfit != nil:
		return p.Unfit
	}
	return p.join(ctx, look)
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

// join joins the look that is under way, or starts one. It returns within ctx; the look may go on without its caller,
// since others wait for it too.
func (p *Probe) join(ctx context.Context, look func(context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return &Failure{Cause: err, Fatal: true}
	}
	p.mu.Lock()
	run := p.running
	if run == nil {
		run = &probing{done: make(chan struct{})}
		// The look belongs to the gate and not to its first caller, who may leave.
		if !p.Gate.Go(func(ctx context.Context) { p.end(run, look(ctx)) }) {
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

// end passes the outcome to all who wait. The next join starts a new look.
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

// begin calls once, which probes what has to be probed before a call, and after a fault again if the call waits. When
// ctx ends meanwhile, the last fault is the answer: it says why there was no call.
func begin(ctx context.Context, wait bool, once func(context.Context) error) error {
	var last error
	for n := 1; ; n++ {
		err := once(ctx)
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
