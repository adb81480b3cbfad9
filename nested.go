package fencelock

// Acquires under other leases. A context identifies a line of work: the context that Do passes, or Lease.Context,
// carries the leases under which the work happens. Three features depend on that alone: Reentrant, Options.Order, and
// the holds that a request is made under, by which a service with CapDeadlock finds cycles.
//
// Work that does not pass its context on gets no reentrancy and no warning. See docs/decisions,
// a-line-of-work-is-its-context, for the alternatives: goroutine ids, and the client as the holder.

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// lineKey is the key under which a context carries its line.
type lineKey struct{}

// line is one line of work: the leases under which a context's work happens, of any client. It is a separate value,
// and not a chain of contexts, so that a released lease is no longer referenced or checked: lock coupling, where each
// lock is taken under the one before, costs the same in every step (TestLockCouplingIsLinear,
// TestAHeldLeasePinsNoOther). A line never changes once it is in a context.
//
//	ctx ──Acquire a──► lease A; A.Context() ──Acquire b──► lease B; B.Context()
//	line: empty line: A line: A, B
type line struct {
	// leases are in the order in which they were acquired, the innermost last. The leases of one AcquireAll share one
	// slice: the set is one line of work.
	leases []*Lease
	// base has the values of the context that the innermost was acquired with, without the lines of the core.
	base context.Context
	// ctx is the context that Lease.Context returned, if it carries the line: an acquire with this context, or with a
	// context that only adds an end to it, builds on base, and not on ctx.
	ctx context.Context
}

// lineOf returns the line of ctx, or nil.
func lineOf(ctx context.Context) *line {
	l, _ := ctx.Value(lineKey{}).(*line)
	return l
}

// newLine returns the line of an acquire with ctx: its leases that have not been released. The copy is made at the
// acquire, so that later acquires no longer check a released lease.
func newLine(ctx context.Context) line {
	l := line{base: ctx}
	outer := lineOf(ctx)
	if outer == nil {
		return l
	}
	if outer.ctx != nil && sameValues(ctx, outer.ctx) {
		l.base = outer.base // from Lease.Context: the chain does not grow with each lock that is handed over
	}
	for _, lease := range outer.leases {
		if !lease.left.Load() && !released(lease.overOrCause()) {
			l.leases = append(l.leases, lease)
		}
	}
	return l
}

// ends are the types of contexts that add an end to their parent but no values, with the parent in their field
// Context: of WithCancel, WithTimeout and WithoutCancel.
var ends = func() (types []reflect.Type) {
	cancelled, cancel := context.WithCancel(context.Background())
	defer cancel()
	timed, stop := context.WithTimeout(context.Background(), time.Hour)
	defer stop()
	for _, ctx := range []context.Context{cancelled, timed} {
		t := reflect.TypeOf(ctx)
		if t.Kind() != reflect.Pointer || t.Elem().Kind() != reflect.Struct {
			continue
		}
		if f, ok := t.Elem().FieldByName("Context"); ok && f.Type == reflect.TypeFor[context.Context]() {
			types = append(types, t)
		}
	}
	return types
}()

// sameValues reports whether ctx is made of from by ends alone, so that both have the same values. False if that cannot
// be known: then the chain of contexts grows by the contexts between.
func sameValues(ctx, from context.Context) bool {
	for ctx != from {
		if !slices.Contains(ends, reflect.TypeOf(ctx)) {
			return false
		}
		ctx, _ = reflect.ValueOf(ctx).Elem().FieldByName("Context").Interface().(context.Context)
	}
	return true
}

// released reports whether why is the end of a released lease. A lost lease stays in its line, so that the work under
// it is notified of the loss; a driver's ErrNotHeld may be in the chain of a loss, too.
func released(why error) bool { return errors.Is(why, ErrNotHeld) && !errors.Is(why, ErrLost) }

// work returns the line of the work under the lease.
func (l *Lease) work() *line {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	return l.line.with(l)
}

// with returns the line of the work under one more lease. It copies, unless the lease is in the line already: two
// branches of work under one lease must not write into one slice.
func (l *line) with(lease *Lease) *line {
	if lease.inSet {
		return &line{leases: l.leases, base: l.base}
	}
	all := make([]*Lease, 0, len(l.leases)+1)
	return &line{leases: append(append(all, l.leases...), lease), base: l.base}
}

// within returns ctx with the line.
func (l *line) within(ctx context.Context) context.Context {
	return context.WithValue(ctx, lineKey{}, l)
}

