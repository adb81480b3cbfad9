package redlock

// This file is Release. A hold is gone when so many servers have released it that another request can have a majority;
// the rest is asked too but not waited for. Each server has its own step, since one may have a waiter while another has
// not.
//
// A release must arrive even if nobody awaits it. Its step stays on the line, and a failure there turns it into a
// leftover (step.go): unwatched hands it over.

import (
	"context"
	"math/bits"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// Release ends a hold if it is still the granted one, in one parallel round. It asks all servers that were asked for
// votes, and returns when a majority has released the hold, or when that has become impossible: backend.ErrNotHeld,
// with a reason, if a majority does not have it, ErrUnknown if too few answer. The other servers are released in the
// background.
//
// With a grant that Request.Grant made it removes the votes and places of that request, on every server that answers.
func (d *Driver) Release(ctx context.Context, g backend.Grant) (err error) {
	defer redisconn.Tell(ctx, driverName, "release", g.Name, &err)
	if g.Kind != backend.KindExclusive {
		return backend.ErrUnsupported
	}
	if err := d.probe.Begin(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	keys := d.keys(g.Name)
	start := redisconn.StartOf(g)
	// A grant that Request.Grant made: no hold is known, so all entries of the request are removed.
	if start == "" {
		d.cancelLater(g.RequestID, "")
		return d.remove(ctx, keys, g)
	}
	e := &ending{
		d: d, g: g, keys: keys, start: start, code: redisscript.Free,
		asked: d.all() &^ d.cancelLater(g.RequestID, start),
	}
	return e.run(ctx)
}

// ending is one release of a hold. It belongs to the goroutine of its caller.
type ending struct {
	tally
	d     *Driver
	g     backend.Grant
	keys  redisscript.Keys
	start string
	// Of the first step for each server: the short script, or Quit where somebody waits or a minimum hold is to be
	// kept.
	code string
	// Who may have the hold: the others were never asked for it, and never will be.
	asked set
	// By node: the step that has not ended; nil if it has, or without a step.
	open []*step
	// How many of these there are.
	left int
	sink chan *step
}

// run asks, gathers, and decides. It waits for hedgeTime where the first answers already let others have the lock, and
// for patience where the outcome needs more.
func (e *ending) run(ctx context.Context) error {
	d := e.d
	e.sink = make(chan *step, 2*len(d.nodes))
	e.open = make([]*step, len(d.nodes))
	args := []string{e.start}
	closed := redisconn.ClosedFor(e.g.MinHoldUntil, d.clock.Now())
	// The short script would only answer that it is not enough.
	if closed != "0" || d.waiters.contended(e.keys.Lock) {
		e.code, args = redisscript.Quit, append(args, closed)
	}
	patience := d.nodeTimeout(e.g.TTL)
	began := time.Now()
	for _, s := range d.to(e.asked, e.sink, e.keys, e.code, args...) {
		// Kept in the step, for the leftover that it becomes if nobody waits for it any more.
		s.closed, s.Deadline = e.g.MinHoldUntil, began.Add(patience)
		e.open[s.index] = s
		e.left++
		s.node.submit(s)
	}
	gathered := gather(ctx, e.sink, d.hedgeTime, patience, e.answered, e.enough)
	// A step without an answer continues in the background, or becomes a leftover.
	for i, s := range e.open {
		if gathered || s == nil {
			continue
		}
		// If the caller's context ended early, the server may be well.
		if time.Since(began) >= patience {
			d.nodes[i].sick.Store(true)
		}
		// The step has not left, and the server may be silent for long: as a leftover it is done later.
		dropped := s.Drop()
		if dropped {
			e.leave(i)
			e.open[i] = nil
		}
		e.failed(&redisconn.Failure{Cause: errSilent, Sent: !dropped})
	}
	e.unwatch()
	switch {
	// Released by a majority, or by so many that others can have one.
	case e.yes >= d.quorum || e.enough():
		return nil
	// All who may have the hold have answered, and not as if it was there.
	case e.impossible() || e.yes+e.no == bits.OnesCount32(uint32(e.asked)):
		return &backend.NotHeldError{Name: e.g.Name, Reason: redisconn.LossReason(e.g, d.clock.Now())}
	}
	return e.undecided(ctx)
}

// answered processes one answer, and reports whether no more are needed. The short script returns nil or 0 where it is
// not enough: the whole script is then asked.
func (e *ending) answered(s *step) (done bool) {
	if s.Code == redisscript.Free && s.incomplete() && s.Err == nil { // somebody waits, or it is not there
		next := e.d.nodes[s.index].stepFor(e.sink, e.keys, redisscript.Quit, e.start, "0")
		next.index, next.Deadline = s.index, s.Deadline
		e.open[s.index] = next
		next.node.submit(next)
		return false
	}
	e.open[s.index] = nil
	e.left--
	e.count(s, s.Err)
	// The server may have the hold still: it failed, or a vote repeated after a NOSCRIPT may come behind.
	if s.Err != nil || e.code == redisscript.Quit && s.incomplete() {
		e.leave(s.index)
	}
	return e.yes >= e.d.quorum || e.impossible() || e.left == 0
}

// enough reports whether the hold is gone from so many servers that others can have the lock: the servers that released
// it, and those never asked, are a majority.
func (e *ending) enough() bool {
	return e.no == 0 && e.yes > 0 && e.yes+len(e.d.nodes)-bits.OnesCount32(uint32(e.asked)) >= e.d.quorum
}

// impossible reports whether no majority can have had the hold.
func (e *ending) impossible() bool { return e.no > bits.OnesCount32(uint32(e.asked))-e.d.quorum }

// leave makes the release on node i a leftover.
func (e *ending) leave(i int) {
	e.d.nodes[i].leave(leftover{keys: e.keys, start: e.start, closed: e.g.MinHoldUntil})
}

// unwatch makes steps that nobody awaits hand themselves over on failure. It sets unwatched first and empties the sink
// afterwards, and the line does it the other way round (step.Ended), so that one of the two sees a failure. Both may,
// which costs one redundant removal.
func (e *ending) unwatch() {
	for _, s := range e.open {
		if s != nil {
			s.unwatched.Store(true)
		}
	}
	// Steps that ended before unwatched was set are in the sink, and nobody else reads it.
	for e.left > 0 {
		select {
		case s := <-e.sink:
			if s.incomplete() {
				e.leave(s.index)
			}
			e.left--
		default:
			return
		}
	}
}

// tally counts the nodes' answers to one question: yes, no, and one of the faults.
type tally struct {
	yes, no int
	fault   *redisconn.Failure
}

// count takes in how a step has ended: an answer of 1 is a yes. After a failure the step may still be a line's.
func (t *tally) count(s *step, f *redisconn.Failure) {
	if f != nil {
		t.failed(f)
		return
	}
	n, ok := s.Answer.(int64)
	switch {
	case !ok:
		t.failed(&redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true})
	case n == 1:
		t.yes++
	default:
		t.no++
	}
}

// failed keeps the fault that says most: one after which something may have been done.
func (t *tally) failed(f *redisconn.Failure) {
	if t.fault == nil || !t.fault.Sent {
		t.fault = f
	}
}

// undecided is the error of a question without a majority for either answer. If anything may have been done anywhere,
// the outcome is unknown; the context's error takes the place of the fault's text where the context has ended.
func (t *tally) undecided(ctx context.Context) error {
	f := *t.fault
	f.Sent = f.Sent || t.yes > 0
	if ended := redisconn.Ended(ctx); ended != nil {
		f.Cause = ended
	}
	return &f
}

// remove removes all that a request may have, hold or place, on every node that answers: a place in the queue stands on
// one node only, so a majority's answer does not cover it.
func (d *Driver) remove(ctx context.Context, keys redisscript.Keys, g backend.Grant) error {
	steps, sink := d.toAll(keys, redisscript.Remove, g.RequestID)
	t := tally{}
	d.poll(ctx, steps, sink, d.nodeTimeout(g.TTL), func(s *step, f *redisconn.Failure) bool {
		t.count(s, f)
		return false
	})
	switch {
	case t.yes+t.no >= d.quorum && t.yes > 0:
		return nil
	case t.no >= d.quorum:
		return &backend.NotHeldError{Name: g.Name}
	}
	return t.undecided(ctx)
}
