package fencelock

// The calls in progress of a client, and Close, which ends all of them. Close goes through these steps, and ctx
// bounds them together:
//
//  1. Acquires are refused from now on, and waiting ones end with ErrClosed.
//  2. Every lease is lost with ReasonClosed. A hold under which nothing runs is released; one under which a function of
//     Do or Lead runs is released when that returns.
//  3. Close waits until all calls and functions have returned. When ctx ends it ends the releases among them.
//  4. The cleaner tries the remaining jobs.
//  5. Renewals in flight are ended. The observer gets the queued events.
//  6. The driver is closed, unless another client uses it. It ends its sessions, and with them holds that were not
//     released.
//
// All of it has closeGrace beyond the end of ctx: steps 2 to 5 take most of it, and the rest is the driver's. So a
// program that has to stop, and closes the client with the context that has ended, leaves its names free. The
// driver gets its own context, which ends with the grace; it returns within 50 ms of that, as the contract says, and
// no goroutine runs after Close. A driver that breaks that rule leaves a goroutine behind that waits for it.

import (
	"context"
	"fmt"
	"math"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// work is the set of calls in progress on callers' goroutines: acquires, releases, functions of Do and
// Lead, and looks for an event. It is a set and not a counter, because Close ends acquires at once, releases later, and
// functions never: a function ends itself when its context does.
type work struct {
	mu sync.Mutex // protects the following fields and those of all flights
	// flights are the calls in progress; nil before the first.
	flights map[*flight]struct{}
	// closing: no new acquire, run or look is admitted.
	closing bool
	// draining: acquires are refused except under a lease, see Client.Drain. It is written under mu.
	draining atomic.Bool
	// settled are the calls of Drain that wait, to be woken when a flight or a hold has ended.
	settled map[chan struct{}]struct{}
	// over: Close has stopped waiting. Releases that begin from now on end immediately.
	over bool
	// idle is made by Close and closed by the last flight that leaves.
	idle chan struct{}
}

// flight is one of these. It belongs to work from enter or begin to leave.
//
//	kind        counted by             ended by Close
//	acquiring   begin, refused later   at once, with ErrClosed
//	looking     begin, refused later   with the acquire it is for
//	releasing   enter, never refused   when ctx ends
//	running     begin, refused later   never: its leases are lost, and its context with them
type flight struct {
	kind flightKind
	// inner: an acquire under a lease of the same client. Drain lets it go on.
	inner bool
	// end calls cancel and stop. Both are nil for a function, and for a look, which ends with its acquire.
	cancel context.CancelCauseFunc // of an acquire
	stop   context.CancelFunc      // of a release; of the timer of WaitAtMost
}

type flightKind uint8

const (
	// releasing: a Release in the foreground. Close lets it finish.
	releasing flightKind = iota
	// acquiring: an acquire of one name or several. Close ends it.
	acquiring
	// running: a function of Do or Lead. Close waits for it until its context ends.
	running
	// looking: the question for an EventWaiting.
	looking
)

// enter registers a release. It is never refused: locks are released even while the client closes. The caller holds
// hold.mu.
func (w *work) enter(f *flight) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.add(f)
}

// begin counts an acquire, a run or a look in, or refuses it with ErrClosed once Close has begun.
func (w *work) begin(f *flight) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closing {
		return ErrClosed
	}
	w.add(f)
	return nil
}

// add is for enter and begin. The caller holds mu.
func (w *work) add(f *flight) {
	if w.flights == nil {
		w.flights = map[*flight]struct{}{}
	}
	w.flights[f] = struct{}{}
}

// bound sets the function that ends a release when Close stops waiting. If Close has stopped already, bound calls it.
func (w *work) bound(f *flight, stop context.CancelFunc) {
	w.mu.Lock()
	f.stop = stop
	over := w.over
	w.mu.Unlock()
	if over {
		stop()
	}
}