// open returns the context of the line: with the values of the acquire's context, and without its end. Ending it is the
// caller's matter. The line is in no context yet.
func (l *line) open() (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(l.within(context.WithoutCancel(l.base)))
	l.ctx = ctx
	return ctx, cancel
}

// holdsOf reports whether the line has a live hold of c.
func (l *line) holdsOf(c *Client) bool {
	return slices.ContainsFunc(l.leases, func(lease *Lease) bool { return lease.of.client == c && lease.Err() == nil })
}

// under looks at the leases under which a request is made before it goes out. Only leases of the same driver count: the
// names of others may be of another service.
//
// It fails where waiting could never end: for a name that a lease of this very line keeps
// (TestWaitingForOneselfIsADeadlock), or against Options.Order. It sets outer if one of these leases, the innermost,
// serves the request too. It puts the live holds into Request.Under, the innermost first, for drivers that find longer
// cycles.
func (a *acquisition) under() error {
	c := a.client
	var ids []string
	var unordered error
	for i := len(a.line.leases) - 1; i >= 0; i-- {
		lease := a.line.leases[i]
		h := lease.of
		if h.client != c && !sameDriver(h.client.driver, c.driver) {
			continue
		}
		err := lease.Err()
		if released(err) { // since the line was made
			continue
		}
		if err == nil && len(ids) < backend.MaxUnder {
			ids = append(ids, h.grant.RequestID)
		}
		for j := range a.rs {
			r := &a.rs[j]
			switch {
			case c == h.client && h.grant.Name == r.Name && a.again(h, err):
				a.outer = lease
				return nil
			case err != nil:
			case overlap(&h.grant, r):
				if err := a.inside(h, j); err != nil {
					return err
				}
			// Attempts do not wait, so they may go against the order.
			case c.set.Order != nil && r.Wait && c == h.client && c.set.Order(h.name, a.names[j]) >= 0:
				late := deadlock(c.set.Owner, h.name, a.names[j])
				late.Order, unordered = true, late
			}
		}
	}
	for j := range a.rs {
		a.rs[j].Under = ids
	}
	return unordered
}

// inside is for the j-th request under a live hold that overlaps with it: an error if it would wait for that hold.
//
//	held        asked for   answer
//	exclusive   any         ErrDeadlock
//	shared      exclusive   ErrDeadlock
//	shared      shared      one attempt: it would wait for a writer between the two only, which is ErrDeadlock
//	permits     permits     ErrDeadlock, if the line holds so many that there are never enough left
//
// An attempt without a wait goes on to the service, as does a request that the service refuses with ErrLimitMismatch.
func (a *acquisition) inside(h *hold, j int) error {
	r, g := &a.rs[j], &h.grant
	switch {
	case !r.Wait:
		return nil
	case g.Kind == backend.KindPermits && r.Kind == backend.KindPermits:
		if g.Limit != r.Limit || a.line.permits(r.Name)+r.Permits <= r.Limit {
			return nil
		}
	case g.Kind == backend.KindPermits || r.Kind == backend.KindPermits:
		return nil
	case g.Kind == backend.KindShared && r.Kind == backend.KindShared:
		r.Wait, a.readsAgain = false, true
		return nil
	}
	return deadlock(a.client.set.Owner, h.name, a.names[j])
}

// permits counts the permits of a name that the line holds.
func (l *line) permits(name string) (n int) {
	counted := map[*hold]bool{}
	for _, lease := range l.leases {
		if h := lease.of; h.grant.Name == name && !counted[h] && lease.Err() == nil {
			counted[h] = true
			n += h.grant.Permits
		}
	}
	return n
}

// again reports whether the options ask for one more lease of h, under a lease of it; err is that lease's.
func (a *acquisition) again(h *hold, err error) bool {
	return a.opts.reentrant || err == nil && h.repeat != nil && h.repeat.key.requestID == a.opts.requestID
}

// overlap reports whether a hold may block a request: the same name, or a path above or below.
func overlap(g *backend.Grant, r *backend.Request) bool {
	return g.Name == r.Name || g.Hierarchical && r.Hierarchical && (below(g.Name, r.Name) || below(r.Name, g.Name))
}

// below reports whether path lies below root.
func below(root, path string) bool {
	return len(path) > len(root) && path[len(root)] == '/' && path[:len(root)] == root
}

// deadlock is the error of a waiter that waits for its own hold: a cycle of one.
func deadlock(owner, holds, wants string) *DeadlockError {
	return &DeadlockError{Cycle: []backend.DeadlockEdge{{Owner: owner, Holds: holds, Wants: wants}}}
}
