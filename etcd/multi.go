package etcd

import (
	"context"
	"fmt"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Several names in one step. The transaction compares for each name the same as a single acquire, and writes all keys
// or no key; so it can acquire free names, and cannot wait. A single name uses the same transaction: see take.
//
// A set that has to wait, or does not fit one transaction, is refused with ErrUnsupported before anything is sent.
// The core then acquires the names one after the other, in one order for all callers
// (docs/decisions/2026-11-21-several-names-in-order.md).

// AcquireAll acquires all names atomically, for sets that do not wait and fit one transaction: 100 names,
// of which shared ones count three times. Other sets are backend.ErrUnsupported, even if only the server's own limit is
// lower, and have no effect. Grants come in the order of rs. Errors are as for Acquire; a *backend.HeldError names
// the first name that is held.
//
// AcquireAll does not wait in several queues: the first place in one of them would block its name while the wait for
// the others goes on.
func (d *Driver) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	name := ""
	if len(rs) > 0 {
		name = rs[0].Name
	}
	grants, err := d.acquire(ctx, rs)
	return grants, d.callError("acquire", name, err)
}

// inOneStep refuses sets that do not fit one transaction, by the number of their comparisons. A shared name needs
// three: see use.free.
func inOneStep(rs []backend.Request) error {
	comparisons := 0
	for _, r := range rs {
		comparisons += len(use(kit.UseOf(r)).free("", ""))
	}
	switch {
	case rs[0].Wait:
		return fmt.Errorf("waiting for several names at once: %w", backend.ErrUnsupported)
	case comparisons > opsPerTxn:
		return fmt.Errorf("%d names in one transaction: %w", len(rs), backend.ErrUnsupported)
	}
	return nil
}
