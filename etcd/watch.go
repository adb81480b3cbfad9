package etcd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// Watch is engine.Watches's: it watches for the deletion of a key, which a place may name, or of any key in a
// directory. It watches from now on: from the revision that was read would put it among those that lag behind, which
// the server serves every 100 ms.
func (e *service) Watch(ctx context.Context, what string, wake func()) error {
	o := []clientv3.OpOption{clientv3.WithFilterPut(), clientv3.WithCreatedNotify()}
	if strings.HasSuffix(what, "/") {
		o = append(o, clientv3.WithPrefix())
	}
	key, _ := keyAt(what)
	return e.receive(ctx, e.client.Watch(clientv3.WithRequireLeader(ctx), key, o...),
		func(resp clientv3.WatchResponse) error {
			if resp.Created || len(resp.Events) > 0 {
				wake()
			}
			return nil
		})
}

// receive calls f with each message of a watch, until ctx ends: the library's channel may stay open then.
func (e *service) receive(ctx context.Context, ch clientv3.WatchChan, f func(clientv3.WatchResponse) error) error {
	for {
		var resp clientv3.WatchResponse
		open := false
		select {
		case resp, open = <-ch:
		case <-ctx.Done():
			return ctx.Err()
		}
		switch err := resp.Err(); {
		case !open:
			return errWatch
		case err != nil:
			return err
		}
		if err := e.hear(ctx, resp.Header, nil); err != nil {
			return err
		}
		if err := f(resp); err != nil {
			return err
		}
	}
}

// notice notifies the client of a session about a hold on it.
type notice struct {
	Request     string `json:"request"`
	Incarnation string `json:"incarnation"`
	forced
}

// notices notify the sessions of victims. A session of an earlier version has no key.
func (e *service) notices(victims []entry, f forced) (ops []clientv3.Op) {
	by := map[clientv3.LeaseID][]notice{}
	for _, x := range victims {
		by[x.lease] = append(by[x.lease], notice{x.value.Request, x.incarnation(), f})
	}
	for lease, all := range by {
		key := e.sessionKey(lease)
		text, _ := json.Marshal(all) // of text and numbers only, which can be encoded
		stands := clientv3.Compare(clientv3.CreateRevision(key), ">", 0)
		put := clientv3.OpPut(key, string(text), clientv3.WithIgnoreLease())
		ops = append(ops, clientv3.OpTxn([]clientv3.Cmp{stands}, []clientv3.Op{put}, nil))
	}
	return ops
}

