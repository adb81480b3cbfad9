package fencelock

// Several names, all or nothing. The core asks the driver first (atOnce); a driver that cannot acquire the set in one
// step returns ErrUnsupported without side effects, and the core then acquires the names one after the other in one
// order for all clients (oneByOne). That keeps the first names closed while it waits for the last one. See
// docs/decisions, several-names-in-order, for the alternatives.
//
// Calls of AcquireAll never deadlock with each other, because their order is the same. They can deadlock with nested
// single acquires in another order: Options.Order refuses those.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock/backend"
)

// AcquireAll waits until it holds all names; after an error it holds no name. Calls of AcquireAll never deadlock
// with each other, whatever the order of their names. The context and the options are as for Acquire, and apply to
// each of the names; RequestID and Reentrant are ErrInvalidOption. names must be distinct and not empty.
//
// A driver with CapMultiAcquire acquires them in one step where it can. Otherwise they are acquired one after the
// other in the order of Options.Order, or else of their bytes, and released if one of them fails: the first names are
// held while AcquireAll waits for the rest. If a lease is lost meanwhile, AcquireAll starts over.
//
//	leases, err := locks.AcquireAll(ctx, []string{"accounts/1", "accounts/2"})
//	if err != nil {
//		return err
//	}
//	defer leases.Release(ctx)
//	return transfer(leases.Context(), leases.Claims())
//
// Errors are as for Acquire, with the names in a CallError, and ErrInvalidOption for a duplicate name.
func (c *Client) AcquireAll(ctx context.Context, names []string, opts ...AcquireOption) (Leases, error) {
	return c.acquireAll(ctx, names, true, opts)
}

// TryAcquireAll is AcquireAll without a wait: if another caller holds one of the names, the error is ErrHeld, and no
// name is held.
//
//	leases, err := locks.TryAcquireAll(ctx, []string{"disk/1", "disk/2"})
//	if errors.Is(err, fencelock.ErrHeld) {
//		return nil // another client is working on one of them
//	}
func (c *Client) TryAcquireAll(ctx context.Context, names []string, opts ...AcquireOption) (Leases, error) {
	return c.acquireAll(ctx, names, false, opts)
}

// DoAll is Do with several names: it acquires all of them, runs fn and releases them. The context that fn gets ends
// when ctx does, or when the first of the leases is lost.
//
//	err := locks.DoAll(ctx, []string{"accounts/1", "accounts/2"},
//		func(ctx context.Context, leases fencelock.Leases) error {
//			return guard.Tx(ctx, leases.Claims(), transfer)
//		})
func (c *Client) DoAll(
	ctx context.Context, names []string, fn func(ctx context.Context, leases Leases) error, opts ...AcquireOption,
) error {
	if fn == nil {
		return callError("do", listed(names), invalidOption("function", "nil", "it is nil"))
	}
	leases, err := c.AcquireAll(ctx, names, opts...)
	if err != nil {
		return err
	}
	return c.run(ctx, leases, func(ctx context.Context) error { return fn(ctx, leases) })
}

// acquireAll is takeAll with the names in the error.
func (c *Client) acquireAll(ctx context.Context, names []string, wait bool, opts []AcquireOption) (Leases, error) {
	leases, err := c.takeAll(ctx, names, wait, opts)
	if err != nil {
		return nil, callError("acquire-all", listed(names), err)
	}
	return leases, nil
}

// listed names several names in an error: all of three, and two of more.
//
//	a
//	a, b, c
//	a, b and 2 more
func listed(names []string) string {
	if len(names) > 3 {
		return names[0] + ", " + names[1] + " and " + strconv.Itoa(len(names)-2) + " more"
	}
	s := ""
	for i, name := range names {
		if i > 0 {
			s += ", "
		}
		s += name
	}
	return s
}

// takeAll does the steps of acquire for several names, in the same order.
func (c *Client) takeAll(ctx context.Context, names []string, wait bool, opts []AcquireOption) (Leases, error) {
	rs, o, err := c.requests(names, wait, opts)
	if err != nil {
		return nil, err
	}
	if err := endOf(ctx); err != nil {
		return nil, err
	}
	a := &acquisition{client: c, ctx: ctx, line: newLine(ctx), names: names, rs: rs, opts: o, flight: new(flight)}
	bounded, err := a.begin()
	if err != nil {
		return nil, err
	}
	defer a.end()
	if err = a.atOnce(bounded); errors.Is(err, ErrUnsupported) { // without side effects
		err = a.oneByOne(bounded)
	}
	if err == nil {
		err = a.seal(bounded)
	}
	if err != nil {
		return nil, a.fail(bounded, err)
	}
	a.handOver()
	return a.leases, nil
}

// requests resolves names and options into one request for each name, each with its own key.
func (c *Client) requests(names []string, wait bool, opts []AcquireOption) ([]backend.Request, acquireOptions, error) {
	var o acquireOptions
	if len(names) == 0 {
		return nil, o, invalidOption("names", "[]", "at least one is required")
	}
	rs := make([]backend.Request, len(names))
	seen := make(map[string]bool, len(names))
	for i, name := range names {
		r, each, err := c.request(name, wait, opts)
		switch {
		case err != nil:
			return nil, o, err
		case each.requestID != "":
			return nil, o, invalidOption("RequestID", each.requestID, "it identifies one acquire, not several")
		case each.reentrant:
			return nil, o, invalidOption("Reentrant", fmt.Sprintf("with %d names", len(names)), "it is for one name")
		case seen[name]:
			return nil, o, invalidOption("names", strconv.Quote(name), "it is listed twice")
		}
		seen[name] = true
		rs[i], o = r, each
	}
	if o.hierarchical && o.kind == backend.KindExclusive {
		return rs, o, c.overlapping(names, seen)
	}
	return rs, o, nil
}