// leave removes a flight, and notifies Close when it was the last one.
//
// It drops stop: the flight of a release is a part of its hold, which a caller's lease may keep.
func (w *work) leave(f *flight) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.flights, f)
	f.stop = nil // a lease that was released keeps no context
	if w.idle != nil && len(w.flights) == 0 {
		close(w.idle)
		w.idle = nil
	}
	w.wake()
}

// close refuses acquires from now on, ends acquires in progress, and reports whether it is the first to do so. idle
// is closed when no call is in progress; it is nil for all but the first.
func (w *work) close() (idle chan struct{}, first bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closing {
		return nil, false
	}
	w.closing = true
	idle = make(chan struct{})
	if len(w.flights) == 0 {
		close(idle)
	} else {
		w.idle = idle
	}
	w.end(acquiring, true)
	w.wake()
	return idle, true
}

// end ends the flights of a kind, inner ones only if it says so. The caller holds mu.
func (w *work) end(kind flightKind, inner bool) {
	for f := range w.flights {
		switch {
		case f.kind != kind, f.inner && !inner:
		case f.cancel != nil:
			f.cancel(errClosing)
		case f.stop != nil:
			f.stop()
		}
	}
}

// giveUp ends the releases in progress and all later ones, and returns the number of remaining flights of each kind.
func (w *work) giveUp() (left [4]int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	w.end(releasing, true)
	for f := range w.flights {
		left[f.kind]++
	}
	return left
}

// errClosing is the cause with which Close ends an acquire: ErrClosed, distinct from that of another client.
var errClosing = fmt.Errorf("%w", ErrClosed)

// Close ends waiting acquires with ErrClosed and every lease with ReasonClosed, waits until the functions of Do and
// Lead have returned, releases all locks, finishes the cleanup of ambiguous outcomes, and closes the driver; the last
// client that uses a driver closes it. It does not close a service's client that was given to the driver. Drain is
// for programs that want to finish running work.
//
// ctx bounds all of it, with a grace of one second: Close returns at most 1.1 s after the end of ctx, and a ctx that
// has ended leaves that second to release the locks. So this is the idiom, also for a ctx that a signal ends:
//
//	defer locks.Close(ctx)
//
// The error lists unfinished calls and locks, and wraps ErrUnknown: locks that could not be released end with their
// TTL. A lease that was acquired without Do is released immediately, so stop work that runs under it first.
//
// Calls after Close return ErrClosed. A repeated Close waits for the first, until its own ctx ends, and returns the
// same result. No event is delivered after it has returned. It may be called from any goroutine, even from an
// observer; but from a function of Do or Lead it would wait for that function until ctx ends.
//
//	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
//	defer cancel()
//	if err := locks.Close(ctx); err != nil {
//		log.Print(err) // says how many locks are left to their TTL
//	}
func (c *Client) Close(ctx context.Context) error {
	if c.zero() {
		return callError("close", "", errZeroClient)
	}
	idle, first := c.work.close()
	if first {
		c.closeErr = c.shutDown(ctx, idle)
		close(c.closed)
		return c.closeErr
	}
	select {
	case <-c.closed:
		return c.closeErr
	case <-ctx.Done():
		return callError("close", "", endOf(ctx))
	}
}

const (
	// closeGrace bounds the time for which Close continues after the end of its context, as Release does.
	closeGrace = time.Second
	// driverGrace is the part of closeGrace that is the driver's: to end a session takes one exchange.
	driverGrace = 300 * time.Millisecond
)

// after returns a context with the values of ctx that ends d after ctx does, with its cause.
func after(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	late, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	timer := time.AfterFunc(math.MaxInt64, func() { cancel(endOf(ctx)) })
	stop := context.AfterFunc(ctx, func() { timer.Reset(d) })
	return late, func() {
		stop()
		cancel(nil)
		timer.Stop()
	}
}

