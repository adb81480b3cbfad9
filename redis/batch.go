package redis

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// Limits of the batcher.
const (
	maxSteps   = 128                  // steps in one script call: bounds how long it keeps the server from others
	maxFlight  = 4096                 // steps in one flight
	flights    = 1                    // flights at a time: the others' steps make the next one worth its while
	overdue    = 2 * time.Millisecond // a flight older than that does not count: the server is far, or hangs
	maxFlights = 16                   // nor do more than this start, overdue or not
	flightTime = 3 * time.Second      // after that long without an answer, the outcome is unknown
)

// batcher lets concurrent calls share round trips. A step waits only while enough others are under way, never for a
// timer: a lone caller's step leaves at once.
//
// go-redis' own AutoPipeline was rejected for this: it is experimental, it sends one EVALSHA for each step where one
// serves many here (which is half of the server's work), and a caller cannot learn whether its command has left the
// process, which is the difference between ErrUnavailable and ErrUnknown.
type batcher struct {
	client  goredis.UniversalClient
	clock   backend.Clock
	direct  *direct // nil if the client is not the driver's own
	drain   *drain  // likewise
	fault   func()  // told of exchanges that failed otherwise than by an answer
	prefix  string  // of channels
	cluster atomic.Bool
	callers atomic.Int64 // in do

	mu      sync.Mutex // protects the following fields
	pending []*step
	active  []*flight // flights under way
	counted int       // of them, those that are not overdue
	parked  int       // goroutines that wait for a flight, since a new one would have to grow its stack each time
	wake    chan *flight
	armed   bool // a timer will look for overdue flights
	workers int  // goroutines, parked or not
	closed  bool
	ended   chan struct{} // closed when closed and no goroutine is left
}

// flight is one exchange with the server after the other, as long as steps are pending.
type flight struct {
	// Protected by batcher.mu.
	started time.Time // of the present exchange
	overdue bool
}

func newBatcher(client goredis.UniversalClient, clock backend.Clock, prefix string) *batcher {
	return &batcher{
		client: client, clock: clock, prefix: prefix,
		wake: make(chan *flight, flights), ended: make(chan struct{}),
	}
}

// step is one step of the script, on its way to the server.
type step struct {
	code string
	keys redisscript.Keys
	args [3]string
	more []string // further arguments

	others []redisscript.Keys // of the further names of a TryAll

	deadline time.Time // the caller's; zero without one
	state    atomic.Uint32

	// Set before done is signalled.
	sentAt backend.Instant // before the first byte left
	answer any
	err    error
	done   chan struct{} // buffered: nobody may be listening any more

	drained <-chan struct{} // of a failed exchange: closed when the server has run the step or never will; may be nil
}

// States of a step.
const (
	stepPending uint32 = iota
	stepTaken          // it may have left the process
	stepDropped        // its caller left before it was taken
)

var steps = sync.Pool{New: func() any { return &step{done: make(chan struct{}, 1)} }}

// newStep takes a step from the pool. Only a caller that has seen done may give it back.
func newStep(code string, keys redisscript.Keys, args ...string) *step {
	s := steps.Get().(*step)
	s.code, s.keys = code, keys
	s.args, s.more, s.others = [3]string{}, nil, nil
	if len(args) > len(s.args) {
		s.more = args
	} else {
		copy(s.args[:], args)
	}
	s.deadline, s.answer, s.err = time.Time{}, nil, nil
	s.sentAt, s.drained = 0, nil
	s.state.Store(stepPending)
	return s
}

// arguments of each step; steps with a variable number keep them in step.more.
var arity = map[string]int{
	redisscript.Wait: 2, redisscript.WaitAgain: 3, redisscript.Try: 2, redisscript.TryAgain: 3,
	redisscript.Release: 2, redisscript.ReleaseFast: 1, redisscript.Remove: 1, redisscript.Cancel: 1,
	redisscript.Decline: 2, redisscript.Renew: 2, redisscript.Accept: 2, redisscript.Settle: 0, redisscript.Inform: 0,
	redisscript.Mark: 0, redisscript.Marked: 1, redisscript.Force: 0,
	redisscript.GroupWait: 2, redisscript.GroupWaitAgain: 3, redisscript.GroupTry: 2, redisscript.GroupTryAgain: 3,
	redisscript.GroupRelease: 2, redisscript.GroupRenew: 2, redisscript.GroupAccept: 2,
}

func (s *step) arguments() []string {
	if s.more != nil {
		return s.more
	}
	return s.args[:arity[s.code]]
}

// free gives a step back to the pool: only after its end was seen, since a flight may hold it until then.
func (s *step) free() { steps.Put(s) }

// do runs one step and returns within ctx, whatever the client library does with ctx: go-redis honours deadlines only,
// and a context may be cancelled without one. After a failure with Left set the step is still under way.
func (b *batcher) do(ctx context.Context, s *step) error {
	for n := 1; ; n++ {
		err := b.once(ctx, s)
		if !moving(err) || n == movingTries || !redisconn.Pause(ctx, n) {
			return err
		}
		s.again()
	}
}

// movingTries bounds how often a step is tried while its keys are moved between two nodes of a cluster: for about two
// seconds.
const movingTries = 9

// moving reports whether a step did nothing for that reason.
func moving(err error) bool {
	var f *redisconn.Failure
	return errors.As(err, &f) && f.Moving
}

// again makes a step that has ended ready for another attempt.
func (s *step) again() {
	s.answer, s.err = nil, nil
	s.state.Store(stepPending)
}

