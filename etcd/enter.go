package etcd

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/fencing"
)

// wish is an Enter's request for one name.
type wish struct {
	engine.Entering
	use   use
	dir   string
	lease clientv3.LeaseID
	value value
	// The keys that the first Enter of the attempt writes: the driver's own station, and the attempt's.
	key, second string
	over        string // the mark of the attempt
}

func (e *service) wishOf(r engine.Entering) *wish {
	w := &wish{Entering: r, use: use(kit.UseOf(r.Request)), dir: e.dir(r.Name), over: e.overKey(r.Attempt)}
	if l := leaseOf(r.Session); l != nil {
		w.lease = l.id
	}
	within := w.dir + w.use.part()
	w.key = within + strconv.FormatInt(e.station, 16)
	w.second = within + strconv.FormatInt(e.stationOf(r.Attempt), 16)
	w.value = value{
		Format: 3, Request: r.RequestID, Owner: r.Owner, HoldID: r.HoldID, Metadata: r.Metadata,
		Nonce: fencing.NewNonce().String(), Since: time.Now().UnixMilli(),
	}
	return w
}

func (w *wish) put(key string) clientv3.Op { return put(key, w.value, w.lease) }

// looks read the queue, and the mark of the attempt.
func (w *wish) looks() []clientv3.Op {
	return []clientv3.Op{clientv3.OpGet(w.dir, clientv3.WithPrefix()), clientv3.OpGet(w.over)}
}

// Enter is engine.Service's. A free name is acquired in one transaction, and a waiter gets its place in the same one.
// A waiter that has its place reads it, with the entries before it. What comparisons cannot express takes a second
// transaction: how many permits are left, which keys are foreign, whether the request itself stands there already.
func (e *service) Enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	if err := e.admit(r); err != nil {
		return engine.Position{}, err
	}
	p, err := e.enter(ctx, r)
	e.note(r, p, err)
	return p, err
}

// admit refuses a request of which nothing was sent before, once the revisions are used up.
func (e *service) admit(r engine.Entering) error {
	if !r.Fresh || r.Again || r.Place != "" {
		return nil
	}
	return e.history.exhausted()
}

// note notes the key of a hold, for Extend.
func (e *service) note(r engine.Entering, p engine.Position, err error) {
	if l := leaseOf(r.Session); l != nil && err == nil && p.Held {
		key, revision := e.keyOf(r.Name, use(kit.UseOf(r.Request)), p.Incarnation)
		l.place(key, revision)
	}
}

func (e *service) enter(ctx context.Context, r engine.Entering) (engine.Position, error) {
	w := e.wishOf(r)
	if r.Place != "" {
		if p, stands, err := e.reenter(ctx, w); err != nil || stands {
			return p, err
		}
	}
	if r.Kind == backend.KindPermits && !r.Wait {
		// Permits that others change at the same moment are counted again. Those of one client would disturb each other
		// most, so they take turns. So do readers of one client that find their keys taken.
		leave, err := e.turns.take(ctx, r.Name)
		if err != nil {
			return engine.Position{}, err
		}
		defer leave()
	}
	// A request that was sent before may have a key that the comparisons do not cover: it is looked for first. So it is
	// where the server allows fewer operations in a transaction than the first Enter of a fresh request has.
	if r.Fresh && !r.Again && r.Place == "" {
		p, err := e.first(ctx, w)
		if !isOneOf(err, rpctypes.ErrTooManyOps) {
			return p, err
		}
	}
	kvs, revision, err := e.queue(ctx, w.Name)
	if err != nil {
		return engine.Position{}, err
	}
	return e.write(ctx, w, kvs, revision)
}

// first is the first Enter of a fresh request.
func (e *service) first(ctx context.Context, w *wish) (engine.Position, error) {
	free := append(w.use.free(w.dir), vacant(w.over))
	second := []clientv3.Op{clientv3.OpGet(w.dir, clientv3.WithPrefix())}
	switch {
	case w.Wait:
		mixes := append(w.use.mixes(w.dir), vacant(w.second), vacant(w.over))
		second = []clientv3.Op{clientv3.OpTxn(mixes, []clientv3.Op{w.put(w.second), w.use.ahead(w.dir, 0)}, second)}
	case w.Kind == backend.KindShared:
		beside := append(slices.Clone(free), vacant(w.second))
		second = []clientv3.Op{clientv3.OpTxn(beside, []clientv3.Op{w.put(w.second)}, second)}
	}
	if w.Kind == backend.KindShared {
		free = append(free, vacant(w.key), vacant(w.second))
	}
	resp, err := e.do(ctx, w.Name, step{
		cmps: free, then: []clientv3.Op{w.put(w.key)}, otherwise: second, grants: true,
	})
	if err != nil {
		return engine.Position{}, err
	}
	revision := resp.Header.Revision
	if resp.Succeeded {
		return w.placed(w.key, revision, nil), nil
	}
	looks := resp.Responses
	if inner := looks[0].GetResponseTxn(); inner != nil {
		if looks = inner.Responses; inner.Succeeded && !w.Wait {
			return w.placed(w.second, revision, nil), nil
		}
		if inner.Succeeded {
			blockers, err := e.before(ctx, w, looks[1].GetResponseRange().Kvs, revision)
			return w.placed(w.second, revision, blockers), err
		}
	}
	return e.write(ctx, w, looks[0].GetResponseRange().Kvs, revision) // which finds out whether the attempt has ended
}

