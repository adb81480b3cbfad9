package conformance

import (
	"context"
	"errors"
	"iter"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
)

// noted is a driver of a clause. It records the calls in flight, and checks every answer against the rules of the
// contract: see ledger.
type noted struct {
	backend.Driver
	t    *trial
	link *notedLink // nil: no link
}

// note wraps d. The wrapper offers the same optional interfaces as d: one layer for each interface of d.
func (t *trial) note(d backend.Driver, link *notedLink) backend.Driver {
	w := &noted{Driver: d, t: t, link: link}
	if m, ok := backend.As[backend.MultiAcquirer](d); ok {
		w.Driver = &notedSets{w.Driver, m, w}
	}
	if i, ok := backend.As[backend.Inspector](d); ok {
		w.Driver = &notedLook{w.Driver, i, t}
	}
	if l, ok := backend.As[backend.Lister](d); ok {
		w.Driver = &notedList{w.Driver, l, t}
	}
	if f, ok := backend.As[backend.ForceReleaser](d); ok {
		w.Driver = &notedForce{w.Driver, f, t}
	}
	if e, ok := backend.As[backend.Expirer](d); ok {
		w.Driver = &notedExpire{w.Driver, e, t}
	}
	if f, ok := d.(backend.FencingDriver); ok {
		return &notedFencing{w, f}
	}
	return w
}

// Unwrap implements backend.Unwrapper.
func (w *noted) Unwrap() backend.Driver { return w.Driver }

// Acquire implements backend.Driver.
func (w *noted) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	what := "Acquire without Wait"
	if r.Wait {
		what = "Acquire with Wait"
	}
	defer w.t.during(ctx, what, r.Name)()
	asked := w.asking()
	w.learn(&r)
	g, err := w.Driver.Acquire(ctx, r)
	if err == nil {
		w.t.ledger.granted(w.t, r, g, asked.answered())
	}
	return g, err
}

// learn makes the ledger record the driver's reports of lost holds.
func (w *noted) learn(r *backend.Request) {
	if lost, id := r.Lost, r.RequestID; lost != nil {
		name := r.Name
		r.Lost = func(loss backend.Loss) {
			w.t.ledger.lost(w.t, name, id)
			lost(loss)
		}
	}
}

// Renew implements backend.Driver.
func (w *noted) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	name := ""
	if len(grants) > 0 {
		name = grants[0].Name
	}
	defer w.t.during(ctx, "Renew", name)()
	asked := w.asking()
	renewals := w.Driver.Renew(ctx, grants)
	if len(renewals) != len(grants) {
		w.t.Violatedf("Renew of %d grants answered %d renewals", len(grants), len(renewals))
		return renewals
	}
	when := asked.answered()
	for i, r := range renewals {
		w.t.ledger.renewed(w.t, grants[i], r, when)
	}
	return renewals
}

// Release implements backend.Driver.
func (w *noted) Release(ctx context.Context, g backend.Grant) error {
	defer w.t.during(ctx, "Release", g.Name)()
	defer w.t.ending(g.Name, g.RequestID)()
	err := w.Driver.Release(ctx, g)
	switch {
	case err == nil:
		w.t.ledger.released(g)
	case !errors.Is(err, backend.ErrNotHeld):
		w.t.ledger.doubtful(g.Name, g.RequestID)
	}
	return err
}

// Close implements backend.Driver.
func (w *noted) Close(ctx context.Context) error {
	defer w.t.during(ctx, "Close", w.t.desc.Name)()
	return w.Driver.Close(ctx)
}

// asking records when a call began and ended.
type asking struct {
	w         *noted
	step      int // of the ledger, at its beginning
	to        backend.Instant
	delay     time.Duration // the delay that the link always adds to a request and its answer
	delayedAt int64         // number of changes of the link before the call
}

func (w *noted) asking() asking {
	a := asking{w: w, step: w.t.ledger.begins()}
	if w.link != nil {
		a.delay, a.delayedAt = w.link.delay()
	}
	return a
}

