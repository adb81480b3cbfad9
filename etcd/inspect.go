package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"maps"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Look, List, and ForceRelease. A name's state is its queue, read at one revision: the first entries hold, the others
// wait. These calls need no session, and a cluster that has lost its past answers them too: the present keys can
// be read whatever came before.

// Look returns the holders of a name and the number of waiters. It takes two round trips, and one more for each
// further eight leases on which holds stand. Holder.ExpiresIn is in whole seconds, and 0 for a lease that has just
// ended; Holder.Since is when the request entered the queue, by its client's clock, and zero for entries of earlier
// versions. State.Revision is where a Watch continues without a gap. Errors wrap backend.ErrInvalidName,
// ErrUnavailable, ErrUnknown or ErrClosed, or are ctx's.
func (d *Driver) Look(ctx context.Context, name string) (backend.State, error) {
	info, err := d.holder(ctx, name)
	if err != nil {
		return backend.State{}, d.callError("holder", name, err)
	}
	return info, nil
}

// holder reads the queue, and asks how long the leases of the holders last.
func (d *Driver) holder(ctx context.Context, name string) (backend.State, error) {
	if err := backend.ValidateName(name); err != nil {
		return backend.State{}, err
	}
	ctx, leave, err := d.beginBound(ctx)
	if err != nil {
		return backend.State{}, err
	}
	defer leave()
	resp, err := d.get(ctx, d.dir(name), clientv3.WithPrefix())
	// The present keys can be read whatever came before, so an answer beside an error is enough.
	if resp == nil {
		return backend.State{}, err
	}
	queue := d.entriesOf(resp.Kvs)
	info := infoOf(name, queue, resp.Header.Revision)
	info.Queue = waitersOf(queue, len(info.Holders))
	left, err := d.timesToLive(ctx, queue[:len(info.Holders)])
	if err != nil {
		return backend.State{}, err
	}
	for i := range info.Holders {
		info.Holders[i].ExpiresIn = left[queue[i].lease]
	}
	return info, nil
}

// leasesAtOnce bounds the concurrent requests of timesToLive: a name that a thousand readers share must not be a
// thousand concurrent requests.
const leasesAtOnce = 8

// timesToLive returns the remaining time of the leases of entries, in whole seconds; 0 for expired leases. The leader
// answers by its own clock, without a majority: this is for people to read, and no decision depends on it.
func (d *Driver) timesToLive(ctx context.Context, entries []entry) (map[clientv3.LeaseID]time.Duration, error) {
	// Shared holds of one client stand on one lease, which is asked for once.
	left := map[clientv3.LeaseID]time.Duration{}
	for _, e := range entries {
		left[e.lease] = 0
	}
	var mu sync.Mutex // protects left and failed
	var failed error
	// leasesAtOnce at a time, in goroutines that all end before the next ones begin. The first failure ends the look:
	// a state in which some holders have no end would look like expired holds.
	for part := range slices.Chunk(slices.Collect(maps.Keys(left)), leasesAtOnce) {
		var work sync.WaitGroup
		for _, lease := range part {
			work.Go(func() {
				resp, err := d.client.TimeToLive(ctx, lease)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					failed = err
					return
				}
				_ = d.hear(resp.ResponseHeader, nil)
				left[lease] = max(0, time.Duration(resp.TTL)*time.Second)
			})
		}
		work.Wait()
		if failed != nil {
			return nil, failed
		}
	}
	return left, nil
}

// infoOf describes a name by its queue, as it was at a revision.
func infoOf(name string, queue []entry, revision int64) backend.State {
	info := backend.State{Name: name, Revision: uint64(revision)}
	for _, e := range holders(queue) {
		info.Held = true
		info.Holders = append(info.Holders, backend.Holder{
			Owner: e.value.Owner, HoldID: e.value.HoldID, Kind: e.use.Kind, Permits: e.use.Permits, Limit: e.use.Limit,
			Token: tokenOf(e.use.Kind, e.revision), Nonce: e.value.nonce(), Since: e.value.since(), Metadata: e.value.Metadata,
		})
	}
	info.Waiters = len(queue) - len(info.Holders)
	return info
}

// waitersOf returns the first waiters of a queue of which n entries hold.
func waitersOf(queue []entry, n int) (all []backend.Waiter) {
	for _, e := range queue[n:min(len(queue), n+backend.MaxQueue)] {
		all = append(all, backend.Waiter{
			Owner: e.value.Owner, HoldID: e.value.HoldID, Kind: e.use.Kind, Permits: e.use.Permits, Limit: e.use.Limit,
			Since: e.value.since(),
		})
	}
	return all
}

// pageSize bounds the keys that List reads per request, so that an answer stays small however many names there are.
const pageSize = 500

// List yields the names that start with prefix, all names for "", in the order of their escaped form. It reads 500 keys
// at a time, all at the revision of the first, so that all states are of one moment. It does not set
// ExpiresIn: see Look. An error is yielded last; if etcd is compacted while a long loop goes on, that is one.
func (d *Driver) List(ctx context.Context, prefix string) iter.Seq2[backend.State, error] {
	return func(yield func(backend.State, error) bool) {
		if err := d.list(ctx, prefix, yield); err != nil {
			yield(backend.State{}, d.callError("list", prefix, err))
		}
	}
}

