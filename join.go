package fencelock

// A second lease of one hold: with RequestID, the later one replaces the earlier ones; with Reentrant, and with
// RequestID under the very lease that has the id, they are held side by side. Each option of the second acquire is
// satisfied by the hold, applied to it, or refused, and never ignored; see serves.

import (
	"context"
	"fmt"
	"maps"

	"github.com/fencelock/fencelock/backend"
)

// join takes one more lease of a hold. The other leases keep it until handOver; a failure before that leaves them
// unchanged.
func (a *acquisition) join(bounded context.Context, h *hold) error {
	lease := &Lease{of: h, line: a.line, renew: !a.opts.noRenew}
	h.mu.Lock()
	err := h.causeOrNil()
	if err == nil && a.outer != nil {
		err = a.outer.overOrCause()
	}
	if err == nil {
		err = h.serves(&a.rs[0], &a.opts, a.replaces)
	}
	if err != nil {
		h.mu.Unlock()
		return err
	}
	h.add(lease)
	longer := a.opts.ttlGiven && a.rs[0].TTL > h.ttl
	h.mu.Unlock()
	a.leases, a.joined = append(a.leases, lease), true
	if longer {
		return lease.extend(bounded, a.opts.ttl)
	}
	return nil
}

// serves returns nil if one more lease of the hold satisfies the request, and else an error with the name of the
// option. The caller holds mu.
//
//	asked for              given by the hold         otherwise
//	kind, permits, limit   if they are the same      ErrLimitMismatch
//	Shared                 if it is exclusive, too   (Reentrant only; with RequestID ErrLimitMismatch)
//	exclusive              never, if it is shared    ErrDeadlock (Reentrant), ErrLimitMismatch (RequestID)
//	Hierarchical or not    if it is the same         ErrLimitMismatch
//	HoldAtLeast            if it was as long         ErrInvalidOption: the minimum counts from the grant
//	Metadata               if it is the same         ErrInvalidOption: it is written with the grant
//	TTL                    if it is as long          it is extended, see join
//	not NoRenew            if it is renewed          it is renewed while this lease lives, see hold.add
//	Seal                   never                     the claim is shown once more, see acquisition.seal
//
// A shared hold cannot become exclusive, since two readers would wait for each other. The lease adds no permits to
// the hold.
func (h *hold) serves(r *backend.Request, o *acquireOptions, repeated bool) error {
	g := &h.grant
	switch {
	case g.Hierarchical != r.Hierarchical:
		return &InvalidError{
			Kind: ErrLimitMismatch, What: "Hierarchical", Value: fmt.Sprint(r.Hierarchical),
			Why: "the hold was acquired with the opposite",
		}
	case g.Kind == r.Kind && g.Permits == r.Permits && g.Limit == r.Limit:
	case repeated, g.Kind == backend.KindPermits, r.Kind == backend.KindPermits:
		return ErrLimitMismatch
	case g.Kind == backend.KindShared:
		return fmt.Errorf("a shared hold cannot become exclusive: %w", deadlock(h.client.set.Owner, h.name, h.name))
	}
	switch {
	case r.MinHold > h.minHold:
		return invalidOption("HoldAtLeast", r.MinHold.String(),
			fmt.Sprintf("the hold was acquired with %v, and this is one more lease of it", h.minHold))
	case len(o.metadata) > 0 && !maps.Equal(o.metadata, h.metadata):
		return invalidOption("Metadata", fmt.Sprintf("of %d keys", len(o.metadata)),
			"the hold was acquired with other metadata, and this is one more lease of it")
	}
	return nil
}

// replaceOthers makes l the only lease of the hold; earlier leases are lost with ReasonReplaced, and their Release
// has no effect: it must not end the hold of the new lease. The observer sees one lease lost and another begin, even
// if the hold has just been lost.
func (h *hold) replaceOthers(l *Lease, began instant, acquired Event) {
	now := h.client.observedNow()
	acquired.Wait = now.Sub(began)
	h.mu.Lock()
	if h.cause.Load() != nil {
		h.tell(&acquired)
		h.tellOfLoss(now)
		h.mu.Unlock()
		return
	}
	cause := h.lostFor(ReasonReplaced, nil)
	before := ending{cause: cause}
	for _, old := range h.leases {
		if old != l {
			before.take([]*Lease{old})
			old.over.Store(&cause)
		}
	}
	h.leases = append(h.one[:0], l)
	h.renew = l.renew
	h.tell(&Event{Type: EventLost, Held: now.Sub(h.since), Reason: ReasonReplaced})
	h.tell(&acquired)
	h.mu.Unlock()
	before.cancel()
}
