package etcd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// tries is how often an attempt without Wait is made when its answer got lost.
const tries = 3

// Acquire implements backend.Driver.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	grants, err := d.acquire(ctx, []backend.Request{r})
	if err != nil {
		return backend.Grant{}, d.callError("acquire", r.Name, err)
	}
	return grants[0], nil
}

// acquire takes one name, or all of a set.
func (d *Driver) acquire(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	if err := kit.ValidateSet(d.Describe(), rs); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := d.begin(ctx); err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	if err := d.history.err(); err != nil {
		return nil, err
	}
	bounded, done := d.gate.Bind(ctx)
	defer done()

	a := d.attempt(rs)
	ended := d.begun(a.keys)
	defer func() {
		ended()
		if a.left {
			d.remove(a.keys)
		}
	}()
	for n := 1; ; n++ {
		grants, err := a.once(bounded)
		if err == nil {
			return grants, nil
		}
		if unsent(err) {
			a.failed = err
		}
		if !a.worthRepeating(err, n) || bounded.Err() != nil {
			return nil, a.giveUp(bounded, err)
		}
		if err := kit.Sleep(bounded, kit.RetryPause(a.ttl)); err != nil {
			return nil, a.giveUp(bounded, err)
		}
	}
}

// supported refuses holds that this driver does not know.
func supported(g backend.Grant) error {
	if g.Kind > backend.KindPermits || g.Hierarchical {
		return backend.ErrUnsupported
	}
	return nil
}

// attempt is one Acquire or AcquireAll, over all repetitions.
type attempt struct {
	d       *Driver
	wishes  []wish   // one, or those of a set
	keys    []string // of the wishes
	wait    bool
	ttl     time.Duration
	again   bool     // keys may exist
	sent    bool     // we may have written them
	unknown bool     // a request left and was not answered
	session *session // of the last attempt
	queued  bool     // the name was taken
	failed  error    // the last failure that did nothing
	left    bool     // a place in the queue may be left
}

// wish is what is asked for one name.
type wish struct {
	r        backend.Request
	claim    claim
	dir, key string
	revision int64 // create revision of the key, once it is granted
}

func (d *Driver) attempt(rs []backend.Request) *attempt {
	a := &attempt{d: d, wait: rs[0].Wait, ttl: rs[0].TTL, wishes: make([]wish, len(rs)), keys: make([]string, len(rs))}
	for i, r := range rs {
		c, dir := claim{kind: r.Kind, permits: r.Permits, limit: r.Limit}, d.dir(r.Name)
		a.keys[i] = c.keyIn(dir, r.RequestID)
		a.wishes[i] = wish{r: r, claim: c, dir: dir, key: a.keys[i]}
		a.again = a.again || !r.Fresh
	}
	return a
}

// worthRepeating reports whether an attempt that failed may do better: the lease was lost under it, or an answer is
// missing, or the cluster has no leader just now.
func (a *attempt) worthRepeating(err error, n int) bool {
	if decided(err) || !transient(err) {
		return false
	}
	return a.wait || n < tries
}

// decided reports whether err is etcd's answer to the request, which left nothing.
func decided(err error) bool {
	return errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLimitMismatch) || errors.Is(err, backend.ErrUnsupported)
}

// giveUp adds to err what is known about what the attempts left. A place in the queue is removed in the background. If
// the outcome is not known, the caller decides: the same request again, or Release.
func (a *attempt) giveUp(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); errors.Is(cause, backend.ErrClosed) {
		err = cause // Close revokes the lease, and the key goes with it
	}
	if decided(err) {
		return err
	}
	if errors.Is(err, backend.ErrHistoryLost) {
		a.left = a.sent || a.unknown
		return err
	}
	if a.unknown {
		if errors.Is(err, backend.ErrUnknown) {
			return err
		}
		return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
	}
	a.left = a.sent
	if kit.IsContext(err) && a.failed != nil {
		return fmt.Errorf("%w: %w: %w", backend.ErrUnavailable, a.failed, err)
	}
	return err
}

// once makes an attempt on a session.
func (a *attempt) once(ctx context.Context) ([]backend.Grant, error) {
	s, err := a.d.sessionFor(ctx, a.ttl)
	if err != nil {
		a.d.trouble()
		switch {
		case errors.Is(err, backend.ErrHistoryLost):
		case !kit.IsContext(err): // a lease alone closes no name
			err = fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
			a.failed = err
		case a.failed == nil: // and silence may be the server's, or ours
			a.unknown = true
		}
		return nil, err
	}
	a.session = s
	switch w := &a.wishes[0]; {
	case len(a.wishes) > 1:
		err = a.tryAll(ctx, s)
	case a.wait:
		w.revision, err = a.waitFor(ctx, s, w)
	default:
		w.revision, err = a.try(ctx, s, w)
	}
	if err == nil {
		// The validity rests on the lease. A proof that is old would give a short one.
		err = s.prove(ctx, s.ttl/3)
	}
	if err == nil {
		err = s.joinMore(len(a.wishes) - 1)
	}
	if err != nil {
		if errors.Is(rpctypes.Error(err), rpctypes.ErrLeaseNotFound) {
			err = s.missing(ctx)
		}
		s.leave()
		return nil, err
	}
	return a.granted(s)
}

