package lines

// This file carries steps to the servers and back to the goroutines that wait for them. A step is one operation of the
// lock script on one name. Its life:
//
//	NewStep ─► submit ─► a line of internal/rediswire ─► Ended (on the line's goroutine) ─► done ─► await ─► free
//
// Between submit and the signal on done the step belongs to the line. A caller with an ended context leaves the step
// behind and never touches it again. Steps that are submitted while a connection is being written to leave together,
// so concurrent calls share round trips without waiting for each other. lines.go selects the line of a name.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/rediswire"
)

const (
	// MaxSteps bounds the names in one step, and with them how long it keeps the server from others. Redis serves no
	// other client while a script runs.
	MaxSteps = 128
	// answerTime bounds a read-only question, whatever its caller's context allows.
	answerTime = 3 * time.Second
)

// Step is one step on its way to the server and back. The line reads and writes the embedded Step.
type Step struct {
	rediswire.Step
	lines *Lines
	// Memory for the arguments of most steps, so that they need no allocation.
	few [3]string
	// How often a cluster's nodes have sent it on; at most maxHops.
	hops int
	// Where it is; a caller that leaves may read it while it is sent on.
	line atomic.Pointer[rediswire.Line]
	// Signalled once by Ended. It has room for one: there may be no listener any more.
	done chan struct{}
}

// steps are pooled, since every exchange needs one with its channel.
var steps = sync.Pool{New: func() any { return &Step{done: make(chan struct{}, 1)} }}

// NewStep takes a step from the pool. Only a goroutine that has seen done may return it, see free.
func NewStep(code string, keys redisscript.Keys, args ...string) *Step {
	s := steps.Get().(*Step)
	s.Code, s.Keys, s.Others = code, keys, nil
	s.Args = append(s.few[:0], args...)
	s.Deadline, s.Owner = time.Time{}, s
	s.again()
	return s
}

// again prepares an ended step for another sending.
func (s *Step) again() {
	s.Step.Again()
	s.Asking, s.hops = false, 0
}

// free returns a step to the pool, after its end was seen. A step that was left behind is never freed: its line may
// still write to it, and the garbage collector takes it afterwards.
func (s *Step) free() { steps.Put(s) }

// Done is signalled when a step that was left has ended.
func (s *Step) Done() <-chan struct{} { return s.done }

// Ended is called by the line, once, when the step was answered or has failed. It must not block, as it runs on the
// goroutine that reads the connection. A step that a cluster sends elsewhere has not ended for its caller: redirect
// submits it to the other node.
func (s *Step) Ended() {
	if s.Err != nil && s.lines.redirect(s) {
		return
	}
	s.done <- struct{}{}
}

// Do runs one step and returns within ctx. A step that was answered goes back to the pool; after a failure with Left
// set it is still in progress, and the caller may only wait for Done.
//
// A step that had no effect because its keys are moving from one cluster node to another is repeated: the nodes answer
// TRYAGAIN as long as the move lasts. Otherwise calls on such a name, releases among them, would fail for no fault of
// their callers.
func (ls *Lines) Do(ctx context.Context, s *Step) (answer any, sentAt backend.Instant, err error) {
	for n := 1; ; n++ {
		err := ls.once(ctx, s)
		if err == nil {
			answer, sentAt = s.Answer, s.SentAt
			s.free()
			return answer, sentAt, nil
		}
		if !moving(err) || n == movingTries || !redisconn.Pause(ctx, n) {
			return nil, 0, err
		}
		s.again()
	}
}

// movingTries bounds how often a step is sent while its keys are moved between two nodes: for at most two seconds, by
// the pauses of redisconn.Backoff.
const movingTries = 9

// moving reports whether a step had no effect because its keys are being moved.
func moving(err error) bool {
	var f *redisconn.Failure
	return errors.As(err, &f) && f.Moving
}

// once sends a step once, and shows it to the hooks of a client that was handed in.
func (ls *Lines) once(ctx context.Context, s *Step) error {
	if err := ctx.Err(); err != nil {
		return &redisconn.Failure{Cause: err}
	}
	if ls.hooks != nil { // and no function is made without them
		return ls.hooks.process(ctx, s.Code, s.Keys.Lock, func(ctx context.Context) error { return ls.carry(ctx, s) })
	}
	return ls.carry(ctx, s)
}

