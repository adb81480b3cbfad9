package redlock

import (
	"context"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// Release implements backend.Driver. It asks all servers at once and returns when a majority has given the hold back,
// or when that has become impossible; the rest goes on in the background.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	if err := d.release(ctx, g); err != nil {
		return redisconn.CallError(ctx, driverName, "release", g.Name, err)
	}
	return nil
}

func (d *Driver) release(ctx context.Context, g backend.Grant) error {
	if g.Kind != backend.KindExclusive {
		return backend.ErrUnsupported
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.end()
	keys := redisscript.KeysOf(d.o.KeyPrefix, g.Name)
	start := redisconn.StartOf(g)
	if start == "" {
		return d.remove(ctx, keys, g)
	}
	steps, sink := d.toAll(keys, quit, start, closedFor(g.MinHoldUntil, d.clock.Now()))
	for _, s := range steps {
		s.closed = g.MinHoldUntil
	}
	t := tally{}
	owe := func(i int) { d.nodes[i].owe(debt{keys: keys, start: start, closed: g.MinHoldUntil}) }
	silent := d.poll(ctx, steps, sink, d.nodeTimeout(g.TTL), func(s *step) bool {
		t.count(s, 1)
		if s.err != nil {
			owe(s.index)
		}
		return t.yes >= d.quorum || t.no >= d.quorum
	})
	for _, s := range silent {
		if s.drop() {
			owe(s.index)
		} else {
			t.fault = &redisconn.Failure{Cause: errSilent, Sent: true}
		}
	}
	d.unwatch(steps, sink)
	switch {
	case t.yes >= d.quorum:
		return nil
	case t.no >= d.quorum || t.yes+t.no == len(d.nodes):
		return &backend.NotHeldError{Name: g.Name, Reason: redisconn.LossReason(g, d.clock.Now())}
	}
	return d.undecided(ctx, &t, len(silent))
}

// unwatch makes what nobody waits for any more take care of itself.
func (d *Driver) unwatch(steps []*step, sink <-chan *step) {
	waiting := false
	for _, s := range steps {
		if s.node != nil {
			s.unwatched.Store(true)
			waiting = true
		}
	}
	for waiting {
		select {
		case s := <-sink:
			if s.err != nil {
				d.nodes[s.index].owe(debt{keys: s.keys, start: s.args[0], closed: s.closed})
			}
		default:
			return
		}
	}
}

// tally counts the nodes' answers to one question.
type tally struct {
	yes, no int
	fault   *redisconn.Failure
}

func (t *tally) count(s *step, yes int64) {
	n, ok := s.answer.(int64)
	switch {
	case s.err != nil:
		t.failed(s.err)
	case !ok:
		t.failed(&redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true})
	case n == yes:
		t.yes++
	default:
		t.no++
	}
}

func (t *tally) failed(f *redisconn.Failure) {
	if t.fault == nil || !t.fault.Sent {
		t.fault = f
	}
}

// undecided is the error of a question without a majority for either answer.
func (d *Driver) undecided(ctx context.Context, t *tally, silent int) error {
	if silent > 0 {
		t.failed(&redisconn.Failure{Cause: errSilent})
	}
	f := *t.fault
	f.Sent = f.Sent || t.yes > 0
	if ended := redisconn.Ended(ctx); ended != nil {
		f.Cause = ended
	}
	return &f
}

// remove gives back whatever a request may have, hold or place, on every node that answers: a place in the queue stands
// on one node only, so that a majority's answer says nothing about it.
func (d *Driver) remove(ctx context.Context, keys redisscript.Keys, g backend.Grant) error {
	steps, sink := d.toAll(keys, redisscript.Remove, g.RequestID)
	t := tally{}
	silent := d.poll(ctx, steps, sink, d.nodeTimeout(g.TTL), func(s *step) bool {
		t.count(s, 1)
		return false
	})
	for _, s := range silent {
		if !s.drop() {
			t.fault = &redisconn.Failure{Cause: errSilent, Sent: true}
		}
	}
	switch {
	case t.yes+t.no >= d.quorum && t.yes > 0:
		return nil
	case t.no >= d.quorum:
		return &backend.NotHeldError{Name: g.Name}
	}
	return d.undecided(ctx, &t, len(silent))
}
