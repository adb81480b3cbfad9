package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// Release gives a hold back, and costs one transaction. It is tried also in a cluster that has lost its past, where
// what a backup brought back may stand.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return d.callError("release", g.Name, d.release(ctx, g))
}

func (d *Driver) release(ctx context.Context, g backend.Grant) error {
	if g.Kind > backend.KindPermits || g.Hierarchical {
		return backend.ErrUnsupported
	}
	if err := d.begin(ctx); err != nil {
		return err
	}
	defer d.gate.Leave()
	key, revision := d.Key(g), incarnation(g)
	h := d.hold(key, g)
	var err error
	if revision == 0 {
		err = d.deleteRequest(ctx, key, g)
	} else {
		cmps := []clientv3.Cmp{created(key, revision)}
		if h == nil { // not known to be this request's
			cmps = append(cmps, standsFor(key, g.RequestID)...)
		}
		err = d.deleteIf(ctx, key, cmps...)
	}
	if err != nil && !errors.Is(err, backend.ErrNotHeld) {
		return err // the key may stand: its session goes on, and so does whoever calls again
	}
	if err != nil && revision != 0 {
		err = d.notHeld(ctx, g, h)
	}
	d.dropHold(key, h)
	return err
}

// deleteRequest deletes the key of a request, which is "" if this driver knows of none. ErrNotHeld if there is no such
// key.
func (d *Driver) deleteRequest(ctx context.Context, key string, g backend.Grant) error {
	// What the request may leave is known only when it is answered.
	if err := d.landed(ctx, key); err != nil {
		return err
	}
	if key == "" {
		resp, err := d.get(unhurried{d.request(ctx)}, d.dir(g.Name), clientv3.WithPrefix())
		if resp == nil {
			d.trouble()
			return err
		}
		queue := d.entriesOf(resp.Kvs)
		at := indexOfRequest(queue, g.RequestID)
		if at < 0 {
			return backend.ErrNotHeld
		}
		key = queue[at].key
	}
	return d.deleteAsRead(ctx, key, func(kv *mvccpb.KeyValue) bool {
		e, ours := d.entryOf(kv)
		return ours && e.value.Request == g.RequestID
	})
}

// deleteAsRead deletes a key as it reads it, if it may. It never deletes what is written later, however late its own
// request arrives: a request with the same id that is sent again writes the key again. ErrNotHeld if there is no key,
// or it may not.
func (d *Driver) deleteAsRead(ctx context.Context, key string, may func(*mvccpb.KeyValue) bool) error {
	for {
		resp, err := d.get(unhurried{d.request(ctx)}, key)
		if resp == nil {
			d.trouble()
			return err
		}
		if len(resp.Kvs) == 0 || !may(resp.Kvs[0]) {
			return backend.ErrNotHeld
		}
		err = d.deleteIf(ctx, key, asRead(key, resp.Kvs[0].ModRevision))
		if !errors.Is(err, backend.ErrNotHeld) {
			return err
		}
	}
}

// anything is what deleteAsRead may delete where the key is known to be the caller's.
func anything(*mvccpb.KeyValue) bool { return true }

// clear is deleteAsRead where a key that is not there is as good.
func (d *Driver) clear(ctx context.Context, key string, may func(*mvccpb.KeyValue) bool) error {
	err := d.deleteAsRead(ctx, key, may)
	if errors.Is(err, backend.ErrNotHeld) {
		return nil
	}
	return err
}

// deleteIf deletes a key if the comparisons, which no missing key passes, hold. Otherwise ErrNotHeld.
func (d *Driver) deleteIf(ctx context.Context, key string, cmps ...clientv3.Cmp) error {
	name, _ := d.nameOf(key)
	f := &flight{name: name, cmps: cmps, then: []clientv3.Op{clientv3.OpDelete(key)}, values: ctx}
	if err := d.send(f); err != nil {
		return err
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		if !d.withdraw(f) {
			d.trouble()
		}
		return ctx.Err()
	}
	switch {
	case f.resp == nil:
		d.trouble()
		return f.err
	case !f.resp.Succeeded:
		return backend.ErrNotHeld
	}
	return nil
}

// forced is what ForceRelease leaves behind for its victims: those created from Revision to Through.
type forced struct {
	Revision int64  `json:"revision"`
	Through  int64  `json:"through,omitempty"` // missing: one victim
	Reason   string `json:"reason"`
}

func (f forced) names(revision int64) bool {
	return f.Revision <= revision && revision <= max(f.Revision, f.Through)
}

// notHeld tells why a hold is gone. It asks for the trace of a ForceRelease; without an answer it is content with less.
func (d *Driver) notHeld(ctx context.Context, g backend.Grant, h *hold) error {
	e := &backend.NotHeldError{Name: g.Name, Reason: backend.ReasonEvicted}
	if h == nil || h.adopted {
		e.Reason = backend.ReasonSessionExpired
	}
	if e.Reason = d.lossOf(e.Reason); e.Reason == backend.ReasonHistoryLost {
		return e
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	resp, err := d.commit(ctx, nil, []clientv3.Op{clientv3.OpGet(d.forcedKey(g.Name)), clientv3.OpGet(d.spaceKey())}, nil)
	if err == nil {
		err = d.checkSpace(resp.Responses[1].GetResponseRange().Kvs)
	}
	if err != nil {
		e.Reason = d.lossOf(e.Reason)
		return e
	}
	if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) == 1 {
		var f forced
		if json.Unmarshal(kvs[0].Value, &f) == nil && f.names(incarnation(g)) {
			e.Reason = backend.ReasonForceReleased
		}
	}
	return e
}