// carry sends a step and waits for its end. The line gets the caller's deadline: the connection's own deadline takes
// the place of a timer for each step.
func (ls *Lines) carry(ctx context.Context, s *Step) error {
	s.Deadline, _ = ctx.Deadline()
	l, err := ls.of(ctx, s.Keys.Lock)
	if err != nil {
		return err
	}
	s.lines = ls
	s.line.Store(l)
	l.Carry(ctx, &s.Step)
	return await(ctx, s)
}

// Send sends a step without waiting for its answer, past all hooks.
func (ls *Lines) Send(ctx context.Context, s *Step) {
	if l, err := ls.of(ctx, s.Keys.Lock); err == nil {
		s.lines = ls
		s.line.Store(l)
		l.Submit(&s.Step)
	}
}

// submitAll sends steps together: each line gets its own in one piece, and they leave in one write. Steps without a
// line have ended when it returns.
func (ls *Lines) submitAll(ctx context.Context, all []*Step) {
	together := map[*rediswire.Line][]*rediswire.Step{}
	for _, s := range all {
		l, err := ls.of(ctx, s.Keys.Lock)
		if err != nil {
			s.Err = redisconn.FailureOf(err)
			s.done <- struct{}{}
			continue
		}
		s.lines = ls
		s.line.Store(l)
		together[l] = append(together[l], &s.Step)
	}
	for l, steps := range together {
		l.Submit(steps...)
	}
}

// DoAll runs steps together and calls each, in order, with the outcome of every one, on the caller's goroutine. Steps
// that were moving are repeated without the others. Hooks see the whole as one command, named for the first step.
// Afterwards the steps are free, except for those left behind, so each must copy the values that it keeps.
func (ls *Lines) DoAll(ctx context.Context, all []*Step, each func(i int, s *Step, err error)) {
	if len(all) == 0 {
		return
	}
	deadline, _ := ctx.Deadline()
	for _, s := range all {
		s.Deadline = deadline
	}
	errs := make([]error, len(all))
	todo := all
	for n := 1; ; n++ {
		var again []*Step
		round := func(ctx context.Context) error {
			ls.submitAll(ctx, todo)
			for i, s := range all {
				if n > 1 && !moving(errs[i]) {
					continue
				}
				if errs[i] = await(ctx, s); moving(errs[i]) {
					again = append(again, s)
				}
			}
			return nil // each has its own
		}
		if ls.hooks == nil {
			_ = round(ctx) // round returns no error
		} else if err := ls.hooks.process(ctx, all[0].Code, all[0].Keys.Lock, round); err != nil {
			for i := range errs {
				errs[i] = err
			}
		}
		if len(again) == 0 || n == movingTries || !redisconn.Pause(ctx, n) {
			break
		}
		for _, s := range again {
			s.again()
		}
		todo = again
	}
	for i, s := range all {
		err := errs[i]
		each(i, s, err)
		var f *redisconn.Failure
		if !errors.As(err, &f) || !f.Left {
			s.free()
		}
	}
}

// await waits for the end of a step or of ctx. When ctx ends first there are three cases: the line has not taken the
// step, which is dropped and was not sent; the step has ended in the same moment; or it is in progress, and its
// outcome is unknown.
//
// In the last case the connection is doubted: the answer may just be late, but the next requests of other callers
// should not queue behind it. If the deadline is near, the connection fails without that.
func await(ctx context.Context, s *Step) error {
	select {
	case <-s.done:
		return contextFirst(ctx, s)
	case <-ctx.Done():
	}
	if s.Drop() {
		return &redisconn.Failure{Cause: ctx.Err(), Left: true}
	}
	select {
	case <-s.done: // both were ready
		return contextFirst(ctx, s)
	default:
		if s.Deadline.IsZero() || time.Until(s.Deadline) > redisconn.Soon {
			s.line.Load().Doubt() // else the connection fails soon anyway
		}
		return &redisconn.Failure{Cause: ctx.Err(), Sent: true, Left: true}
	}
}

// contextFirst returns the error of a step that has ended. If its connection gave up because the caller's time was
// over, the context's error is the one to report, with the connection's beside it; on a busy machine the connection
// may notice that before the context does, see redisconn.Ended.
func contextFirst(ctx context.Context, s *Step) error {
	if s.Err == nil {
		return nil
	}
	if ended := redisconn.Ended(engine.Caller(ctx)); ended != nil && !s.Err.Fatal {
		return &redisconn.Failure{Cause: fmt.Errorf("%w: %w", ended, s.Err), Sent: s.Err.Sent}
	}
	return s.Err
}
