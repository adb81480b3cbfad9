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

// Deletion of keys, and the reason of an end. All deletions of requests' keys, except in ForceRelease, go through
// deleteIf. No deletion is unconditional: each compares the life of its key (created), or that nobody has written it
// since it was read (asRead). Hence a late deletion spares later lives. etcd's own recipe unlocks by the name of the
// key, and a repeated unlock deletes the next lock of

// Release releases a hold, in one transaction, and returns when etcd has confirmed it or ctx has ended. Request.Grant
// names a request; Release then reads the key first, and removes the request's hold or its place in the queue. It
// also runs in a cluster that has lost its past, where a restored backup may have the key.
//
// Errors wrap backend.ErrNotHeld, with the reason, if the hold was over; ErrUnavailable or ErrUnknown, after which
// the caller may retry; ErrUnsupported, ErrClosed, or ctx's error. A hold that was not released goes on until its
// session ends.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return d.callError("release", g.Name, d.release(ctx, g))
}

// release forgets the hold when its key is known to be gone, or when etcd refuses to delete it. If ctx ends before the
// answer the hold stays a user of the session, and the caller retries.
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
		// The create revision names the hold. If the driver does not know the hold, the request id is compared too: a
		// grant that somebody forged from the public view of a hold must not end it.
		cmps := []clientv3.Cmp{created(key, revision)}
		if h == nil { // not known to be this request's
			cmps = append(cmps, standsFor(key, g.RequestID)...)
		}
		err = d.deleteIf(ctx, key, cmps...)
	}
	if err != nil && !errors.Is(err, backend.ErrNotHeld) {
		// The key may stand, and the caller may retry.
		if h != nil && ctx.Err() == nil {
			d.abandon(key, h)
		}
		return err
	}
	if err != nil && revision != 0 {
		err = d.notHeld(ctx, g, h)
	}
	d.dropHold(key, h)
	return err
}

// abandon forgets a hold whose key etcd refused to delete. The other holds of its lease move to another one with their
// next renewal, and the lease ends with the last of them.
func (d *Driver) abandon(key string, h *hold) {
	if d.sessions.Abandon(h.session) {
		h.session.outgrow()
	}
	d.dropHold(key, h)
}

// deleteRequest deletes the key of a request, which is "" if this driver knows no key, or returns ErrNotHeld if there
// is no such key. It waits for the last transaction of the request first, because only its end shows whether it left
// a key. A key that another driver wrote is looked for in the name's directory.
func (d *Driver) deleteRequest(ctx context.Context, key string, g backend.Grant) error {
	// Only the answer shows whether the request left a key.
	if err := d.landed(ctx, key); err != nil {
		return err
	}
	if key == "" {
		resp, err := d.get(unhurried{d.request(ctx)}, d.dir(g.Name), clientv3.WithPrefix())
		if resp == nil {
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

// deleteAsRead deletes a key as it reads it, if may allows that, and returns ErrNotHeld if there is no key or may does
// It never deletes a later write, however late its own request arrives: a repeated request with the same id writes
// the key again (TestLateDeleteSparesTheSameRequestSentAgain). If somebody wrote between the read and the deletion,
// it repeats.
func (d *Driver) deleteAsRead(ctx context.Context, key string, may func(*mvccpb.KeyValue) bool) error {
	for {
		resp, err := d.get(unhurried{d.request(ctx)}, key)
		if resp == nil {
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

// anything is the condition of deleteAsRead where the key is known to be the caller's.
func anything(*mvccpb.KeyValue) bool { return true }

// clear is deleteAsRead, but a missing key is success.
func (d *Driver) clear(ctx context.Context, key string, may func(*mvccpb.KeyValue) bool) error {
	err := d.deleteAsRead(ctx, key, may)
	if errors.Is(err, backend.ErrNotHeld) {
		return nil
	}
	return err
}

// deleteIf deletes a key if the comparisons hold, and otherwise returns ErrNotHeld. One of them must fail for a key
// that is missing. When ctx ends first the deletion may still be carried out, unless it had not yet departed.
func (d *Driver) deleteIf(ctx context.Context, key string, cmps ...clientv3.Cmp) error {
	name, _ := d.nameOf(key)
	// A release travels in any token space, with the releases and acquires of other names. Once it has departed it goes
	// on when ctx ends.
	f := &flight{name: name, cmps: cmps, then: []clientv3.Op{clientv3.OpDelete(key)}, values: ctx}
	if err := d.send(f); err != nil {
		return err
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		d.withdraw(f)
		return ctx.Err()
	}
	switch {
	case f.resp == nil:
		return f.err
	case !f.resp.Succeeded:
		return backend.ErrNotHeld
	}
	return nil
}

// forced is the trace of a ForceRelease for its victims: the keys created from Revision to Through. A victim finds
// its key missing, and the reason here.
type forced struct {
	Revision int64  `json:"revision"`
	Through  int64  `json:"through,omitempty"` // missing: one victim
	Reason   string `json:"reason"`
	// Who called ForceRelease.
	By        string `json:"by,omitempty"`
	Principal string `json:"principal,omitempty"`
}

// names reports whether a hold was among the victims.
func (f forced) names(revision int64) bool {
	return f.Revision <= revision && revision <= max(f.Revision, f.Through)
}

// notHeld returns the reason why a hold is gone, as a *backend.NotHeldError. h is the driver's hold, or nil. It asks
// etcd for the trace of a ForceRelease and for the token space, in one transaction, and takes a second at most:
// without an answer the reason is less exact, but the hold is gone all the same.
//
// A key that is missing while its session lives was removed by somebody (ReasonEvicted). A hold that the driver did
// not know, or has only just adopted, went with its session (ReasonSessionExpired).
func (d *Driver) notHeld(ctx context.Context, g backend.Grant, h *hold) error {
	e := &backend.NotHeldError{Name: g.Name, Reason: backend.ReasonEvicted}
	if h == nil || h.adopted {
		e.Reason = backend.ReasonSessionExpired
	}
	if d.history.err() == nil {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		resp, err := d.commit(ctx, nil,
			[]clientv3.Op{clientv3.OpGet(d.forcedKey(g.Name)), clientv3.OpGet(d.spaceKey())}, nil)
		if err == nil && d.checkSpace(resp.Responses[1].GetResponseRange().Kvs) == nil {
			var f forced
			kvs := resp.Responses[0].GetResponseRange().Kvs
			if len(kvs) == 1 && json.Unmarshal(kvs[0].Value, &f) == nil && f.names(incarnation(g)) {
				e.Reason, e.Text, e.By, e.Principal = backend.ReasonForceReleased, f.Reason, f.By, f.Principal
			}
		}
	}
	// The loss of the cluster's past explains any other loss, and may have been detected just now.
	if d.history.err() != nil {
		e.Reason = backend.ReasonHistoryLost
	}
	return e
}