// answered records the end of the call.
func (a asking) answered() asking {
	a.to = a.w.t.now()
	if a.w.link != nil {
		if _, changes := a.w.link.delay(); changes != a.delayedAt {
			a.delay = 0
		}
	}
	return a
}

// notedLink is a link that records its delay.
type notedLink struct {
	fault.Link
	both    atomic.Int64 // a request and its answer
	changes atomic.Int64
}

func (l *notedLink) delay() (both time.Duration, changes int64) {
	return time.Duration(l.both.Load()), l.changes.Load()
}

func (l *notedLink) set(both time.Duration) {
	l.both.Store(int64(both))
	l.changes.Add(1)
}

// Delay implements fault.Link.
func (l *notedLink) Delay(d fault.Direction, by time.Duration) {
	l.set(0) // until it is in force
	l.Link.Delay(d, by)
	if d == fault.Both {
		l.set(2 * by)
	}
}

// Pass implements fault.Link.
func (l *notedLink) Pass() {
	l.set(0)
	l.Link.Pass()
}

// notedFencing is a noted driver with the promise of the wrapped driver.
type notedFencing struct {
	*noted
	promise backend.FencingDriver
}

// IssuesFencingTokens implements backend.FencingDriver.
func (w *notedFencing) IssuesFencingTokens() backend.Driver {
	if promises := w.promise.IssuesFencingTokens(); promises != w.promise {
		return promises
	}
	return w
}

type notedSets struct {
	backend.Driver
	sets backend.MultiAcquirer
	w    *noted
}

func (s *notedSets) Unwrap() backend.Driver { return s.Driver }

func (s *notedSets) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	name := ""
	if len(rs) > 0 {
		name = rs[0].Name
	}
	defer s.w.t.during(ctx, "AcquireAll", name)()
	asked := s.w.asking()
	for i := range rs {
		s.w.learn(&rs[i])
	}
	grants, err := s.sets.AcquireAll(ctx, rs)
	if err != nil {
		return grants, err
	}
	when := asked.answered()
	for i, g := range grants[:min(len(grants), len(rs))] {
		s.w.t.ledger.granted(s.w.t, rs[i], g, when)
	}
	return grants, nil
}

type notedLook struct {
	backend.Driver
	looks backend.Inspector
	t     *trial
}

func (l *notedLook) Unwrap() backend.Driver { return l.Driver }

func (l *notedLook) Look(ctx context.Context, name string) (backend.State, error) {
	defer l.t.during(ctx, "Look", name)()
	state, err := l.looks.Look(ctx, name)
	if err == nil {
		l.t.ledger.shown(l.t, state)
	}
	return state, err
}

type notedList struct {
	backend.Driver
	lists backend.Lister
	t     *trial
}

func (l *notedList) Unwrap() backend.Driver { return l.Driver }

func (l *notedList) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		defer l.t.during(ctx, "List", prefix)()
		for state, err := range l.lists.List(ctx, prefix) {
			if err == nil {
				l.t.ledger.shown(l.t, state)
			}
			if !yield(state, err) {
				return
			}
		}
	}
}

type notedForce struct {
	backend.Driver
	force backend.ForceReleaser
	t     *trial
}

func (f *notedForce) Unwrap() backend.Driver { return f.Driver }

// ForceRelease with a nonce may end only the hold with that nonce: if another hold ends, the ledger reports it.
func (f *notedForce) ForceRelease(ctx context.Context, r backend.ForceRequest) error {
	defer f.t.during(ctx, "ForceRelease", r.Name)()
	request, any := "", true
	if r.Nonce != (fencing.Nonce{}) {
		request, any = f.t.ledger.requestOf(r.Nonce)
	}
	if any {
		defer f.t.ending(r.Name, request)()
	}
	return f.force.ForceRelease(ctx, r)
}

type notedExpire struct {
	backend.Driver
	expire backend.Expirer
	t      *trial
}

func (e *notedExpire) Unwrap() backend.Driver { return e.Driver }

func (e *notedExpire) Expire(ctx context.Context, g backend.Grant) error {
	defer e.t.during(ctx, "Expire", g.Name)()
	defer e.t.ending(g.Name, g.RequestID)()
	return e.expire.Expire(ctx, g)
}
