package fencelock

// Several names, all or none. The driver is asked first (atOnce); one that cannot take this set in one step answers
// ErrUnsupported and has done nothing, and the core then takes the names one after the other in one order for all
// clients (oneByOne). That keeps the first names closed while it waits for the last one. To try all and back off,
// keeping nothing, would be kinder to others; but under contention nobody would ever get a large set (see
// docs/decisions, several-names-in-order).
//
// Callers of AcquireAll never deadlock among themselves, because their order is the same. Beside calls that nest single
// acquires in another order they can: Options.Order catches those.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// Leases are what AcquireAll returns: one for each name, in the order of the names. Each is a lease of its own, renewed
// and lost by itself; the methods here are for those who need all of them or none.
type Leases []*Lease

// Context returns a context that ends when the first of the leases does, with its cause: a *LostError if it was lost,
// context.Canceled if it was released. The same leases have one context, however often it is asked for. Of no leases it
// is a context that has ended.
func (ls Leases) Context() context.Context {
	switch len(ls) {
	case 0:
		return (*Lease)(nil).Context()
	case 1:
		return ls[0].Context()
	}
	last := ls[len(ls)-1]
	if last.zero() {
		return last.Context()
	}
	each := make([]context.Context, len(ls))
	for i, l := range ls {
		each[i] = l.Context()
	}
	last.of.mu.Lock()
	defer last.of.mu.Unlock()
	if j := last.joint; j != nil && slices.Equal(j.of, ls) {
		return j.ctx
	}
	// The line of the last one has those before it: see Client.AcquireAll.
	first, cancel := context.WithCancelCause(each[len(ls)-1])
	end := func(with context.Context) { context.AfterFunc(with, func() { cancel(context.Cause(with)) }) }
	end(each[0])
	for _, ctx := range each[1:] {
		end(ctx)
	}
	last.joint = &joint{of: slices.Clone(ls), ctx: first}
	return first
}

// joint is the context of several leases, kept at the last of them under its hold's mutex, so that asking again makes
// nothing (TestTheContextOfLeasesIsMadeOnce).
type joint struct {
	// of are the leases that the context is about, since another slice may end with the same lease.
	of  Leases
	ctx context.Context
}

// Claims returns what a guard checks before a write to the resources that the locks are named after, in the order of
// the leases; guards sort them. Where a resource has another name than its lock, make a fencing.Set of Lease.Claim:
//
//	fencing.Set{leases[0].Claim("accounts/1"), leases[1].Claim("ledger")}
func (ls Leases) Claims() fencing.Set {
	claims := make(fencing.Set, len(ls))
	for i, l := range ls {
		claims[i] = l.Claim(l.Name())
	}
	return claims
}

// names lists them, for an error.
func (ls Leases) names() string {
	names := make([]string, len(ls))
	for i, l := range ls {
		names[i] = l.Name()
	}
	return listed(names)
}

// Err returns nil while all leases are held, else the error of the first that is not. It reads the clock for each, as
// Lease.Err does.
//
// Of no leases it is nil; AcquireAll never returns none without an error.
func (ls Leases) Err() error {
	for _, l := range ls {
		if err := l.Err(); err != nil {
			return err
		}
	}
	return nil
}

