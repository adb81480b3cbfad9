package etcd

import (
	"context"
	"fmt"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Several names in one step. The transaction compares for each name what a single acquire compares, and writes all keys
// or none; so it can take what is free, and cannot wait. If it fails, judge reads from the same answer which name is in
// the way, or with which comparisons it can be tried again: as in insist, a comparison may have failed for nothing.
//
// A set that has to wait, or does not fit one transaction, is refused with ErrUnsupported before anything is sent. The
// core then takes the names one after the other, in one order for all callers
// (docs/decisions/2026-11-21-several-names-in-order.md).

// AcquireAll takes all names in one step or none, for sets that do not wait and fit one transaction: 100 names, of
// which shared ones count three times. Others are backend.ErrUnsupported, also where the server allows less, and
// nothing was done. Grants come in the order of rs. Errors are as for Acquire; a *backend.HeldError names the first
// name that is in the way.
//
// Waiting in several queues at once was rejected: the first place in one of them would keep its name closed while the
// wait for the others goes on.
func (d *Driver) AcquireAll(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	name := ""
	if len(rs) > 0 {
		name = rs[0].Name
	}
	grants, err := d.acquire(ctx, rs)
	return grants, d.callError("acquire", name, err)
}

// inOneStep refuses sets that one transaction cannot take, by the number of their comparisons. A shared name needs
// three: see claim.free.
func inOneStep(rs []backend.Request) error {
	comparisons := 0
	for _, r := range rs {
		comparisons += len(claim(kit.UseOf(r)).free("", ""))
	}
	switch {
	case rs[0].Wait:
		return fmt.Errorf("waiting for several names at once: %w", backend.ErrUnsupported)
	case comparisons > opsPerTxn:
		return fmt.Errorf("%d names in one transaction: %w", len(rs), backend.ErrUnsupported)
	}
	return nil
}

// tryAll is takeAll with a refusal for the size of the transaction told as ErrUnsupported, so that the core goes on
// with one name after the other.
func (a *attempt) tryAll(ctx context.Context, s *session) error {
	err := a.takeAll(ctx, s)
	if isOneOf(err, rpctypes.ErrTooManyOps, rpctypes.ErrRequestTooLarge) {
		return fmt.Errorf("%d names in one transaction: %w: %w", len(a.wishes), backend.ErrUnsupported, err)
	}
	return err
}

// takeAll writes the keys of all names in one transaction, and notes their create revisions. It repeats only if
// somebody came at the same moment or a comparison failed for nothing.
func (a *attempt) takeAll(ctx context.Context, s *session) error {
	var since []clientv3.Cmp
	var looks []clientv3.Op
	for _, w := range a.wishes {
		since = append(since, w.claim.free(w.dir, w.key)...)
		looks = append(looks, clientv3.OpGet(w.dir, clientv3.WithPrefix()))
	}
	// Each turn is one transaction. Every key is written, also one that stands, so that all are on this lease; PrevKV
	// tells its create revision from before.
	for {
		puts := make([]clientv3.Op, len(a.wishes))
		for i := range puts {
			puts[i] = a.wishes[i].put(s.id, clientv3.WithPrevKV())
		}
		resp, err := a.txn(ctx, since, puts, looks)
		if err != nil {
			return err
		}
		if resp.Succeeded {
			a.took(resp)
			return nil
		}
		if since, err = a.judge(ctx, resp); err != nil {
			return err
		}
	}
}

// judge says from the queues of all names, as resp tells them, under which comparisons the set can be written: keys
// that stand as granted go on standing, and nobody comes before those that are new. If one name is refused, none is
// kept, not even what is left of the same set from an earlier call.
func (a *attempt) judge(ctx context.Context, resp *clientv3.TxnResponse) (since []clientv3.Cmp, refusal error) {
	// Keys of an earlier call with the same set stand, and are written again as they were read. They count for the
	// requests that came after them, so blockers are looked for before them only.
	var stand []string
	for i := range a.wishes {
		w, kvs := &a.wishes[i], resp.Responses[i].GetResponseRange().Kvs
		before := a.d.entriesOf(kvs)
		if at := indexOfRequest(before, w.r.RequestID); at >= 0 {
			a.d.settleAt(w, before[at].key)
			since = append(since, asRead(w.key, before[at].modified))
			stand, before = append(stand, w.key), before[:at]
		} else {
			for a.taken(w, kvs) {
				a.d.resettle(w)
			}
			since = append(since, unchanged(w.dir, resp.Header.Revision))
		}
		if refusal == nil {
			refusal = w.claim.mismatch(w.r.Name, before)
		}
		if refusal == nil && len(w.claim.blockers(before)) > 0 {
			refusal = heldError(w.r.Name, before)
		}
	}
	if refusal == nil {
		return since, nil
	}
	// The set is refused: what an earlier call left of it must not keep anybody out.
	for _, key := range stand {
		if err := a.d.clear(ctx, key, anything); err != nil {
			return nil, err
		}
	}
	return nil, refusal
}

// took notes where the keys were created: now, or before if they stood.
func (a *attempt) took(resp *clientv3.TxnResponse) {
	for i := range a.wishes {
		a.wishes[i].revision = resp.Header.Revision
		if before := resp.Responses[i].GetResponsePut().PrevKv; before != nil {
			a.wishes[i].revision = before.CreateRevision
		}
	}
}