// overlapping is an error if one of the paths lies below another, which would wait for it.
func (c *Client) overlapping(names []string, all map[string]bool) error {
	for _, name := range names {
		for at := strings.LastIndexByte(name, '/'); at > 0; at = strings.LastIndexByte(name[:at], '/') {
			if all[name[:at]] {
				return deadlock(c.set.Owner, name[:at], name)
			}
		}
	}
	return nil
}

// renew makes the leases anew, all of which have the whole set in their line.
func (a *acquisition) newLeases() {
	set := make([]*Lease, len(a.line.leases)+len(a.names))
	copy(set, a.line.leases)
	a.leases = set[len(a.line.leases):]
	for i, name := range a.names {
		a.leases[i] = a.client.newLease(line{leases: set, base: a.line.base}, name, &a.opts)
		a.leases[i].inSet = true
	}
}

// atOnce acquires the set in one step of the driver. ErrUnsupported: the driver cannot, or not for this set. Invalid
// grants are rolled back and requested again as in obtain, all of them together.
//
//	the driver has no such step             ErrUnsupported
//	one name only                           ErrUnsupported: a plain acquire does
//	it cannot take this set in one step     ErrUnsupported
//	it waited, or it could be had           leases
//	any other error that error; possible leftovers are cleaned up, name by name
func (a *acquisition) atOnce(bounded context.Context) error {
	c := a.client
	multi, ok := backend.As[backend.MultiAcquirer](c.driver)
	if !ok || len(a.rs) == 1 || a.readsAgain || !c.driver.Describe().Capabilities.Has(backend.CapMultiAcquire) {
		return ErrUnsupported
	}
	for tries := 1; ; tries++ {
		seen, err := c.history.Now()
		if err != nil {
			return err
		}
		a.newLeases()
		for i, l := range a.leases {
			c.bind(l.of, &a.rs[i], tries > 1)
		}
		grants, err := multi.AcquireAll(bounded, slices.Clone(a.rs))
		if err == nil && len(grants) != len(a.rs) {
			err = fmt.Errorf("%w: %w", ErrUnknown, c.broken("it granted %d of %d names", len(grants), len(a.rs)))
		}
		if err != nil {
			for _, l := range a.leases {
				c.refused(l.of, err)
			}
			return err
		}
		if err = a.admitAll(grants, seen); err == nil {
			return nil
		}
		if err = a.useless(bounded, a.leases, err, tries); err != nil {
			return err
		}
	}
}

// admitAll is admit for a set. Every grant is looked at, so that the client remembers the tokens of all.
func (a *acquisition) admitAll(grants []backend.Grant, seen uint64) (first error) {
	for i := range grants {
		if err := a.client.admit(a.leases[i].of, &a.rs[i], &grants[i], seen); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// oneByOne acquires one name after the other, in an order that is the same for all clients. If a lease is lost while
// it waits for the others, it starts over with new keys, after a pause, until bounded ends
// (TestAcquireAllNoticesALossWhileItWaits).
//
//	Ann wants b, a     takes a, then b
//	Bob wants a, b     waits for a, and holds no name that Ann waits for
func (a *acquisition) oneByOne(bounded context.Context) error {
	order := a.client.set.Order
	if order == nil {
		order = cmp.Compare[string] // any order will do that all clients have
	}
	sorted := make([]int, len(a.names))
	for i := range sorted {
		sorted[i] = i
	}
	slices.SortStableFunc(sorted, func(i, j int) int { return order(a.names[i], a.names[j]) })
	for round := 1; ; round++ {
		a.newLeases()
		lost, err := a.each(bounded, sorted, round > 1)
		if lost == nil || !a.rs[0].Wait || bounded.Err() != nil {
			return err
		}
		a.rollBack(bounded, a.leases) // the lost ones too
		if sleep(bounded, a.client.electionPause(round)) != nil {
			return fmt.Errorf("%w: %w", endOf(bounded), err)
		}
	}
}

// each makes one round of oneByOne. It ends early if one of the leases is lost, by ending the context of the wait for
// the next; lost is that loss, and err is not nil then.
func (a *acquisition) each(bounded context.Context, sorted []int, again bool) (lost, err error) {
	bounded, cancel := context.WithCancelCause(bounded)
	defer cancel(nil)
	for n, i := range sorted {
		if err = a.obtain(bounded, i, again); err != nil {
			break
		}
		if n < len(sorted)-1 {
			a.leases[i].endsWith(cancel)
		}
	}
	for _, l := range a.leases {
		if lost = l.Err(); lost != nil {
			return lost, cmp.Or(err, lost)
		}
		l.of.mu.Lock()
		l.cancels = nil // only ours: the caller does not have the lease yet
		l.of.mu.Unlock()
	}
	return nil, err
}