// Release gives all of them back, side by side, and joins what Lease.Release answers. It returns as Lease.Release does:
// at most a second after the end of ctx, whatever their number.
func (ls Leases) Release(ctx context.Context) error {
	if len(ls) == 1 {
		return ls[0].Release(ctx)
	}
	errs := make([]error, len(ls))
	var all sync.WaitGroup
	for i, l := range ls {
		all.Go(func() { errs[i] = l.Release(ctx) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// AcquireAll waits until it holds all names, or holds none: with an error nothing is kept. Callers of AcquireAll never
// deadlock among themselves, whatever the order of their names. The context and the options are those of Acquire, for
// each of the names; RequestID and Reentrant are not for several. Names are distinct; there is at least one.
//
// A driver with CapMultiAcquire takes them in one step where it can. Otherwise they are taken one after the other in
// the order of Options.Order, or else of their bytes, and given back when one cannot be had: those that come first are
// then held while it waits for the rest. If one of them is lost meanwhile, it begins again.
//
//	leases, err := locks.AcquireAll(ctx, []string{"accounts/1", "accounts/2"})
//	if err != nil {
//		return err
//	}
//	defer leases.Release(ctx)
//	return transfer(leases.Context(), leases.Claims())
//
// Errors are those of Acquire, with the names in a CallError; ErrInvalidOption for a name that is there twice.
func (c *Client) AcquireAll(ctx context.Context, names []string, opts ...AcquireOption) (Leases, error) {
	return c.acquireAll(ctx, names, true, opts)
}

// TryAcquireAll is AcquireAll without a wait: if one of the names is held by somebody else, the error is ErrHeld, and
// none is kept.
//
//	leases, err := locks.TryAcquireAll(ctx, []string{"disk/1", "disk/2"})
//	if errors.Is(err, fencelock.ErrHeld) {
//		return nil // somebody works on one of them
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

// takeAll does for several names what acquire does for one, in the same order.
func (c *Client) takeAll(ctx context.Context, names []string, wait bool, opts []AcquireOption) (Leases, error) {
	rs, o, err := c.requests(names, wait, opts)
	if err != nil {
		return nil, err
	}
	if err := endOf(ctx); err != nil {
		return nil, err
	}
	line := newLine(ctx)
	for i := range rs {
		if _, err := c.under(&line, names[i], &rs[i], &o); err != nil {
			return nil, err
		}
	}
	flight := &flight{kind: acquiring}
	bounded, err := c.begin(ctx, flight, o.waitAtMost)
	if err != nil {
		return nil, err
	}
	defer c.done(flight)

	all := &several{c: c, line: line, names: names, rs: rs, o: &o, began: c.observedNow()}
	all.over = c.tellOfWait(ctx, bounded, names, rs)
	leases, err := all.atOnce(bounded)
	if errors.Is(err, ErrUnsupported) { // and so has done nothing
		leases, err = all.oneByOne(bounded)
	}
	all.over()
	if err != nil {
		err = c.explain(bounded, listed(names), rs, &o, err)
		c.tellOfFailure(ctx, listed(names), &rs[0], all.began, err)
		return nil, err
	}
	// sealed gives back the lease that it could not seal; the others are given back here.
	for i, l := range leases {
		if err := c.sealed(bounded, l, &o); err != nil {
			_ = slices.Delete(slices.Clone(leases), i, i+1).Release(ctx)
			return nil, err
		}
	}
	return leases, nil
}

// several is one AcquireAll: what its two ways have in common.
type several struct {
	// c, line, names, rs and o are what the call was asked for. rs are requests as they were before bind.
	c     *Client
	line  line
	names []string
	rs    []backend.Request
	o     *acquireOptions
	began instant
	// over ends the telling of the wait; nil until takeAll has set it.
	over func()
}

// requests resolves names and options into what the driver gets, one request for each name, each with a key of its own.
func (c *Client) requests(names []string, wait bool, opts []AcquireOption) ([]backend.Request, acquireOptions, error) {
	var o acquireOptions
	if len(names) == 0 {
		return nil, o, invalidOption("names", "[]", "there is none")
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
			return nil, o, invalidOption("names", strconv.Quote(name), "it is there twice")
		}
		seen[name] = true
		rs[i], o = r, each
	}
	return rs, o, nil
}

// newLeases makes leases of which each has those before it in its line: the set is one line of work, and the context of
// the last lease stands for all.
func (a *several) newLeases() Leases {
	leases := make(Leases, len(a.names))
	for i, name := range a.names {
		leases[i] = a.c.newLease(a.line.with(leases[:i]...), name, !a.o.noRenew)
	}
	return leases
}

// atOnce leaves it to the driver. ErrUnsupported: it does not do that, or not for this set. Grants that are of no use
// are given back and asked for again as in obtain, all of them together.
//
//	the driver has no such step             ErrUnsupported
//	one name only                           ErrUnsupported: a plain acquire does
//	it cannot take this set in one step     ErrUnsupported
//	it waited, or it could be had at once   leases
//	any other error                         that error; what it may have left is cleaned up, name by name
func (a *several) atOnce(bounded context.Context) (Leases, error) {
	c := a.c
	multi, ok := backend.As[backend.MultiAcquirer](c.driver)
	if !ok || len(a.rs) == 1 || !c.driver.Describe().Capabilities.Has(backend.CapMultiAcquire) {
		return nil, ErrUnsupported
	}
	for tries := 1; ; tries++ {
		seen, err := c.history.Now()
		if err != nil {
			return nil, err
		}
		// New leases and requests for each round, so that a loss of an earlier one that is told late means nothing.
		leases := a.newLeases()
		sent := slices.Clone(a.rs)
		for i, l := range leases {
			c.bind(l.of, &sent[i], tries)
		}
		grants, err := multi.AcquireAll(bounded, sent)
		if err == nil && len(grants) != len(sent) {
			err = fmt.Errorf("%w: driver %s granted %d of %d names",
				ErrUnknown, c.driver.Describe().Name, len(grants), len(sent))
		}
		if err != nil {
			for i := range sent {
				c.failed(a.line.base, err, sent[i].Grant())
			}
			return nil, err
		}
		if err = a.start(leases, sent, grants, seen); err == nil {
			return leases, nil
		}
		// The process was paused for so long that the grants have ended, or the client was closed meanwhile.
		c.remember(err)
		for i := range sent {
			grants[i] = sent[i].Grant() // by request: a grant that was refused may lack its mark
		}
		c.undo(bounded, a.line.base, grants...)
		if err = c.again(bounded, &sent[0], err, tries); err != nil {
			return nil, err
		}
	}
}

// start puts all holds under watch, or none. Every grant is looked at before the first hold begins, so that the client
// remembers the tokens of all.
//
// If one of them fails, those that began are forgotten, and the caller gives all grants back by their requests.
func (a *several) start(leases Leases, sent []backend.Request, grants []backend.Grant, seen uint64) error {
	var err error
	for i := range grants {
		if e := a.c.accept(&sent[i], &grants[i], seen); e != nil && err == nil {
			err = e
		}
	}
	for i := 0; i < len(leases) && err == nil; i++ {
		if err = leases[i].of.start(&grants[i], nil); err != nil {
			leases[:i].forget()
		}
	}
	if err == nil {
		a.granted(leases)
	}
	return err
}

// granted tells the observer that the leases begin, when all of them have: for a set that is rolled back it hears of no
// lease.
func (a *several) granted(leases Leases) {
	a.over()
	for _, l := range leases {
		l.of.mu.Lock()
		l.of.tellOfGrant(a.began)
		l.of.mu.Unlock()
	}
}

// forget ends leases that nobody has seen, without an event, and gives nothing back. Those that are lost already stay
// so.
//
// It is for a set that was taken in part: to the caller no lease has existed, so there is neither a loss to tell nor a
// release.
func (ls Leases) forget() {
	for _, l := range ls {
		l.left.Store(true)
		l.of.mu.Lock()
		var tell ending
		if l.of.cause.Load() == nil {
			tell = l.of.end(ErrNotHeld)
		}
		l.of.mu.Unlock()
		tell.cancel()
	}
}

// oneByOne acquires one name after the other, in an order that is the same for all, and rolls back if one cannot be
// had. If one is lost while it waits for the others, it begins again with new keys, for as long as it may wait: the
// caller asked to wait, and the loss is not the answer to that (TestAcquireAllNoticesALossWhileItWaits).
//
//	Ann wants b, a     takes a, then b
//	Bob wants a, b     waits for a, and holds nothing that Ann waits for
func (a *several) oneByOne(bounded context.Context) (Leases, error) {
	c := a.c
	order := c.set.Order
	if order == nil {
		order = cmp.Compare[string] // any order will do that all clients have
	}
	sorted := make([]int, len(a.names))
	for i := range sorted {
		sorted[i] = i
	}
	slices.SortStableFunc(sorted, func(i, j int) int { return order(a.names[i], a.names[j]) })
	for tries := 1; ; tries++ {
		leases := a.newLeases()
		taken, err := a.each(bounded, leases, sorted, tries)
		if err == nil {
			a.granted(leases)
			return leases, nil
		}
		lost := taken.Err()
		taken.forget()
		grants := make([]backend.Grant, len(taken))
		for i, l := range taken {
			grants[i] = l.of.grant
		}
		c.undo(bounded, a.line.base, grants...) // the lost ones too
		if lost == nil || !a.rs[0].Wait || bounded.Err() != nil {
			return nil, err
		}
	}
}

// each makes one round of oneByOne, and returns what it took. It ends early if one of those is lost, by ending the
// context of the wait for the next.
func (a *several) each(bounded context.Context, leases Leases, sorted []int, round int) (taken Leases, err error) {
	bounded, cancel := context.WithCancelCause(bounded)
	defer cancel(nil)
	for _, i := range sorted {
		r := a.rs[i]
		if round > 1 {
			r.RequestID = backend.NewRequestID()
		}
		plain := acquireOptions{noRenew: a.o.noRenew}
		if _, err = a.c.obtain(bounded, leases[i], &r, &plain, nil); err != nil {
			break
		}
		taken = append(taken, leases[i])
		ctx := leases[i].Context()
		defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
	}
	if lost := taken.Err(); err == nil && lost != nil {
		err = lost
	}
	return taken, err
}
