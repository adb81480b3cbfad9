package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// exchange carries out one step and returns within ctx. The step itself continues for Driver.timeout at most, or until
// Close, so that its outcome is known to cleanup. sent is the instant before it, and zero if it was not sent.
func exchange[T any](ctx context.Context, d *Driver, step func(context.Context) (T, error)) (
	value T, sent backend.Instant, err error,
) {
	return exchangeUntil(ctx, d, d.prompt, func(ctx context.Context, _ bool) (T, error) { return step(ctx) }, false, func() {})
}

// exchangeUntil is exchange of a step that may be repeated, and calls landed when the step is no longer in progress. A
// prompt step runs on the caller's goroutine.
func exchangeUntil[T any](
	ctx context.Context, d *Driver, prompt bool, step func(ctx context.Context, again bool) (T, error), again bool,
	landed func(),
) (value T, sent backend.Instant, err error) {
	if prompt {
		c, err := d.stepContext(ctx)
		if err != nil {
			landed()
			return value, 0, err
		}
		c.until = time.Now().Add(d.timeoutOf(ctx))
		sent = d.clock.Now()
		value, err = step(c, again)
		return value, sent, c.outcome(err, landed)
	}
	if err := ctx.Err(); err != nil {
		landed()
		return value, 0, err
	}
	closing := d.closingOf(ctx)
	type answer struct {
		value T
		err   error
	}
	answered, sent := make(chan answer, 1), d.clock.Now()
	own, cancel := context.WithTimeout(context.WithValue(d.gate.Work(), callerKey{}, ctx), d.timeoutOf(ctx))
	if !d.gate.Go(func(context.Context) {
		defer cancel()
		value, err := step(own, again)
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

// callerKey is the key of the caller's context in the context of a step that may outlive it.
type callerKey struct{}

// Abandoned returns the error of the caller's context if the caller of a step has left. A step that reads and then
// writes does not write after that: what it has read may be the work of the caller's next step, which must not be undone.
func Abandoned(ctx context.Context) error {
	if caller, ok := ctx.Value(callerKey{}).(context.Context); ok && caller.Err() != nil {
		return caller.Err()
	}
	return ctx.Err()
}

// closingOf returns the channel that ends an exchange for ctx when the driver closes.
func (d *Driver) closingOf(ctx context.Context) <-chan struct{} {
	if ctx == d.gate.Work() {
		return d.late // cleanup, which Close waits for
	}
	return d.gate.Closing().Done()
}

// stepContext returns the context of a prompt step, or why the step is not sent.
func (d *Driver) stepContext(ctx context.Context) (*stepContext, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return &stepContext{ctx, d, d.closingOf(ctx), time.Now().Add(d.timeout)}, nil
}

// outcome returns the error of a prompt step, and calls landed when the step is no longer in progress.
func (c *stepContext) outcome(err error, landed func()) error {
	if err == nil {
		landed()
		return nil
	}
	d := c.d
	var late *Unanswered
	if !errors.As(err, &late) {
		landed()
		return d.stepError(c, err)
	}
	if late.Landed == nil || !d.gate.Go(func(work context.Context) {
		defer landed()
		own, cancel := context.WithDeadline(work, c.until.Add(landTimeout))
		defer cancel()
		defer context.AfterFunc(d.gate.Closing(), cancel)()
		late.Landed(own)
	}) {
		landed()
	}
	if ended := d.ended(c.Context); ended != nil {
		return fmt.Errorf("%w: %w", backend.ErrUnknown, ended)
	}
	if late.Err != nil {
		return fmt.Errorf("%w: %w", backend.ErrUnknown, late.Err)
	}
	return d.noAnswer()
}

// noAnswer is the error of an exchange that took too long.
func (d *Driver) noAnswer() error {
	return fmt.Errorf("%w: %w", backend.ErrUnknown, fmt.Errorf("no reply within %v", d.timeout))
}

// patientKey is the key of a value in the context of an exchange with a caller's deadline for a timeout, if that is
// longer than Driver.timeout.
type patientKey struct{}

// timeoutOf returns the maximum duration of an exchange for ctx.
func (d *Driver) timeoutOf(ctx context.Context) time.Duration {
	if at, ok := ctx.Deadline(); ok && ctx.Value(patientKey{}) != nil {
		return max(d.timeout, time.Until(at))
	}
	return d.timeout
}

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

// Caller returns the context of the caller of a prompt step, which has no earlier deadline.
func Caller(ctx context.Context) context.Context {
	if c, ok := ctx.(*stepContext); ok {
		return c.Context
	}
	return ctx
}

// Closing returns a channel that is closed when a step with the context ctx has to return although ctx has not ended,
// since the driver closes. A step that does not use Await has to keep the deadline of ctx.
func Closing(ctx context.Context) <-chan struct{} {
	if c, ok := ctx.(*stepContext); ok {
		return c.closing
	}
	return nil
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
