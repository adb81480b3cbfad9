package redlock

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/rediswire"
)

// Leave is engine.Service's. It asks all servers that may have the hold, and returns when so many have released it that
// another request can have a majority; the engine then calls Left.Rest for the others. An abandoned attempt is removed
// when all servers that may have an entry of it have answered.
func (s *service) Leave(ctx context.Context, l engine.Leaving) (left engine.Left, err error) {
	if l.Kind != backend.KindExclusive {
		return left, backend.ErrUnsupported
	}
	e := &ending{g: l.Grant, start: redisconn.StartOf(l.Grant)}
	e.begin(s, s.keys(l.Name), s.nodeTimeout(l.TTL))
	switch {
	case l.Place != "":
		p := placeOf(l.Place)
		e.code, e.start = redisscript.Undo, s.start(p)
		return e.everywhere(ctx, p.may)
	case e.start == "":
		s.cancelLater(l.RequestID, "")
		e.code, e.start = redisscript.Remove, l.RequestID
		return e.everywhere(ctx, s.all())
	}
	e.code = redisscript.Free
	if e.closed() != "0" || s.wanted.Has(e.keys.Lock) { // the short script would only answer that it is not enough
		e.code = redisscript.Quit
	}
	asked := s.all() &^ s.cancelLater(l.RequestID, e.start)
	e.ask(asked)
	if !e.wait(ctx, s.hedgeTime, e.answered, e.enough) {
		if e.ended {
			e.part()
		} else {
			e.silent()
		}
	}
	if e.open|e.failed != 0 {
		left.Rest = e.rest
	}
	switch {
	case e.yes >= s.quorum || e.enough():
		left.Was = true
	// No majority can have had the hold, or all who may have it have answered.
	case e.no > count(asked)-s.quorum || e.yes+e.no == count(asked):
		left.Loss.Reason = redisconn.LossReason(l.Grant, s.clock.Now())
	default:
		return engine.Left{}, e.undecided(e.yes > 0)
	}
	return left, nil
}

// ending is one Leave.
type ending struct {
	round
	g       backend.Grant
	code    string
	start   string
	yes, no int
}

// closed is for how long the name stays closed, for a minimum hold.
func (e *ending) closed() string { return redisconn.ClosedFor(e.g.MinHoldUntil, e.s.clock.Now()) }

func (e *ending) ask(nodes set) {
	if e.code == redisscript.Quit {
		e.to(nodes, e.code, e.start, e.closed())
	} else {
		e.to(nodes, e.code, e.start)
	}
}

// answered processes one answer, and reports whether no more are needed. The short script returns nil or 0 where it is
// not enough: there are waiters, or no hold. The whole script is then asked.
func (e *ending) answered(p *step) (done bool) {
	yes, ok := one(p)
	switch {
	case p.Err != nil:
	case p.Code == redisscript.Free && !yes:
		e.s.wanted.Note(e.keys.Lock)
		e.send(p.node, redisscript.Quit, e.start, e.closed())
	case !ok:
		e.fail(p.node, errAnswer)
	case yes:
		e.yes++
	default:
		e.no++
	}
	return e.yes >= e.s.quorum || e.no > count(e.asked)-e.s.quorum
}

// enough reports whether so many servers that others can have the lock have released it, or were never asked.
func (e *ending) enough() bool {
	return e.no == 0 && e.yes > 0 && e.yes+len(e.s.nodes)-count(e.asked) >= e.s.quorum
}

// part ends a Leave whose caller leaves, perhaps because the driver closes: all its steps are sent, and where the
// short script may not be enough, the whole one behind it. A hold without renewals would stay for its TTL.
func (e *ending) part() {
	short := set(0)
	for i, p := range e.steps {
		if e.open.has(i) {
			e.fail(i, e.silence())
			if p.Code == redisscript.Free {
				short |= only(i)
			}
		}
	}
	e.code = redisscript.Quit
	e.ask(short)
}

// rest is engine.Left's: at first it waits for the servers that have not answered, and from then on it asks those again
// that have failed.
func (e *ending) rest(ctx context.Context) bool {
	patience := e.s.nodeTimeout(e.g.TTL)
	e.deadline = time.Now().Add(patience)
	if e.open == 0 {
		e.sink = make(chan *step, cap(e.sink)) // the last one may get late answers
		e.code = redisscript.Quit
		e.ask(e.failed)
	}
	if !e.wait(ctx, patience, func(p *step) bool {
		e.answered(p)
		return false
	}, nil) {
		if e.ended { // the driver closes, and its lines send pending steps before they end
			e.failed |= e.open // the short script may not be enough
		} else {
			e.silent()
		}
		e.open = 0
	}
	return e.failed == 0
}