// once makes one attempt.
func (b *batcher) once(ctx context.Context, s *step) error {
	if err := ctx.Err(); err != nil {
		return &redisconn.Failure{Cause: err, Fatal: true}
	}
	s.deadline, _ = ctx.Deadline()
	if b.callers.Add(1) == 1 {
		if done, err := b.doDirect(ctx, s); done {
			b.callers.Add(-1)
			return err
		}
	}
	defer b.callers.Add(-1)
	b.submit(s)
	return await(ctx, s)
}

// doAll runs steps together and calls each, in order, with the outcome of every one.
func (b *batcher) doAll(ctx context.Context, all []*step, each func(i int, s *step, err error)) {
	deadline, _ := ctx.Deadline()
	for _, s := range all {
		s.deadline = deadline
	}
	errs := make([]error, len(all))
	todo := all
	for n := 1; ; n++ {
		b.submit(todo...)
		var again []*step
		for i, s := range all {
			if n > 1 && !moving(errs[i]) {
				continue
			}
			if errs[i] = await(ctx, s); moving(errs[i]) {
				again = append(again, s)
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

// await waits for the end of a step or of ctx.
func await(ctx context.Context, s *step) error {
	select {
	case <-s.done:
		return contextFirst(ctx, s)
	case <-ctx.Done():
	}
	if s.state.CompareAndSwap(stepPending, stepDropped) {
		return &redisconn.Failure{Cause: ctx.Err(), Left: true}
	}
	select {
	case <-s.done: // both were ready
		return contextFirst(ctx, s)
	default:
		return &redisconn.Failure{Cause: ctx.Err(), Sent: true, Left: true}
	}
}

// contextFirst returns the error of a step that has ended. If its connection gave up because the caller's time was
// over, the context's error is the one to report; on a busy machine the connection may learn that before the context
// does.
func contextFirst(ctx context.Context, s *step) error {
	if s.err == nil {
		return nil
	}
	ended := redisconn.Ended(ctx)
	if f := redisconn.FailureOf(s.err); ended != nil && !f.Fatal {
		return &redisconn.Failure{Cause: fmt.Errorf("%w: %w", ended, s.err), Sent: f.Sent}
	}
	return s.err
}

// submit queues steps and makes sure that a flight will take them.
func (b *batcher) submit(more ...*step) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		for _, s := range more {
			s.err = &redisconn.Failure{Cause: backend.ErrClosed, Fatal: true}
			s.done <- struct{}{}
		}
		return
	}
	b.pending = append(b.pending, more...)
	b.launch()
}

// launch starts a flight if enough are not under way. mu is held.
func (b *batcher) launch() {
	switch {
	case b.counted < flights && len(b.active) < maxFlights:
		f := &flight{started: time.Now()}
		b.active = append(b.active, f)
		b.counted++
		if b.parked > 0 {
			b.parked--
			b.wake <- f // has room for all who are parked
			return
		}
		b.workers++
		go b.fly(f)
	case !b.armed:
		b.armed = true
		time.AfterFunc(overdue, b.late)
	}
}

// late lets another flight start beside those that hang, so that a silent connection does not hold up the others.
func (b *batcher) late() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.armed = false
	for _, f := range b.active {
		if !f.overdue && time.Since(f.started) > overdue {
			f.overdue = true
			b.counted--
		}
	}
	if len(b.pending) > 0 {
		b.launch()
	}
}

// exchange is the memory of one goroutine's exchanges with the server.
type exchange struct {
	batch []*step
	args  []any
}

// fly runs flights: f, and those for which it is woken later.
func (b *batcher) fly(f *flight) {
	var x exchange
	for f != nil {
		runtime.Gosched() // let those who are about to submit come along
		switch b.take(f, &x) {
		case taken:
			b.send(&x)
		case landed:
			f = <-b.wake // nil when closed
		case dismissed:
			f = nil
		}
	}
	b.leave()
}

// What take did.
const (
	taken     = iota
	landed    // nothing was pending, the flight has ended
	dismissed // and the goroutine is not needed
)

// take moves what is pending into x, or ends the flight. One step under the lock, so that submit finds a flight either
// under way, and it will look again, or gone.
func (b *batcher) take(f *flight, x *exchange) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(x.batch)
	x.batch = x.batch[:0]
	n := 0
	for _, s := range b.pending {
		if len(x.batch) == maxFlight {
			break
		}
		n++
		if s.state.CompareAndSwap(stepPending, stepTaken) {
			x.batch = append(x.batch, s)
		}
	}
	left := copy(b.pending, b.pending[n:])
	clear(b.pending[left:])
	b.pending = b.pending[:left]
	if len(x.batch) > 0 {
		f.started = time.Now()
		if f.overdue && b.counted < flights {
			f.overdue = false
			b.counted++
		}
		return taken
	}
	b.active = slices.DeleteFunc(b.active, func(g *flight) bool { return g == f })
	if !f.overdue {
		b.counted--
	}
	if b.closed || b.parked == flights {
		return dismissed
	}
	b.parked++
	return landed
}

// leave is the end of a goroutine.
func (b *batcher) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.workers--
	if b.closed && b.workers == 0 {
		close(b.ended)
	}
}

// close refuses further steps and waits until the goroutines have ended, or ctx.
func (b *batcher) close(ctx context.Context) error {
	b.mu.Lock()
	if !b.closed {
		b.closed = true
		b.parked = 0
		close(b.wake)
		if b.workers == 0 {
			close(b.ended)
		}
	}
	b.mu.Unlock()
	select {
	case <-b.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