// list reads the range of all names with a prefix and yields each name's keys as one State. The keys of a name are
// adjacent, so only one name is in memory at a time, however many there are.
func (d *Driver) list(ctx context.Context, prefix string, yield func(backend.State, error) bool) error {
	if err := backend.ValidateName(prefix); err != nil && prefix != "" {
		return err
	}
	ctx, leave, err := d.beginBound(ctx)
	if err != nil {
		return err
	}
	defer leave()
	from := d.locksDir() + url.PathEscape(prefix)
	end := clientv3.GetPrefixRangeEnd(from)
	var revision int64
	var name string // whose keys are in kvs
	var kvs []*mvccpb.KeyValue
	// flush yields the name whose keys are complete, because a key of another name, or the end, has been read. It
	// reports whether the caller wants more.
	flush := func() bool {
		queue := d.entriesOf(kvs)
		kvs = kvs[:0]
		return len(queue) == 0 || yield(infoOf(name, queue, revision), nil)
	}
	for {
		resp, err := d.get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(revision))
		if resp == nil {
			return err
		}
		if revision == 0 {
			revision = resp.Header.Revision
		}
		for _, kv := range resp.Kvs {
			of, ok := d.nameOf(string(kv.Key))
			if !ok {
				continue // foreign
			}
			if of != name {
				if !flush() {
					return nil
				}
				name = of
			}
			kvs = append(kvs, kv)
		}
		if !resp.More || len(resp.Kvs) == 0 {
			flush()
			return nil
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

// forcedFor is the time, in seconds, for which the reason of a ForceRelease stays for its victims to find at their
// next renewal. It stands on a separate lease, so that it expires without a deletion.
const forcedFor = 60

// victimsPerTxn stays below the operations that a server allows in a transaction, counting nested ones.
const victimsPerTxn = 50

// ForceRelease ends the holds that r names, 50 in a transaction or as many as the server allows; waiters take their
// turns meanwhile, and are not ended. Each deletion compares the create revision that the hold had when it was read, so
// no later hold ends. A victim's next renewal reports backend.ReasonForceReleased; a guard may refuse the victim's
// token before that. The reason is shown to callers that Watch the name. A name without a holder,
// or without a matching hold, is backend.ErrNotHeld. After another error some of the holds may have ended.
func (d *Driver) ForceRelease(ctx context.Context, r backend.ForceRequest) error {
	return d.callError("force-release", r.Name, d.forceRelease(ctx, &r))
}

// forceRelease reads the queue and ends its holders, until it has ended a hold or finds no holder. Under a condition
// it reads once.
func (d *Driver) forceRelease(ctx context.Context, r *backend.ForceRequest) error {
	if err := kit.ValidateForce(d.Describe(), r); err != nil {
		return err
	}
	ctx, leave, err := d.beginBound(ctx)
	if err != nil {
		return err
	}
	defer leave()
	for {
		resp, err := d.get(ctx, d.dir(r.Name), clientv3.WithPrefix())
		if resp == nil {
			return err
		}
		victims := slices.DeleteFunc(holders(d.entriesOf(resp.Kvs)), func(e entry) bool {
			return !r.Matches(e.value.nonce(), tokenOf(e.use.Kind, e.revision))
		})
		if len(victims) == 0 {
			return backend.ErrNotHeld
		}
		ended, err := d.endForced(ctx, r, victims)
		switch {
		case err != nil:
			return errors.Join(err, ctx.Err())
		case ended:
			return nil
		case r.Conditional():
			return backend.ErrNotHeld
		}
	}
}

// endForced deletes the victims' keys and writes the reason, in the same transactions, so that the two appear
// together. Each deletion compares the life of its key. It reports whether it deleted any.
func (d *Driver) endForced(ctx context.Context, r *backend.ForceRequest, victims []entry) (
	ended bool, err error,
) {
	// The trace names a range of create revisions, since the victims hold together and are the first of the queue.
	trace := forced{Revision: victims[0].revision, Reason: r.Reason, By: r.By, Principal: r.Principal}
	if last := victims[len(victims)-1].revision; last != trace.Revision {
		trace.Through = last
	}
	text, err := json.Marshal(trace)
	if err != nil {
		return false, err
	}
	lease, err := d.client.Grant(ctx, forcedFor)
	if err != nil {
		return false, err
	}
	// Every part writes the trace, beside the deletions that it explains, even if it finds no victim.
	var deleted atomic.Bool
	err = inParts(victims, victimsPerTxn, func(part []entry) error {
		ops := []clientv3.Op{clientv3.OpPut(d.forcedKey(r.Name), string(text), clientv3.WithLease(lease.ID))}
		for _, v := range part {
			stands := []clientv3.Cmp{created(v.key, v.revision)}
			ops = append(ops, clientv3.OpTxn(stands, []clientv3.Op{clientv3.OpDelete(v.key)}, nil))
		}
		resp, err := d.commit(ctx, nil, ops, nil)
		if resp == nil {
			return err
		}
		for _, part := range resp.Responses[1:] {
			if part.GetResponseTxn().Succeeded {
				deleted.Store(true)
			}
		}
		return nil
	})
	if ended = deleted.Load(); err != nil {
		return ended, err
	}
	// No hold has ended.
	if !ended {
		_, err = d.client.Revoke(context.WithoutCancel(ctx), lease.ID)
	}
	return ended, err
}