// everywhere removes entries from some nodes. A place in the queue stands on one node only, so the answers of a majority
// do not cover it; but a request that has no entry on a majority does not hold.
func (e *ending) everywhere(ctx context.Context, nodes set) (left engine.Left, err error) {
	e.ask(nodes)
	if !e.wait(ctx, e.s.nodeTimeout(e.g.TTL), func(p *step) bool {
		e.answered(p)
		return false
	}, nil) {
		e.silent()
	}
	left.Was = e.yes > 0
	if e.failed != 0 && (e.code == redisscript.Undo || e.yes+e.no < e.s.quorum) {
		return engine.Left{}, e.undecided(left.Was)
	}
	return left, nil
}

// Extend is engine.Service's: one script call a server for up to 128 holds, on all servers concurrently. Each hold is
// renewed when a majority has prolonged it, and ended when a majority reports that.
//
// A server that lacks a hold which a majority has just confirmed gets it back, as a new vote, unless another request has
// its vote. Without a majority no vote is created.
func (s *service) Extend(ctx context.Context, _ engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	s.look(s.clock.Now())
	type hold struct {
		yes, no int
		lacking set
		fault   *redisconn.Failure
	}
	n, now := len(s.nodes), s.clock.Now()
	held := make([]hold, len(holds))
	patience := s.nodeTimeout(holds[0].TTL)
	for i := range holds {
		s.sendLater(holds[i].RequestID, "")
		patience = min(patience, s.nodeTimeout(holds[i].TTL))
	}
	r := s.round(redisscript.Keys{}, patience)
	r.sink, r.steps = make(chan *step, len(holds)*n), nil
	all := make([]*step, 0, len(holds)*n)
	for i, node := range s.nodes {
		together := make([]*rediswire.Step, len(holds))
		for k := range holds {
			g := &holds[k].Grant
			code, start := redisscript.Renew, redisconn.StartOf(*g)
			if g.Queued {
				code = redisscript.Accept // an offer may have been the last that the server heard of
			}
			if start == "" {
				start = "none" // no hold starts so
			}
			p := &step{node: i, index: k, sink: r.sink}
			p.Step = rediswire.Step{
				Code: code, Keys: s.keys(g.Name), Args: []string{start, redisscript.Millis(redisconn.PXOf(*g, now))},
				Deadline: r.deadline, Owner: p,
			}
			all, together[k] = append(all, p), &p.Step
		}
		node.line.Submit(together...)
	}
	r.open = s.all() // which no answer changes: see left
	left, undecided := len(all), len(holds)
	decided := r.wait(ctx, patience, func(p *step) bool {
		r.open = s.all()
		left--
		h := &held[p.index]
		before := h.yes >= s.quorum || h.no >= s.quorum
		switch yes, ok := one(p); {
		case p.Err != nil:
			h.fault = p.Err
		case !ok:
			h.fault = errAnswer
		case yes:
			h.yes++
		default:
			h.no++
			h.lacking |= only(p.node)
		}
		all[p.node*len(holds)+p.index] = nil
		if !before && (h.yes >= s.quorum || h.no >= s.quorum) {
			undecided--
		}
		return undecided == 0 || left == 0
	}, nil)
	if !decided {
		late := !time.Now().Before(r.deadline)
		for _, p := range all {
			if p == nil {
				continue
			}
			if late {
				s.nodes[p.node].sick.Store(true)
			}
			if h := &held[p.index]; !p.Drop() || h.fault == nil {
				h.fault = r.silence()
			}
		}
	}
	out := make([]engine.Outcome, len(holds))
	for i := range held {
		g, h := &holds[i].Grant, &held[i]
		switch {
		case h.yes >= s.quorum:
			s.round(s.keys(g.Name), s.nodeTimeout(g.TTL)).to(h.lacking, redisscript.Set,
				redisconn.ValueOf(*g), redisscript.Millis(redisconn.PXOf(*g, now)))
		case h.no >= s.quorum:
			out[i] = engine.Outcome{Gone: true, Loss: backend.Loss{Reason: redisconn.LossReason(*g, s.clock.Now())}}
		default:
			f := redisconn.Failure{Cause: errSilent}
			if h.fault != nil {
				f = *h.fault
			}
			f.Sent = f.Sent || h.yes > 0
			out[i].Err = &f
		}
	}
	return out, nil
}
