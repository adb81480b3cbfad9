package fencelock

// What an acquire under other leases is. A line of work is known by its context: the one that Do hands out, or
// Lease.Context, carries the leases under which work with it happens. Three things go by that and by nothing else:
// Reentrant, Options.Order, and the holds that a request is made under, by which a service with CapDeadlock finds
// cycles.
//
// Goroutine ids would not do, since work moves between goroutines. Nor would the client as the holder, as sessions
// suggest: two requests of one server process would stand for each other, and a wait that ends would be refused as a
// deadlock. A false alarm is worse than a missed deadlock, which a TTL or a context ends. Work that does not pass its
// context on gets no reentrancy and no warning (see docs/decisions, a-line-of-work-is-its-context).

import (
	"context"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/backend"
)

// lineKey is the key under which a context carries its line.
type lineKey struct{}

// line is one line of work: the leases under which a context's work happens, of any client. It is a value of its own,
// and not a chain of contexts, so that a lease that was released is no longer kept or looked at: lock coupling, where
// each lock is taken under the one before, costs the same in every step (TestLockCouplingIsLinear,
// TestAHeldLeasePinsNoOther). A line never changes once it is in a context.
//
//	ctx ──Acquire a──► lease A; A.Context() ──Acquire b──► lease B; B.Context()
//	line: none                    line: A                           line: A, B
type line struct {
	// leases are in the order in which they were taken, the innermost last.
	leases []*Lease
	// base has the values of what the innermost was acquired with, less the lines of the core.
	base context.Context
	// ctx is what Lease.Context returned, if that is what carries the line: an acquire with just this context builds on
	// base, and not on it.
	ctx context.Context
}

// lineOf returns the line of ctx, or nil.
func lineOf(ctx context.Context) *line {
	l, _ := ctx.Value(lineKey{}).(*line)
	return l
}

// newLine returns the line of an acquire with ctx: those of its leases that have not been released. The copy is made at
// the acquire, so that a lease which is released later is looked at no more by those that follow.
func newLine(ctx context.Context) line {
	l := line{base: ctx}
	outer := lineOf(ctx)
	if outer == nil {
		return l
	}
	if outer.ctx == ctx {
		l.base = outer.base // straight from Lease.Context: the chain does not grow with each lock that is handed over
	}
	for _, lease := range outer.leases {
		if !lease.left.Load() && !released(lease.overOrCause()) {
			l.leases = append(l.leases, lease)
		}
	}
	return l
}

// released reports whether why is the end of a lease that was given back. A lost one stays in its line, so that the
// work under it hears of the loss; a driver's ErrNotHeld may stand in the chain of a loss, too.
func released(why error) bool { return errors.Is(why, ErrNotHeld) && !errors.Is(why, ErrLost) }

// with returns the line of the work under more leases. It copies: two branches of work under one lease must not write
// into one array.
func (l *line) with(leases ...*Lease) line {
	all := make([]*Lease, 0, len(l.leases)+len(leases))
	return line{leases: append(append(all, l.leases...), leases...), base: l.base}
}

// within returns ctx with the line.
func (l *line) within(ctx context.Context) context.Context {
	return context.WithValue(ctx, lineKey{}, l)
}

// under returns the context of the work under lease, which was taken along the line: with the values of the acquire's
// context, and without its end. Ending it is the caller's matter.
func (l *line) under(lease *Lease) (context.Context, context.CancelCauseFunc) {
	inner := new(line)
	*inner = l.with(lease)
	ctx, cancel := context.WithCancelCause(inner.within(context.WithoutCancel(l.base)))
	inner.ctx = ctx
	return ctx, cancel
}

// under looks at the leases under which a request is made before it goes out. It returns another lease of a hold that
// there is already, if the options allow that; an error if the request must fail; and neither to go on. Leases of other
// clients do not count: they may be of another service, and only their own client knows their names.
//
// It fails where waiting could never end: for a name that a lease of this very line keeps
// (TestWaitingForOneselfIsADeadlock), or against Options.Order. It puts the live holds into r.Under, the innermost
// first, for drivers that find longer cycles.
func (c *Client) under(l *line, name string, r *backend.Request, o *acquireOptions) (*Lease, error) {
	var same *Lease
	var held []string
	for i := len(l.leases) - 1; i >= 0; i-- {
		lease := l.leases[i]
		if lease.of.client != c {
			continue
		}
		err := lease.Err()
		if released(err) { // since the line was made
			continue
		}
		switch {
		case lease.of.grant.Name != r.Name:
			if err == nil {
				held = append(held, lease.Name())
			}
		case same == nil:
			same = lease
		}
		if err == nil && len(r.Under) < backend.MaxUnder {
			r.Under = append(r.Under, lease.of.grant.RequestID)
		}
	}
	switch {
	case same != nil && o.reentrant:
		return c.reenter(*l, same, r)
	case same != nil && r.Wait && same.Err() == nil && excludesItself(same.of.grant.Kind, r.Kind):
		return nil, deadlockWith(same)
	}
	// The order matters to those who wait: an attempt that is refused keeps nobody waiting.
	if c.set.Order != nil && r.Wait {
		for _, other := range held {
			if c.set.Order(other, name) >= 0 {
				edge := backend.DeadlockEdge{Owner: c.set.Owner, Holds: other, Wants: name}
				return nil, &DeadlockError{Order: true, Cycle: []backend.DeadlockEdge{edge}}
			}
		}
	}
	return nil, nil
}

// excludesItself reports whether a second request of a line would wait for what the line has. Shared beside shared does
// not, and permits may be free for both.
func excludesItself(held, wanted backend.Kind) bool {
	return held != backend.KindPermits && wanted != backend.KindPermits &&
		(held == backend.KindExclusive || wanted == backend.KindExclusive)
}

// deadlockWith is the error of waiting for what the waiter's own lease keeps: a cycle of one.
func deadlockWith(l *Lease) error {
	return &DeadlockError{Cycle: []backend.DeadlockEdge{{Owner: l.Owner(), Holds: l.Name(), Wants: l.Name()}}}
}

// reenter returns one more lease of the hold that l is of. The hold stays as it was granted, so a request for more than
// it is fails: a shared hold cannot become exclusive, since two readers who wanted that would wait for each other, and
// permits are taken in their number. An exclusive hold serves a shared request.
//
//	held        asked for            answer
//	exclusive   exclusive, shared    a lease of the hold
//	shared      shared               a lease of the hold
//	shared      exclusive            ErrDeadlock
//	permits     the same permits     a lease of the hold, and no permits more
//	permits     anything else        ErrLimitMismatch
//	any other   permits              ErrLimitMismatch
func (c *Client) reenter(taken line, l *Lease, r *backend.Request) (*Lease, error) {
	h := l.of
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := l.overOrCause(); err != nil {
		return nil, err
	}
	switch kind := h.grant.Kind; {
	case kind == backend.KindShared && r.Kind == backend.KindExclusive:
		return nil, fmt.Errorf("a shared hold cannot be taken again exclusively: %w", deadlockWith(l))
	case (kind == backend.KindPermits || r.Kind == backend.KindPermits) && h.fits(r) != nil:
		return nil, ErrLimitMismatch
	}
	inner := &Lease{of: h, line: taken}
	h.leases = append(h.leases, inner)
	return inner, nil
}