// errOver: a Leave has overtaken this Enter.
var errOver = fmt.Errorf("%w: the attempt has ended", backend.ErrUnavailable)

// write puts the request where it belongs in a queue that was read at a revision, if the queue has not changed since,
// and reads again otherwise.
func (e *service) write(
	ctx context.Context, w *wish, kvs []*mvccpb.KeyValue, revision int64,
) (p engine.Position, err error) {
	if w.Kind == backend.KindShared && !w.Wait {
		leave, err := e.turns.take(ctx, w.Name)
		if err != nil {
			return p, err
		}
		defer leave()
	}
	for range maxWrites {
		before := e.queueOf(kvs)
		var same clientv3.Cmp
		var op clientv3.Op
		var own *entry
		key := ""
		if at := slices.IndexFunc(before, w.owns); at >= 0 {
			own, before = &before[at], before[:at]
			key, same = own.key, asRead(own.key, own.modified)
			op = clientv3.OpPut(key, "", clientv3.WithIgnoreValue(), clientv3.WithLease(w.lease))
		} else {
			key = freeKey(w.dir+w.use.part(), e.stationOf(w.Attempt), kvs)
			same, op = unchanged(w.dir, revision), w.put(key)
		}
		blockers := w.use.blockers(before)
		if own == nil || !w.Wait {
			if err := w.use.mismatch(w.Name, before); err != nil {
				return engine.Position{Placed: own != nil}, err
			}
		}
		if len(blockers) > 0 && !w.Wait {
			p = engine.Position{Placed: own != nil, Holder: heldBy(w.Name, before)}
			return p, nil
		}
		// A key of an earlier attempt is written again: a delete that read it before must not end the hold.
		if own != nil && own.lease == w.lease && (w.Again || w.Place != "") {
			return w.stands(*own, blockers), nil
		}
		resp, err := e.do(ctx, w.Name, step{
			cmps: []clientv3.Cmp{same, vacant(w.over)}, then: []clientv3.Op{op}, otherwise: w.looks(), grants: true,
		})
		switch {
		case err != nil:
			return p, err
		case resp.Succeeded && own != nil:
			return w.stands(*own, blockers), nil
		case resp.Succeeded:
			return w.placed(key, resp.Header.Revision, blockers), nil
		case len(resp.Responses[1].GetResponseRange().Kvs) > 0:
			return p, errOver
		}
		kvs, revision = resp.Responses[0].GetResponseRange().Kvs, resp.Header.Revision
	}
	return p, errChanged
}

func (w *wish) owns(x entry) bool { return x.value.Request == w.RequestID }

// placed is the position of a key that was created at revision.
func (w *wish) placed(key string, revision int64, blockers []entry) engine.Position {
	return w.stands(entry{key: key, use: w.use, revision: revision, value: w.value}, blockers)
}

// stands is the position of a key behind blockers.
func (w *wish) stands(x entry, blockers []entry) engine.Position {
	p := engine.Position{Placed: true, Place: placeOf(x.key, x.revision)}
	if len(blockers) > 0 {
		p.Behind, p.Holder = w.use.behind(w.dir, blockers), heldBy(w.Name, blockers)
		return p
	}
	p.Held, p.Token, p.Nonce, p.Incarnation = true, x.token(), x.value.nonce(), x.incarnation()
	return p
}

// heldBy names the first of the queue. How long its lease lasts would cost another request.
func heldBy(name string, queue []entry) *backend.HeldError {
	return &backend.HeldError{Name: name, Holder: queue[0].value.Owner, HoldID: queue[0].value.HoldID}
}

