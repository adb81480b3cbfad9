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

// How a key is given back, and how somebody learns that it is gone. All deletions of requests' keys, except in
// ForceRelease, come through deleteIf. None deletes a key blindly: each compares which life of the key it means
// (created), or that nobody has written it since it was read (asRead). Hence a deletion that is carried out late spares
// what came after it. etcd's own recipe unlocks by the name of the key, and a repeated unlock deletes the next lock of
// the same session (TestRepeatedReleaseSparesTheNextHold).

// Release gives a hold back, in one transaction, and returns when etcd has confirmed it or ctx has ended. Request.Grant
// names what a request has, be it its hold or its place in the queue; Release removes either, and reads the key first.
// It is tried also in a cluster that has lost its past, where what a backup brought back may stand.
//
// Errors wrap backend.ErrNotHeld, with the reason, if the hold was over; ErrUnavailable or ErrUnknown, after which the
// caller may try again; ErrUnsupported, ErrClosed, or ctx's error. A hold that was not given back goes on until its
// session ends.
func (d *Driver) Release(ctx context.Context, g backend.Grant) error {
	return d.callError("release", g.Name, d.release(ctx, g))
}

// release forgets the hold only when its key is known to be gone. Until then the key may stand, so the hold stays a
// user of the session, whose keepalives go on, and the caller may try again.
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
		// The create revision names the hold. Where the driver does not know the hold, the request id is compared too:
		// a grant that was put together from what others can see of a hold must not end it.
		cmps := []clientv3.Cmp{created(key, revision)}
		if h == nil { // not known to be this request's
			cmps = append(cmps, standsFor(key, g.RequestID)...)
		}
		err = d.deleteIf(ctx, key, cmps...)
	}
	if err != nil && !errors.Is(err, backend.ErrNotHeld) {
		// The key may stand: its session goes on, and the caller may try again.
		return err
	}
	if err != nil && revision != 0 {
		err = d.notHeld(ctx, g, h)
	}
	d.dropHold(key, h)
	return err
}

// deleteRequest deletes the key of a request, which is "" if this driver knows of none, or returns ErrNotHeld if there
// is no such key. It waits for the last transaction of the request first, because what that may leave is known only
// when it has ended. A key that another driver wrote is looked for in the name's directory.
func (d *Driver) deleteRequest(ctx context.Context, key string, g backend.Grant) error {
	// What the request may leave is known only when it is answered.
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
// not. It never deletes what is written later, however late its own request arrives: a request with the same id that is
// sent again writes the key again (TestLateDeleteSparesTheSameRequestSentAgain). If somebody wrote between the read and
// the deletion, it reads again.
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

// deleteIf deletes a key if the comparisons hold, and returns ErrNotHeld if not. One of them must fail for a key that
// is missing. When ctx ends first the deletion may be carried out nevertheless, unless it had not yet departed.
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

// forced is what ForceRelease leaves behind for its victims: those created from Revision to Through. A victim learns of
// its end as a key that is missing, and finds the reason here.
type forced struct {
	Revision int64  `json:"revision"`
	Through  int64  `json:"through,omitempty"` // missing: one victim
	Reason   string `json:"reason"`
}

// names reports whether a hold was among the victims.
func (f forced) names(revision int64) bool {
	return f.Revision <= revision && revision <= max(f.Revision, f.Through)
}

// notHeld tells why a hold is gone, as a *backend.NotHeldError. h is what the driver knew of it, or nil. It asks etcd
// for the trace of a ForceRelease and for the token space, in one transaction, and takes a second at most: without an
// answer the reason is less exact, and the hold as much gone.
//
// A key that is missing while its session lives was taken away (ReasonEvicted). A hold that the driver did not know, or
// has only just adopted, went with its session (ReasonSessionExpired).
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
				e.Reason = backend.ReasonForceReleased
			}
		}
	}
	// The loss of the cluster's past explains any other, and may be what has just been found out.
	if d.history.err() != nil {
		e.Reason = backend.ReasonHistoryLost
	}
	return e
}