// Follow is engine.Follower's. The session's key is on its lease: the values written there are notices, and when it
// goes, the lease has ended.
func (e *service) Follow(ctx context.Context, s engine.Session, notify func(engine.Push)) error {
	l := leaseOf(s)
	key := e.sessionKey(l.id)
	planted, err := e.txn(ctx, []clientv3.Cmp{vacant(key)},
		[]clientv3.Op{clientv3.OpPut(key, "", clientv3.WithLease(l.id))}, []clientv3.Op{clientv3.OpGet(key)})
	if isOneOf(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	forward := func(kv *mvccpb.KeyValue) {
		var all []notice
		if json.Unmarshal(kv.Value, &all) != nil {
			return
		}
		for _, n := range all {
			notify(engine.Push{
				What: engine.PushLost, RequestID: n.Request, Incarnation: n.Incarnation, Loss: n.loss(),
			})
		}
	}
	if !planted.Succeeded {
		for _, kv := range planted.Responses[0].GetResponseRange().Kvs {
			forward(kv)
		}
	}
	since := clientv3.WithRev(planted.Header.Revision + 1)
	err = e.receive(ctx, e.client.Watch(clientv3.WithRequireLeader(ctx), key, since),
		func(resp clientv3.WatchResponse) error {
			for _, event := range resp.Events {
				if event.Type == clientv3.EventTypeDelete {
					return errEnded
				}
				forward(event.Kv)
			}
			return nil
		})
	if errors.Is(err, errEnded) {
		return nil
	}
	return err
}

// errEnded: the key of a session is gone.
var errEnded = errors.New("the session may have ended")

// errWatch: a watch was cut off.
var errWatch = fmt.Errorf("%w: the watch ended", backend.ErrUnavailable)

// Changes is engine.Changes's. etcd reports which keys came and went; a follower keeps the queue up to date with that,
// revision by revision, and compares who holds before and after. A place that comes or goes is no change, and neither
// is a hold that moves to another lease.
func (e *service) Changes(ctx context.Context, name string, since uint64) iter.Seq2[backend.Change, error] {
	return func(yield func(backend.Change, error) bool) {
		ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
		defer cancel()
		f := &follower{e: e, name: name, yield: yield}
		if err := f.follow(ctx, int64(since)); err != nil && !errors.Is(err, errLeft) {
			if isOneOf(err, rpctypes.ErrCompacted) {
				err = backend.ErrCompacted
			}
			yield(backend.Change{}, err)
		}
	}
}

// errLeft: the caller left its loop.
var errLeft = errors.New("the loop was left")

// follower belongs to the goroutine of the caller's loop.
type follower struct {
	e       *service
	name    string
	queue   []entry
	holders []entry // before the step in progress
	yield   func(backend.Change, error) bool
}

// follow reads the queue as it was at the revision since, and applies the watch's events from then on.
func (f *follower) follow(ctx context.Context, since int64) error {
	dir := f.e.dir(f.name)
	resp, err := f.e.get(ctx, dir, clientv3.WithPrefix(), clientv3.WithRev(since))
	if isOneOf(err, rpctypes.ErrFutureRev) { // the caller's revision is of a cluster that had come further
		return &backend.HistoryError{What: "revision", Was: strconv.FormatInt(since, 10), Now: "less"}
	}
	if resp == nil {
		return err
	}
	f.queue = f.e.queueOf(resp.Kvs)
	f.holders = slices.Clone(holders(f.queue))
	if since == 0 {
		since = resp.Header.Revision
	}
	ch := f.e.client.Watch(ctx, dir, clientv3.WithPrefix(), clientv3.WithRev(since+1), clientv3.WithPrevKV())
	return f.e.receive(ctx, ch, func(resp clientv3.WatchResponse) error {
		for len(resp.Events) > 0 { // one response may carry several revisions
			n := slices.IndexFunc(resp.Events, func(e *clientv3.Event) bool {
				return e.Kv.ModRevision != resp.Events[0].Kv.ModRevision
			})
			if n < 0 {
				n = len(resp.Events)
			}
			if err := f.step(ctx, resp.Events[:n]); err != nil {
				return err
			}
			resp.Events = resp.Events[n:]
		}
		return nil
	})
}

// step applies the events of one revision to the queue, and yields which holds have ended and begun. It asks etcd how a
// hold has ended: a guess would be reported as the truth.
func (f *follower) step(ctx context.Context, events []*clientv3.Event) error {
	revision := uint64(events[0].Kv.ModRevision)
	var force *forced
	for _, event := range events {
		x, ours := f.e.entryOf(event.Kv)
		at := slices.IndexFunc(f.queue, func(e entry) bool { return e.key == x.key })
		switch {
		case event.Type == clientv3.EventTypeDelete && at >= 0:
			f.queue = slices.Delete(f.queue, at, at+1)
		case event.Type == clientv3.EventTypeDelete:
		case x.key == f.e.forcedKey(f.name):
			if force = new(forced); json.Unmarshal(event.Kv.Value, force) != nil {
				force = nil
			}
		case ours && at >= 0:
			f.queue[at] = x // moved to another lease
		case ours:
			f.queue = append(f.queue, x)
		}
	}
	before, now := f.holders, slices.Clone(holders(f.queue))
	f.holders = now
	gone := map[clientv3.LeaseID]bool{}
	for _, x := range before {
		if contains(now, x) {
			continue
		}
		c := f.change(backend.ChangeReleased, x, revision)
		if force != nil && force.names(x.revision) {
			c.Type, c.Reason = backend.ChangeForceReleased, force.Reason
			c.By, c.Principal = force.By, force.Principal
		} else if expired, err := f.leaseGone(ctx, x.lease, gone); err != nil {
			return err
		} else if expired {
			c.Type = backend.ChangeExpired
		}
		if !f.yield(c, nil) {
			return errLeft
		}
	}
	for _, x := range now {
		if !contains(before, x) && !f.yield(f.change(backend.ChangeAcquired, x, revision), nil) {
			return errLeft
		}
	}
	return nil
}

// contains reports whether the same hold is among entries, which are in the order of the queue.
func contains(entries []entry, x entry) bool {
	_, found := slices.BinarySearchFunc(entries, x, func(a, b entry) int { return cmp.Compare(a.revision, b.revision) })
	return found
}

func (f *follower) change(typ backend.ChangeType, x entry, revision uint64) backend.Change {
	return backend.Change{Type: typ, Name: f.name, Owner: x.value.Owner, Token: x.token(), Revision: revision}
}

// leaseGone reports whether a lease has ended, by expiry or by Close: etcd keeps no record to distinguish them.
func (f *follower) leaseGone(
	ctx context.Context, lease clientv3.LeaseID, known map[clientv3.LeaseID]bool,
) (bool, error) {
	if gone, asked := known[lease]; asked {
		return gone, nil
	}
	resp, err := f.e.client.TimeToLive(ctx, lease)
	if err != nil {
		return false, err
	}
	if err := f.e.hear(ctx, resp.ResponseHeader, nil); err != nil {
		return false, err
	}
	known[lease] = resp.TTL < 0
	return known[lease], nil
}