// reenter reads the place of a waiter and what keeps it out. stands is false if the place is gone.
func (e *service) reenter(ctx context.Context, w *wish) (p engine.Position, stands bool, err error) {
	key, revision := keyAt(w.Place)
	resp, err := e.look(ctx, clientv3.OpGet(key), w.use.ahead(w.dir, revision))
	if err != nil {
		return p, false, err
	}
	own := e.queueOf(resp.Responses[0].GetResponseRange().Kvs)
	if len(own) != 1 || own[0].revision != revision || !w.owns(own[0]) {
		return p, false, nil
	}
	blockers, err := e.before(ctx, w, resp.Responses[1].GetResponseRange().Kvs, revision)
	if err != nil {
		return p, false, err
	}
	if own[0].lease != w.lease {
		same := []clientv3.Cmp{asRead(key, own[0].modified), vacant(w.over)}
		move := clientv3.OpPut(key, "", clientv3.WithIgnoreValue(), clientv3.WithLease(w.lease))
		moved, err := e.do(ctx, w.Name, step{cmps: same, then: []clientv3.Op{move}, grants: true})
		if err != nil || !moved.Succeeded {
			return p, false, err
		}
	}
	return w.stands(own[0], blockers), true, nil
}

// before returns what keeps a key out that was created at revision, from what use.ahead read. That asks for the nearest
// keys only: if a foreign one is among them, the whole queue is read.
func (e *service) before(
	ctx context.Context, w *wish, kvs []*mvccpb.KeyValue, revision int64,
) ([]entry, error) {
	queue := e.queueOf(kvs)
	if len(queue) < len(kvs) {
		all, _, err := e.queue(ctx, w.Name)
		if err != nil {
			return nil, err
		}
		queue = e.queueOf(all)
	}
	return w.use.blockers(slices.DeleteFunc(queue, func(x entry) bool { return x.revision >= revision })), nil
}

// EnterSet is engine.Sets's: one transaction over all names. Waiting in several queues at once would keep one name
// closed during the wait for another.
func (e *service) EnterSet(ctx context.Context, rs []engine.Entering) ([]engine.Position, error) {
	if err := e.admit(rs[0]); err != nil {
		return nil, err
	}
	all, err := e.enterSet(ctx, rs)
	for i, p := range all {
		e.note(rs[i], p, err)
	}
	return all, err
}

func (e *service) enterSet(ctx context.Context, rs []engine.Entering) ([]engine.Position, error) {
	if rs[0].Wait {
		return nil, fmt.Errorf("waiting for several names at once: %w", backend.ErrUnsupported)
	}
	wishes := make([]*wish, len(rs))
	cmps := []clientv3.Cmp{vacant(e.overKey(rs[0].Attempt))}
	var looks []clientv3.Op
	for i, r := range rs {
		w := e.wishOf(r)
		wishes[i] = w
		cmps = append(cmps, w.use.free(w.dir)...)
		if r.Kind == backend.KindShared {
			cmps = append(cmps, vacant(w.key))
		}
		looks = append(looks, clientv3.OpGet(w.dir, clientv3.WithPrefix()))
	}
	looks = append(looks, clientv3.OpGet(wishes[0].over))
	if len(cmps) > maxOps+1 {
		return nil, fmt.Errorf("%d names in one transaction: %w", len(rs), backend.ErrUnsupported)
	}
	puts := make([]clientv3.Op, len(rs))
	own := make([]*entry, len(rs))
	for i, w := range wishes {
		puts[i] = w.put(w.key)
	}
	for range maxWrites {
		resp, err := e.do(ctx, "", step{cmps: cmps, then: puts, otherwise: looks, grants: true})
		if err != nil {
			return nil, tooMany(len(rs), err)
		}
		if resp.Succeeded {
			all := make([]engine.Position, len(rs))
			for i, w := range wishes {
				if own[i] != nil {
					all[i] = w.stands(*own[i], nil)
				} else {
					all[i] = w.placed(w.key, resp.Header.Revision, nil)
				}
			}
			return all, nil
		}
		if len(resp.Responses[len(rs)].GetResponseRange().Kvs) > 0 {
			return nil, errOver
		}
		cmps = []clientv3.Cmp{vacant(wishes[0].over)}
		refused := engine.Position{}
		var mismatch error
		for i, w := range wishes {
			kvs := resp.Responses[i].GetResponseRange().Kvs
			before := e.queueOf(kvs)
			own[i] = nil
			if at := slices.IndexFunc(before, w.owns); at >= 0 {
				x := before[at]
				own[i], before, refused.Placed = &x, before[:at], true
				cmps = append(cmps, asRead(x.key, x.modified))
				puts[i] = clientv3.OpPut(x.key, "", clientv3.WithIgnoreValue(), clientv3.WithLease(w.lease))
			} else {
				w.key = freeKey(w.dir+w.use.part(), e.stationOf(w.Attempt), kvs)
				cmps = append(cmps, unchanged(w.dir, resp.Header.Revision))
				puts[i] = w.put(w.key)
			}
			if mismatch == nil {
				mismatch = w.use.mismatch(w.Name, before)
			}
			if refused.Holder == nil && len(w.use.blockers(before)) > 0 {
				refused.Holder = heldBy(w.Name, before)
			}
		}
		if mismatch != nil || refused.Holder != nil {
			return []engine.Position{refused}, mismatch
		}
	}
	return nil, errChanged
}
