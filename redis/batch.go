package redis

// This file carries steps to the servers and back to the goroutines that wait for them. A step is one operation of the
// lock script on one name. Its life:
//
//	newStep ─► submit ─► a line of internal/rediswire ─► Ended (on the line's goroutine) ─► done ─► await ─► free
//
// Between submit and the signal on done the step belongs to the line, whatever its caller does meanwhile: a caller
// whose context ends leaves the step behind and never touches it again. Steps that are submitted while a connection is
// being written to leave together, so concurrent calls share round trips without waiting for each other. lines.go says
// which line a name has.

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/rediswire"
)

const (
	// maxSteps bounds the names in one step, and with them how long it keeps the server from others. Redis serves
	// nobody else while a script runs.
	maxSteps = 128
	// answerTime is for a question that changes nothing, whatever its caller's context allows.
	answerTime = 3 * time.Second
)

// step is one step on its way to the server and back. The embedded Step is what the line reads and writes.
type step struct {
	rediswire.Step
	lines *lines
	// Memory for the arguments of most steps, so that they need no allocation.
	few [3]string
	// How often a cluster's nodes have sent it on; at most maxHops.
	hops int
	// Where it is; a caller that leaves may read it while it is sent on.
	line atomic.Pointer[rediswire.Line]
	// Signalled once by Ended. It has room for one: nobody may be listening any more.
	done chan struct{}
}

// steps are pooled, since every exchange needs one with its channel.
var steps = sync.Pool{New: func() any { return &step{done: make(chan struct{}, 1)} }}

// newStep takes a step from the pool. Only a goroutine that has seen done may give it back, see free.
func newStep(code string, keys redisscript.Keys, args ...string) *step {
	s := steps.Get().(*step)
	s.Code, s.Keys, s.Others = code, keys, nil
	s.Args = append(s.few[:0], args...)
	s.Deadline, s.Owner = time.Time{}, s
	s.again()
	return s
}

// again makes a step that has ended ready to be sent once more.
func (s *step) again() {
	s.Step.Again()
	s.Asking, s.hops = false, 0
}

// free gives a step back to the pool, after its end was seen. A step that was left behind is never freed: its line may
// still write to it, and the garbage collector takes it afterwards.
func (s *step) free() { steps.Put(s) }

// Ended is called by the line, once, when the step was answered or has failed. It must not block, as it runs on the
// goroutine that reads the connection. A step that a cluster sends elsewhere has not ended for its caller: redirect
// submits it to the other node.
func (s *step) Ended() {
	if s.Err != nil && s.lines.redirect(s) {
		return
	}
	s.done <- struct{}{}
}

// do runs one step and returns within ctx. A step that was answered goes back to the pool; after a failure with Left
// set it is still under way, and the caller may only pass it on to leftoverOf.
//
// A step that did nothing because its keys are on the way from one node of a cluster to another is sent again: the
// nodes answer TRYAGAIN as long as the move lasts. Otherwise calls on such a name would fail for no reason that
// concerns their callers, releases among them.
func (ls *lines) do(ctx context.Context, s *step) (answer any, sentAt backend.Instant, err error) {
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

// moving reports whether a step did nothing because its keys are being moved.
func moving(err error) bool {
	var f *redisconn.Failure
	return errors.As(err, &f) && f.Moving
}

// once sends a step once, and shows it to the hooks of a client that was handed in.
func (ls *lines) once(ctx context.Context, s *step) error {
	if err := ctx.Err(); err != nil {
		return &redisconn.Failure{Cause: err, Fatal: true}
	}
	if ls.hooks != nil { // and no function is made without them
		return ls.hooks.process(ctx, s.Code, s.Keys.Lock, func(ctx context.Context) error { return ls.carry(ctx, s) })
	}
	return ls.carry(ctx, s)
}

// carry sends a step and waits for its end. The line gets the caller's deadline: the connection's own deadline takes
// the place of a timer for each step.
func (ls *lines) carry(ctx context.Context, s *step) error {
	s.Deadline, _ = ctx.Deadline()
	l, err := ls.of(ctx, s.Keys.Lock)
	if err != nil {
		return err
	}
	s.lines = ls
	s.line.Store(l)
	l.Carry(&s.Step)
	return await(ctx, s)
}

// submitAll sends steps together: each line gets its own in one piece, and they leave in one write. Those that have no
// line have ended when it returns.
func (ls *lines) submitAll(ctx context.Context, all []*step) {
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

// doAll runs steps together and calls each, in order, with the outcome of every one, on the caller's goroutine. Steps
// that were moving are repeated without the others. Hooks see the whole as one command, named for the first step.
// Afterwards the steps are free, but for those left behind, so each must copy what it wants to keep.
func (ls *lines) doAll(ctx context.Context, all []*step, each func(i int, s *step, err error)) {
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
		var again []*step
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
			_ = round(ctx) // it has none
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
// step, so that it is dropped and nothing was sent; the step has ended in the same moment; or it is under way, and its
// outcome is unknown.
//
// In the last case the connection is doubted: the answer may just be late, but what other callers send next had better
// not stand behind it. Where the deadline is near the connection gives up by itself.
func await(ctx context.Context, s *step) error {
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
			s.line.Load().Doubt() // else the connection gives up soon by itself
		}
		return &redisconn.Failure{Cause: ctx.Err(), Sent: true, Left: true}
	}
}

// contextFirst returns the error of a step that has ended. If its connection gave up because the caller's time was
// over, the context's error is the one to report, with the connection's beside it; on a busy machine the connection may
// learn that before the context does, see redisconn.Ended.
func contextFirst(ctx context.Context, s *step) error {
	if s.Err == nil {
		return nil
	}
	if ended := redisconn.Ended(ctx); ended != nil && !s.Err.Fatal {
		return &redisconn.Failure{Cause: fmt.Errorf("%w: %w", ended, s.Err), Sent: s.Err.Sent}
	}
	return s.Err
}
