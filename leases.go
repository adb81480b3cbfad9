package fencelock

// Several leases, for callers that need a whole set.

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/fencelock/fencelock/fencing"
)

// Leases is the result of AcquireAll: one lease for each name, in the order of the names. Each lease is renewed and
// lost separately; the methods of Leases are for callers that need the whole set.
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
	if ctx := last.jointOf(ls, nil); ctx != nil {
		return ctx
	}
	// The line of the last lease contains the earlier ones: see Client.AcquireAll.
	ctx, cancel := last.work().open()
	for _, l := range ls {
		if l.zero() || l.overOrCause() != nil { // so that an ended context adds no callbacks to the others
			l.endsWith(cancel)
			return ctx
		}
	}
	for _, l := range ls {
		l.endsWith(cancel)
	}
	return last.jointOf(ls, ctx)
}

// joint is the context of several leases, kept at the last of them and made once (TestTheContextOfLeasesIsMadeOnce).
type joint struct {
	// of are the leases that the context is about, since another slice may end with the same lease; next is the joint of
	// such a slice.
	of   Leases
	ctx  context.Context
	next *joint
}

// jointOf returns the context of leases that end with l. Without one it stores ctx as that context, unless ctx is
// nil.
func (l *Lease) jointOf(ls Leases, ctx context.Context) context.Context {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	for j := l.joint; j != nil; j = j.next {
		if slices.Equal(j.of, ls) {
			return j.ctx
		}
	}
	if ctx != nil && l.overOrCause() == nil {
		l.joint = &joint{slices.Clone(ls), ctx, l.joint}
	}
	return ctx
}

// Claims returns the claims that a guard checks before a write to resources that have the names of the locks, in the
// order of the leases; guards sort them. If a resource has another name than its lock, make a fencing.Set of
// Lease.Claim:
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

// Err returns nil while all leases are held, else the error of the first one lost or released. It reads the clock for
// each, as Lease.Err does.
//
// For empty Leases it is nil; AcquireAll never returns them without an error.
func (ls Leases) Err() error {
	for _, l := range ls {
		if err := l.Err(); err != nil {
			return err
		}
	}
	return nil
}

// Release releases all of them concurrently, and joins their errors. It returns as Lease.Release does:
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