// shutDown is the first Close. The top of this file lists the steps.
func (c *Client) shutDown(ctx context.Context, idle <-chan struct{}) error {
	most, stop := after(ctx, closeGrace-driverGrace)
	defer stop()
	whole, end := after(ctx, closeGrace)
	defer end()
	// No hold begins from now on: heart.schedule refuses it.
	now := c.set.Clock.Now()
	holds := c.heart.close()
	told := c.heart.endAll(holds, func(h *hold) error { return h.lostFor(ReasonClosed, nil) })
	for i := range told {
		c.heart.settleEnding(&told[i], now)
	}
	for _, h := range holds {
		h.mu.Lock()
		h.returnIfClosed()
		h.mu.Unlock()
	}
	select {
	case <-idle: // soon for acquires: drivers return within their context
	case <-most.Done():
	}
	// Holds that have not been released by now are left to the clean-up, then to the driver, and then to the TTL.
	left := c.work.giveUp()
	jobs := c.cleaner.Close(most)
	c.heart.stop()
	rounds := make(chan struct{})
	go func() {
		c.heart.rounds.Wait()
		c.cleaner.Wait()
		close(rounds)
	}()
	patience := time.NewTimer(lateGrace)
	defer patience.Stop()
	select {
	case <-rounds: // soon, too
	case <-patience.C:
	}
	// The observer before the driver: its last events report the steps above.
	c.waits.stop()
	c.telling.close(most)
	if left[running] > 0 {
		end() // their locks end with their TTL: the driver must not end their session while they may still write
	}
	driver := c.closeDriver(whole, patience)
	switch unreleased := jobs + left[releasing] + left[running]; {
	case unreleased+left[acquiring] > 0:
		err := fmt.Errorf(
			"%w: %d locks could not be released and end with their TTL; %d functions of Do and Lead and %d "+
				"acquires have not returned: %w", ErrUnknown, unreleased, left[running], left[acquiring], endOf(ctx))
		if driver != nil {
			err = fmt.Errorf("%w; %w", err, driver)
		}
		return callError("close", "", err)
	case driver != nil:
		return callError("close", "", driver)
	}
	return nil
}

// closeDriver closes the driver if no other client uses it. It waits for that until ctx ends, and a moment longer for a
// driver about to return. Driver.Close runs on its own goroutine, because a driver that ignores its context
// must not hold Close up.
func (c *Client) closeDriver(ctx context.Context, patience *time.Timer) error {
	if !drivers.release(c.driver) {
		return nil
	}
	done := make(chan error, 1)
	go func() { done <- c.driver.Close(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	patience.Reset(driverReturns)
	select {
	case err := <-done:
		return err
	case <-patience.C:
		return fmt.Errorf("the driver has not closed: %w", endOf(ctx))
	}
}

// driverReturns bounds the time between the end of a driver's context and its return, see package backend.
const driverReturns = 60 * time.Millisecond

// drivers counts the clients of each driver in the process, so that two clients over one driver (two namespaces, two
// tiers) can be closed in any order (TestASharedDriverIsClosedByTheLastClient).
var drivers sharers

// sharers counts users by driver. Drivers of types that are not comparable cannot be counted, and are closed by every
// client.
type sharers struct {
	mu sync.Mutex // protects the following field
	of map[backend.Driver]int
}

// counts reports whether drivers of that type are comparable.
func (s *sharers) counts(d backend.Driver) bool { return reflect.ValueOf(d).Comparable() }

// use counts a client in.
func (s *sharers) use(d backend.Driver) {
	if !s.counts(d) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of == nil {
		s.of = map[backend.Driver]int{}
	}
	s.of[d]++
}

// release counts a client out, and reports whether it was the last user of d.
func (s *sharers) release(d backend.Driver) bool {
	if !s.counts(d) {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.of[d]--
	if s.of[d] > 0 {
		return false
	}
	delete(s.of, d)
	return true
}
