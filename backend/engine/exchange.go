package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// exchange carries out one step and returns within ctx. The step itself continues for exchangeTimeout at most, or until
// Close, so that its outcome is known to cleanup. sent is the instant before it, and zero if it was not sent.
func exchange[T any](ctx context.Context, d *Driver, step func(context.Context) (T, error)) (
	value T, sent backend.Instant, err error,
) {
	return exchangeUntil(ctx, d, d.prompt, step, func() {})
}

// exchangeUntil is exchange, and calls landed when the step is no longer in progress. A prompt step runs on the
// caller's goroutine.
func exchangeUntil[T any](
	ctx context.Context, d *Driver, prompt bool, step func(context.Context) (T, error), landed func(),
) (value T, sent backend.Instant, err error) {
	if err := ctx.Err(); err != nil {
		landed()
		return value, 0, err
	}
	closing := d.gate.Closing().Done()
	if ctx == d.gate.Work() {
		closing = nil // cleanup, which Close waits for
	}
	if prompt {
		return exchangeHere(&stepContext{ctx, d, closing, time.Now().Add(exchangeTimeout)}, d, step, landed)
	}
	type answer struct {
		value T
		err   error
	}
	answered, sent := make(chan answer, 1), d.clock.Now()
	own, cancel := context.WithTimeout(d.gate.Work(), exchangeTimeout)
	if !d.gate.Go(func(context.Context) {
		defer cancel()
		value, err := step(own)
		landed()
		answered <- answer{value, d.stepError(own, err)}
	}) {
		cancel()
		landed()
		return value, 0, backend.ErrClosed
	}
	select {
	case a := <-answered:
		return a.value, sent, a.err
	case <-ctx.Done():
	case <-closing:
	}
	select {
	case a := <-answered: // both were ready
		return a.value, sent, a.err
	default:
		// From now on only Close waits for it.
		stop := context.AfterFunc(d.gate.Closing(), cancel)
		context.AfterFunc(own, func() { stop() })
		return value, sent, fmt.Errorf("%w: %w", backend.ErrUnknown, d.ended(ctx))
	}
}

// exchangeHere is an exchange on the caller's goroutine.
func exchangeHere[T any](ctx *stepContext, d *Driver, step func(context.Context) (T, error), landed func()) (
	value T, sent backend.Instant, err error,
) {
	sent = d.clock.Now()
	value, err = step(ctx)
	var late *Unanswered
	if err == nil || !errors.As(err, &late) {
		landed()
		return value, sent, d.stepError(ctx, err)
	}
	if late.Landed == nil || !d.gate.Go(func(work context.Context) {
		defer landed()
		own, cancel := context.WithDeadline(work, ctx.until)
		defer cancel()
		defer context.AfterFunc(d.gate.Closing(), cancel)()
		late.Landed(own)
	}) {
		landed()
	}
	if ended := d.ended(ctx.Context); ended != nil {
		return value, sent, fmt.Errorf("%w: %w", backend.ErrUnknown, ended)
	}
	if late.Err != nil {
		return value, sent, fmt.Errorf("%w: %w", backend.ErrUnknown, late.Err)
	}
	return value, sent, errNoAnswer
}

var errNoAnswer = fmt.Errorf("%w: no reply within %v", backend.ErrUnknown, exchangeTimeout)

// stepContext is the context of a step of a Prompt service: its caller's, with an earlier deadline. It makes no timer:
// Await does, if the answer takes long.
type stepContext struct {
	context.Context // the caller's
	d               *Driver
	closing         <-chan struct{}
	until           time.Time
}

// Deadline is context.Context's.
func (c *stepContext) Deadline() (time.Time, bool) {
	if own, ok := c.Context.Deadline(); ok && own.Before(c.until) {
		return own, true
	}
	return c.until, true
}

// Awaited is the outcome of Await.
type Awaited uint8

const (
	// Answered: the answer has come.
	Answered Awaited = iota
	// Broken: the connection's channel was closed.
	Broken
	// Ended: the step has to return.
	Ended
)

// Await waits for the answer of a step with the context ctx, until broken is closed, which may be nil, or the step has
// to return: with its caller's context, with Close, or after the time that the engine gives an exchange.
func Await[A any](ctx context.Context, answers <-chan A, broken <-chan struct{}) (a A, how Awaited) {
	select {
	case a = <-answers:
		return a, Answered
	default:
	}
	var closing <-chan struct{}
	var late <-chan time.Time
	if c, ok := ctx.(*stepContext); ok {
		closing = c.closing
		timer, ok := c.d.timers.Get().(*time.Timer)
		if left := time.Until(c.until); ok {
			timer.Reset(left)
		} else {
			timer = time.NewTimer(left)
		}
		defer func() {
			timer.Stop()
			c.d.timers.Put(timer)
		}()
		late = timer.C
	}
	select {
	case a = <-answers:
		return a, Answered
	case <-broken:
		how = Broken
	case <-ctx.Done():
		how = Ended
	case <-closing:
		how = Ended
	case <-late:
		how = Ended
	}
	select {
	case a = <-answers: // both were ready
		how = Answered
	default:
	}
	return a, how
}