// granted notes the holds. Each is a user of the session.
func (a *attempt) granted(s *session) ([]backend.Grant, error) {
	grants := make([]backend.Grant, len(a.wishes))
	for i, w := range a.wishes {
		grants[i] = grantOf(w.r, s, w.revision)
		h := &hold{session: s, revision: w.revision, lost: w.r.Lost}
		h.promise(grants[i].SentAt.Add(s.ttl))
		a.d.addHold(w.key, h)
		grants[i].Queued = a.queued
	}
	select {
	case <-s.lost: // before addHold, which therefore did not tell anybody
		for i, g := range grants {
			a.d.dropHold(a.keys[i], a.d.hold(a.keys[i], g))
		}
		return nil, errSessionLost
	default:
	}
	return grants, nil
}

// txn commits ops if every comparison holds. From here on the keys may exist.
//
// The end of ctx ends the wait for the answer and not the request: cancelled on its way, it could still be carried out,
// behind the back of a Release that follows. That one waits for the answer: see flight.
func (a *attempt) txn(ctx context.Context, cmps []clientv3.Cmp, then, otherwise []clientv3.Op) (*clientv3.TxnResponse, error) {
	f, err := a.d.launch(ctx, a.keys, cmps, then, otherwise)
	if err != nil {
		return nil, err
	}
	var resp *clientv3.TxnResponse
	select {
	case <-f.done:
		resp, err = f.resp, f.err
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err == nil || !unsent(err) {
		a.sent = true
	}
	if err == nil {
		a.unknown = false // whatever an earlier request did, this one wrote the same keys
		return resp, nil
	}
	a.again = a.again || a.sent
	a.note(err)
	return resp, err
}

// note remembers that a request which changes something was not answered.
func (a *attempt) note(err error) {
	a.d.trouble()
	if !unsent(err) && !refused(err) && !errors.Is(err, errSessionLost) && !errors.Is(err, errOutgrown) {
		a.unknown = true
		if a.session != nil {
			a.session.doubt()
		}
	}
}

// try takes what nothing keeps out and returns the create revision of the key. A key that the request has already is
// written again, in the same transaction.
func (a *attempt) try(ctx context.Context, s *session, w *wish) (int64, error) {
	put, err := a.d.put(w.r, s.id)
	if err != nil {
		return 0, err
	}
	look := clientv3.OpGet(w.dir, clientv3.WithPrefix())
	var resp *clientv3.TxnResponse
	if a.again {
		take := clientv3.OpTxn(w.claim.free(w.dir), []clientv3.Op{put, look}, []clientv3.Op{look})
		resp, err = a.txn(ctx, exists(w.key), []clientv3.Op{put, look}, []clientv3.Op{take})
	} else {
		resp, err = a.txn(ctx, w.claim.free(w.dir), []clientv3.Op{put}, []clientv3.Op{look})
		if err == nil && resp.Succeeded {
			return resp.Header.Revision, nil
		}
	}
	if err != nil {
		return 0, err
	}
	queue, at, err := a.insist(ctx, w, put, resp, func(queue []entry) error {
		if len(w.claim.blockers(queue)) > 0 {
			return heldError(w.r.Name, queue)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	if len(w.claim.blockers(queue[:at])) > 0 { // an earlier attempt of this request queued
		return 0, a.stepBack(ctx, w, queue)
	}
	return queue[at].revision, nil
}

// insist returns the queue with our key in it and the key's place. resp is the answer to the first request, whose
// comparisons may have failed for nothing: they know neither how many permits are left nor foreign keys. It writes the
// key as soon as the queue, as it was read, says nothing against it and has not grown since. refuse says what is
// against it, besides a kind that does not mix.
func (a *attempt) insist(
	ctx context.Context, w *wish, put clientv3.Op, resp *clientv3.TxnResponse, refuse func(queue []entry) error,
) (queue []entry, at int, err error) {
	look := clientv3.OpGet(w.dir, clientv3.WithPrefix())
	for {
		last := resp.Responses[len(resp.Responses)-1]
		wrote := resp.Succeeded
		if inner := last.GetResponseTxn(); inner != nil {
			last, wrote = inner.Responses[len(inner.Responses)-1], inner.Succeeded
		}
		queue = a.d.entriesOf(last.GetResponseRange().Kvs)
		if at = place(queue, w.key); at >= 0 {
			return queue, at, nil
		}
		if wrote {
			return nil, 0, errSessionLost
		}
		if err = w.claim.mismatch(w.r.Name, queue); err != nil {
			return nil, 0, err
		}
		if err = refuse(queue); err != nil {
			return nil, 0, err
		}
		since := []clientv3.Cmp{unchanged(w.dir, resp.Header.Revision)}
		if resp, err = a.txn(ctx, since, []clientv3.Op{put, look}, []clientv3.Op{look}); err != nil {
			return nil, 0, err
		}
	}
}

// exists is true if a key does.
func exists(key string) []clientv3.Cmp {
	return []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(key), ">", 0)}
}

// stepBack leaves the queue, in which a try has no place.
func (a *attempt) stepBack(ctx context.Context, w *wish, queue []entry) error {
	err := a.d.deleteAsRead(ctx, w.key, func(*mvccpb.KeyValue) bool { return true })
	if err != nil && !errors.Is(err, backend.ErrNotHeld) {
		return err
	}
	return heldError(w.r.Name, queue)
}

// read returns the queue as a majority of the cluster has it now.
func (a *attempt) read(ctx context.Context, w *wish) ([]entry, error) {
	ctx, cancel := a.d.bounded(ctx)
	defer cancel()
	resp, err := a.d.get(ctx, w.dir, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	return a.d.entriesOf(resp.Kvs), nil
}

// heldError tells who stands first in the queue. How long that lease lasts would cost another request: see Holder.
func heldError(name string, queue []entry) error {
	return &backend.HeldError{Name: name, Holder: queue[0].value.Owner, HoldID: queue[0].value.HoldID}
}
