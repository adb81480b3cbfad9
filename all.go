package fencelock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/fencelock/fencelock/backend"
)

// Leases are what AcquireAll returns: one for each name, in the order of the names. Each is a lease of its own, renewed
// and lost by itself.
type Leases []*Lease

// Context returns a context that ends when the first of the leases does, with its cause. It is made anew by each call.
func (ls Leases) Context() context.Context {
	if len(ls) == 0 {
		ended, cancel := context.WithCancelCause(context.Background())
		cancel(ErrNotHeld)
		return ended
	}
	// The last one carries those before it: see Client.AcquireAll.
	first, cancel := context.WithCancelCause(ls[len(ls)-1].Context())
	end := func(with context.Context) { context.AfterFunc(with, func() { cancel(context.Cause(with)) }) }
	end(ls[0].Context())
	for _, l := range ls[1:] {
		end(l.Context())
	}
	return first
}

// Err returns nil while all leases are held, else the error of the first that is not.
func (ls Leases) Err() error {
	for _, l := range ls {
		if err := l.Err(); err != nil {
			return err
		}
	}
	return nil
}

// Release gives all of them back, side by side, and joins what Lease.Release answers.
func (ls Leases) Release(ctx context.Context) error {
	errs := make([]error, len(ls))
	var all sync.WaitGroup
	for i, l := range ls {
		all.Go(func() { errs[i] = l.Release(ctx) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// AcquireAll waits until it holds all names, or holds none: with an error nothing is kept. Callers of AcquireAll never
// deadlock among themselves, whatever the order of their names. The context and the options are those of Acquire, for each
// of the names; RequestID and Reentrant are not for several. Names are distinct.
//
// A driver with CapMultiAcquire takes them in one step where it can. Otherwise they are taken one after the other in the
// order of Options.Order, or else of their bytes, and given back when one cannot be had: those that come first are then
// held while it waits for the rest.
func (c *Client) AcquireAll(ctx context.Context, names []string, opts ...AcquireOption) (Leases, error) {
	return c.acquireAll(ctx, names, true, opts)
}

// TryAcquireAll is AcquireAll without a wait: if one of the names is held by somebody else, the error is ErrHeld.
func (c *Client) TryAcquireAll(ctx context.Context, names []string, opts ...AcquireOption) (Leases, error) {
	return c.acquireAll(ctx, names, false, opts)
}

// DoAll is Do with several names. The context that fn gets ends when the first of the leases is lost.
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
	return run(ctx, leases, func(ctx context.Context) error { return fn(ctx, leases) })
}

func (c *Client) acquireAll(ctx context.Context, names []string, wait bool, opts []AcquireOption) (Leases, error) {
	leases, err := c.takeAll(ctx, names, wait, opts)
	if err != nil {
		return nil, callError("acquire-all", listed(names), err)
	}
	return leases, nil
}

// listed names several names in an error.
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

func (c *Client) takeAll(ctx context.Context, names []string, wait bool, opts []AcquireOption) (Leases, error) {
	rs, o, err := c.requests(names, wait, opts)
	if err != nil {
		return nil, err
	}
	if err := endOf(ctx); err != nil {
		return nil, err
	}
	agent := rs[0].RequestID
	for i := range rs {
		if _, err := c.under(ctx, names[i], &rs[i], &o); err != nil {
			return nil, err
		}
		if rs[i].Agent == rs[i].RequestID {
			rs[i].Agent = agent // one line of work
		}
	}
	var this call
	bounded, done, err := c.begin(ctx, &this, o.waitAtMost)
	if err != nil {
		return nil, err
	}
	defer done()

	began := c.observedNow()
	leases, err := c.allAtOnce(ctx, bounded, names, rs, !o.noRenew)
	if errors.Is(err, ErrUnsupported) {
		leases, err = c.oneByOne(ctx, bounded, names, rs, !o.noRenew)
	}
	if err != nil {
		err = c.explain(bounded, listed(names), rs[0].Name, o.waitAtMost, err)
		c.observeAcquire(listed(names), began, nil, err)
		return nil, err
	}
	for _, l := range leases {
		c.observeAcquire(l.name, began, l, nil)
	}
	return leases, nil
}

// requests resolves names and options into what the driver gets.
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

// newLeases makes leases of which each carries those before it in its context.
func (c *Client) newLeases(ctx context.Context, names []string, renew bool) Leases {
	leases := make(Leases, len(names))
	for i, name := range names {
		leases[i] = newLease(ctx, c, name, renew)
		ctx = context.WithValue(ctx, leaseKey{}, leases[i])
	}
	return leases
}

// allAtOnce leaves it to the driver. ErrUnsupported: it does not do that, or not for this set.
func (c *Client) allAtOnce(
	ctx, bounded context.Context, names []string, rs []backend.Request, renew bool,
) (Leases, error) {
	multi, ok := backend.As[backend.MultiAcquirer](c.driver)
	if !ok || len(rs) == 1 || !c.driver.Describe().Capabilities.Has(backend.CapMultiAcquire) {
		return nil, ErrUnsupported
	}
	for {
		leases := c.newLeases(ctx, names, renew)
		sent := slices.Clone(rs)
		for i, l := range leases {
			c.bind(l, &sent[i])
		}
		grants, err := multi.AcquireAll(bounded, sent)
		if err == nil && len(grants) != len(sent) {
			err = fmt.Errorf("%w: driver %s granted %d of %d names", ErrUnknown, c.driver.Describe().Name, len(grants), len(sent))
		}
		if err != nil {
			if ambiguous(err) {
				c.abandon(sent, maybeInFlight)
			}
			return nil, err
		}
		for i := range grants {
			if err := c.fenced(&sent[i], &grants[i]); err != nil {
				c.abandon(sent, granted)
				return nil, err
			}
		}
		for i, l := range leases {
			if err = c.heart.add(l, grants[i]); err != nil {
				leases = leases[:i]
				break
			}
		}
		if err == nil {
			return leases, nil
		}
		// The process was paused for so long that the grants have ended, or the client was closed meanwhile.
		c.heart.forget(leases)
		c.undo(bounded, grants...)
		if !errors.Is(err, ErrLost) || !rs[0].Wait || bounded.Err() != nil {
			return nil, err
		}
		for i := range rs {
			rs[i].RequestID = backend.NewRequestID()
		}
	}
}

// abandon has everything given back that requests may have left.
func (c *Client) abandon(rs []backend.Request, known certainty) {
	for i := range rs {
		c.cleaner.add(rs[i].Grant(), known)
	}
}

// forget takes leases that nobody has seen out of the heap.
func (h *heart) forget(leases Leases) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range leases {
		l.state = stateReleased
		h.drop(l)
	}
}

// oneByOne acquires one name after the other, in an order that is the same for all, and rolls back if one cannot be had,
// or if one is lost while it waits for the others.
func (c *Client) oneByOne(
	ctx, bounded context.Context, names []string, rs []backend.Request, renew bool,
) (Leases, error) {
	order := c.set.Order
	if order == nil {
		order = cmp.Compare[string]
	}
	sorted := make([]int, len(names))
	for i := range sorted {
		sorted[i] = i
	}
	slices.SortStableFunc(sorted, func(i, j int) int { return order(names[i], names[j]) })
	for {
		leases := c.newLeases(ctx, names, renew)
		taken, err := c.eachOf(bounded, leases, rs, sorted)
		if err == nil {
			return leases, nil
		}
		_ = taken.Release(bounded) // what is not done at once goes on in the background
		if !errors.Is(err, ErrLost) || !rs[0].Wait || bounded.Err() != nil {
			return nil, err
		}
		for _, l := range taken {
			c.undo(bounded, l.grant) // the lost ones too
		}
		for i := range rs {
			rs[i].RequestID, rs[i].Fresh = backend.NewRequestID(), true
		}
	}
}

// eachOf makes one round of oneByOne, and returns what it took.
func (c *Client) eachOf(
	bounded context.Context, leases Leases, rs []backend.Request, sorted []int,
) (taken Leases, err error) {
	for _, i := range sorted {
		lease, err := c.acquireLease(bounded, leases[i], rs[i])
		if err == nil {
			leases[i] = lease
			taken = append(taken, lease)
			err = taken.Err()
		}
		if err != nil {
			return taken, err
		}
	}
	return taken, nil
}
