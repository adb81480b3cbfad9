package fencelock

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/fencelock/fencelock/backend"
)

// leaseKey is the key under which a lease's context carries the lease.
type leaseKey struct{}

// leasesOf yields the leases of c under which ctx runs, the innermost first. Those that have ended are among them.
func (c *Client) leasesOf(ctx context.Context) iter.Seq[*Lease] {
	return func(yield func(*Lease) bool) {
		for {
			l, _ := ctx.Value(leaseKey{}).(*Lease)
			if l == nil || l.client == c && !yield(l) {
				return
			}
			ctx = l.values
		}
	}
}

// again is what a lease knows of others of the same hold. Protected by heart.mu.
type again struct {
	of    *Lease   // the first lease of the hold, if that is another one; set at once and never changed
	inner []*Lease // of the first lease: the others that live
	left  bool     // this one was released
}

// leave takes l out of its hold, and reports whether it was the last. The caller holds heart.mu.
func (l *Lease) leave() bool {
	l.again.left = true
	hold := l.hold()
	if i := slices.Index(hold.again.inner, l); i >= 0 {
		hold.again.inner = slices.Delete(hold.again.inner, i, i+1)
	}
	return hold.again.left && len(hold.again.inner) == 0
}

// under looks at the leases under which ctx runs before the request goes out. It returns another lease of a hold that
// there is already, if the options allow that; an error if the request must fail; and neither to go on.
func (c *Client) under(ctx context.Context, name string, r *backend.Request, o *acquireOptions) (*Lease, error) {
	if ctx.Value(leaseKey{}) == nil {
		r.Agent = r.RequestID
		return nil, nil
	}
	var same *Lease
	var held []string
	for l := range c.leasesOf(ctx) {
		err := l.Err()
		r.Agent = l.hold().agent
		switch {
		case errors.Is(err, ErrNotHeld):
		case same == nil && l.hold().grant.Name == r.Name:
			same = l
		case err == nil:
			held = append(held, l.name)
		}
	}
	if r.Agent == "" { // leases of other clients only
		r.Agent = r.RequestID
	}
	switch {
	case same != nil && o.reentrant:
		return c.reenter(ctx, same, name, r)
	case same != nil && r.Wait && same.Err() == nil && excludesItself(same.hold().grant.Kind, r.Kind):
		return nil, deadlockWith(same)
	}
	if c.set.Order != nil && r.Wait {
		for _, other := range held {
			if c.set.Order(other, name) >= 0 {
				return nil, &OrderError{Held: other, Wanted: name}
			}
		}
	}
	return nil, nil
}

func excludesItself(held, wanted backend.Kind) bool {
	return held != backend.KindPermits && wanted != backend.KindPermits &&
		(held == backend.KindExclusive || wanted == backend.KindExclusive)
}

// deadlockWith is the error of waiting for what the waiter's own lease keeps.
func deadlockWith(l *Lease) error {
	return &DeadlockError{Cycle: []backend.DeadlockEdge{{Owner: l.Owner(), Holds: l.name, Wants: l.name}}}
}

// reenter returns one more lease of the hold that l is of.
func (c *Client) reenter(ctx context.Context, l *Lease, name string, r *backend.Request) (*Lease, error) {
	h, hold := &c.heart, l.hold()
	h.mu.Lock()
	defer h.mu.Unlock()
	switch kind := hold.grant.Kind; {
	case hold.endedLocked() != nil:
		return nil, hold.endedLocked()
	case kind == backend.KindShared && r.Kind == backend.KindExclusive:
		return nil, fmt.Errorf("a shared hold cannot be taken again exclusively: %w", deadlockWith(l))
	case (kind == backend.KindPermits || r.Kind == backend.KindPermits) &&
		(kind != r.Kind || hold.grant.Permits != r.Permits || hold.grant.Limit != r.Limit):
		return nil, ErrLimitMismatch
	}
	inner := newLease(ctx, c, name, hold.renew)
	inner.again.of = hold
	hold.again.inner = append(hold.again.inner, inner)
	return inner, nil
}

// OrderError is ErrDeadlock from Options.Order: the wanted name stands before one that the same line of work holds.
type OrderError struct {
	Held, Wanted string
}

func (e *OrderError) Error() string {
	return fmt.Sprintf("%v: %q is wanted while %q is held, against Options.Order", ErrDeadlock, e.Wanted, e.Held)
}

// Is reports true for ErrDeadlock.
func (e *OrderError) Is(target error) bool { return target == ErrDeadlock }
