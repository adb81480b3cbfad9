package fencelock

// What is under way in a client, and Close, which owns all of it. Close goes through these steps, and ctx bounds them
// together:
//
//  1. Acquires are refused from now on, and those that wait end with ErrClosed.
//  2. Every lease is lost with ReasonClosed. A hold under which nothing runs is given back; one under which a function
//     of Do or Lead runs is given back when that returns.
//  3. Close waits until all calls and functions have returned. When ctx ends it ends the releases among them.
//  4. The clean-up tries what is left, at once.
//  5. Renewals in flight are ended. The observer gets what it has not seen yet.
//  6. The driver is closed, unless another client uses it.
//
// Each step is carried out also when ctx has ended; only the waiting ends then. What Close starts ends by itself: two
// goroutines that wait for renewals and for the driver, which outlive Close only if the driver does not return within
// its context.

import (
	"context"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// work is everything that is under way in a client on a caller's goroutine: acquires, releases, functions of Do and
// Lead, and looks for an event. It is a set and not a counter, because Close ends acquires at once, releases later, and
// functions never: a function ends itself when its context does.
type work struct {
	mu sync.Mutex // protects the following fields and those of all flights
	// flights are those under way; nil before the first.
	flights map[*flight]struct{}
	// closing: no acquire, run or look is let in any more.
	closing bool
	// over: Close has given up waiting. Releases that begin from now on are ended at once.
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
	// cancel and stop are what end uses. Both are nil for a function, and for a look, which ends with its acquire.
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

// enter counts a release in. It is never refused: a lock has to be given back also while the client closes. The caller
// holds hold.mu.
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

// bound says what ends a release when Close does not wait any longer. If that is so already, it is ended here.
func (w *work) bound(f *flight, stop context.CancelFunc) {
	w.mu.Lock()
	f.stop = stop
	over := w.over
	w.mu.Unlock()
	if over {
		stop()
	}
}

// leave takes a flight out, and tells Close when it was the last one.
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
}

// close refuses acquires from now on, ends those under way, and reports whether it is the first to do so. idle is
// closed when nothing is under way; it is nil for all but the first.
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
	w.end(acquiring)
	return idle, true
}

// end ends the flights of a kind. The caller holds mu.
func (w *work) end(kind flightKind) {
	for f := range w.flights {
		switch {
		case f.kind != kind:
		case f.cancel != nil:
			f.cancel(ErrClosed)
		case f.stop != nil:
			f.stop()
		}
	}
}

// giveUp ends the releases under way, and those that follow, and returns how many of each kind are left.
func (w *work) giveUp() (left [4]int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	w.end(releasing)
	for f := range w.flights {
		left[f.kind]++
	}
	return left
}

// Close ends waiting acquires with ErrClosed and every lease with ReasonClosed, waits until the functions of Do and
// Lead have returned, gives all locks back, finishes the clean-up of ambiguous outcomes, and closes the driver; a
// driver that several clients use is closed by the last of them. It does not close a service's client that was handed
// to the driver.
//
// ctx bounds all of it: Close returns at most some 100 ms after its end. The error tells what was not done by then, and
// wraps ErrUnknown: locks that could not be given back end with their TTL. A lease that was acquired without Do is
// given back at once, so work that runs under it should be stopped before.
//
// Calls after Close answer ErrClosed. A repeated Close waits for the first, until its own ctx ends, and returns the
// same. No event is delivered after it has returned. It may be called from any goroutine, also from an observer; not
// from a function of Do or Lead, for which it would wait until ctx ends.
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

// shutDown is the first Close. The steps are told at the top of this file.
func (c *Client) shutDown(ctx context.Context, idle <-chan struct{}) error {
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
	case <-ctx.Done():
	}
	// Whatever has not been given back by now is left to the clean-up, and then to the TTL.
	left := c.work.giveUp()
	jobs := c.cleaner.close(ctx)
	c.heart.stop()
	rounds := make(chan struct{})
	go func() {
		c.heart.rounds.Wait()
		c.cleaner.running.Wait()
		close(rounds)
	}()
	patience := time.NewTimer(lateGrace)
	defer patience.Stop()
	select {
	case <-rounds: // soon, too
	case <-patience.C:
	}
	// The observer before the driver: what it is told last is what happened above.
	c.telling.close(ctx)
	driver := c.closeDriver(ctx, patience)
	switch unreleased := jobs + left[releasing] + left[running]; {
	case unreleased+left[acquiring] > 0:
		err := fmt.Errorf(
			"%w: %d locks could not be given back and end with their TTL; %d functions of Do and Lead and %d "+
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
// driver that is about to return. Driver.Close runs on a goroutine of its own, because a driver that ignores its
// context must not hold Close up.
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
	patience.Reset(lateGrace)
	select {
	case err := <-done:
		return err
	case <-patience.C:
		return fmt.Errorf("the driver has not closed: %w", endOf(ctx))
	}
}

// drivers counts the clients of each driver in the process, so that two clients over one driver (two namespaces, two
// tiers) can be closed in any order (TestASharedDriverIsClosedByTheLastClient).
var drivers sharers

// sharers counts users by driver. Drivers whose type does not compare cannot be counted, and are closed by every
// client.
type sharers struct {
	mu sync.Mutex // protects the following field
	of map[backend.Driver]int
}

// counts reports whether drivers of that type can be told apart.
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
