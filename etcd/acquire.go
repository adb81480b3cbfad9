package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// An acquire, from the call to the grant. acquire validates, and repeats once until that succeeds, is answered for
// good, or is no longer wanted. Every repetition writes the same keys. So there is one key for each request, however
// many repetitions are carried out, and its create revision, which is the token, comes from the first. once gets a
// session and then goes one of three ways: try for a name without waiting, waitFor with waiting (queue.go), tryAll for
// several (multi.go). All three write through txn, and end in granted.
//
// The common case is one transaction: "nothing that keeps me out stands there" as the comparison, the key as what is
// written. What a comparison of ranges cannot express takes a second transaction: how many permits are left, what is a
// foreign key, whether the request itself stands there already. insist does that.
//
// What an error says of what was left behind is the hard part of the contract (ErrUnavailable, ErrUnknown, or the bare
// end of the context). The fields sent, unknown, failed and left of an attempt keep what is needed for it, and giveUp
// decides.

// tries is how often an attempt without Wait is made when its answer got lost. The client sends each to the next
// endpoint, so that three reach every member of a usual cluster. With Wait there is no bound but ctx.
const tries = 3

// Acquire takes a lock, with a token that is greater than all that the name ever had. Without Wait it makes one
// attempt, which is repeated twice if the answer gets lost. With Wait the request stands in the name's queue, and etcd
// tells it when its turn comes; when ctx ends the place is given up, in the background. The same RequestID again gets
// the same hold, as long as that stands. A TTL is in whole seconds from 1 s to 30 days; Grant.TTL says what the server
// made of it.
//
// Errors wrap backend.ErrHeld; ErrLimitMismatch; ErrInvalidName, ErrInvalidTTL, ErrInvalidOption or ErrUnsupported for
// what cannot be asked; ErrUnavailable (nothing was sent); ErrUnknown (what the request may have taken could not be
// given back); ErrHistoryLost (another cluster answers); ErrClosed; or ctx's error.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	grants, err := d.acquire(ctx, []backend.Request{r})
	if err != nil {
		return backend.Grant{}, d.callError("acquire", r.Name, err)
	}
	return grants[0], nil
}

// acquire takes one name, or all of a set. When it returns, no call is left that could write the wishes' keys;
// transactions may still be under way, and landing accounts for them.
func (d *Driver) acquire(ctx context.Context, rs []backend.Request) ([]backend.Grant, error) {
	if err := kit.ValidateSet(d.Describe(), rs); err != nil {
		return nil, err
	}
	if len(rs) > 1 {
		if err := inOneStep(rs); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	ctx, leave, err := d.beginBound(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	if err := d.history.err(); err != nil {
		return nil, err
	}

	// What is to be removed is counted at its place before the call ends, so that the place stays this request's
	// without a gap.
	a := d.attempt(rs)
	defer func() {
		if a.left {
			d.remove(a.wishes)
		}
		for _, w := range a.wishes {
			d.endCall(w.key)
		}
	}()
	for n := 1; ; n++ {
		grants, err := a.once(ctx)
		if err == nil {
			return grants, nil
		}
		if unsent(err) {
			a.failed = err
		}
		if decided(err) || !transient(err) || !a.wait && n == tries || ctx.Err() != nil {
			return nil, a.giveUp(ctx, err)
		}
		if err := kit.Sleep(ctx, kit.RetryPause(a.ttl)); err != nil {
			return nil, a.giveUp(ctx, err)
		}
	}
}

// attempt is one Acquire or AcquireAll, over all repetitions. It belongs to the goroutine of its caller.
type attempt struct {
	d      *Driver
	wishes []wish // one, or those of a set
	wait   bool
	ttl    time.Duration
	// A transaction was answered, or left and was not: the keys may stand.
	sent bool
	// A request left and was not answered. An answer to a later one ends that: it tells what the keys are now, and what
	// comes after it is removed by sweep.
	unknown bool
	// The session of the last repetition, whose loop is told when a request goes unanswered.
	session *session
	// Somebody else was in the way: Grant.Queued.
	queued bool
	// The last failure after which nothing had been done, because no connection stood. It is what the caller is told
	// when the context ends: the end alone would not say what is wrong.
	failed error
	// giveUp has found that places in the queue may be left; acquire has them removed.
	left bool
}

// wish is what is asked for one name: the request, and the key that it is to have. Its key changes when another
// driver's request turns out to have that key, see resettle.
type wish struct {
	r        backend.Request
	claim    claim
	dir, key string
	// How often somebody else's key stood there: the next choice is made among more.
	taken int
	// The request may have a key that this driver does not know of: see seek.
	unsought bool
	// The create revision of the key, once it is granted: the token.
	revision int64
}

// attempt prepares an acquire: every wish gets its place, and is a call of it until endCall. A request that the core
// calls fresh was never sent before; any other may have a key that another driver wrote, which seek looks for.
func (d *Driver) attempt(rs []backend.Request) *attempt {
	a := &attempt{d: d, wait: rs[0].Wait, ttl: rs[0].TTL, wishes: make([]wish, len(rs))}
	for i, r := range rs {
		w := &a.wishes[i]
		*w = wish{r: r, claim: claim(kit.UseOf(r)), dir: d.dir(r.Name)}
		known := d.settle(w)
		w.unsought = !r.Fresh && !known
	}
	return a
}

// decided reports whether err is a final answer of etcd, after which the request has no key: repeating it would get the
// same answer, and nothing needs to be removed.
func decided(err error) bool {
	return errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLimitMismatch) ||
		errors.Is(err, backend.ErrUnsupported)
}

// giveUp adds to err what is known about what the attempts left.
//
//   - A final answer, or the end of the driver, left nothing: Close revokes the lease, and the key goes with it.
//   - A request that went unanswered may have left a key, or may yet. That is ErrUnknown, and the core decides: the
//     same request again, or Release. It is not removed here, because a removal that finds nothing proves nothing.
//   - A place in the queue that etcd has confirmed is removed in the background, and the error stays the context's.
//   - If the context ended while no server could be reached, that is ErrUnavailable, with both errors in the chain.
func (a *attempt) giveUp(ctx context.Context, err error) error {
	// Close revokes the lease, and the key goes with it.
	if cause := context.Cause(ctx); errors.Is(cause, backend.ErrClosed) {
		err = cause
	}
	if decided(err) {
		return err
	}
	// What this request has written may stand, or stand again from a backup: it is removed, although nothing can be
	// acquired any more.
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

// once makes an attempt on a session, of which the caller of a successful one is a user afterwards, once for each name.
func (a *attempt) once(ctx context.Context) ([]backend.Grant, error) {
	// Without a session nothing can be written, and a lease alone closes no name: its failure is plain unavailability.
	// But the end of the context in it counts as unknown, unless an earlier failure said that no connection stood.
	s, err := a.d.sessionFor(ctx, a.ttl)
	if err != nil {
		a.d.trouble()
		switch {
		case errors.Is(err, backend.ErrHistoryLost):
		case !kit.IsContext(err):
			err = fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
			a.failed = err
		case a.failed == nil:
			a.unknown = true
		}
		return nil, err
	}
	a.session = s
	err = a.seek(ctx)
	switch w := &a.wishes[0]; {
	case err != nil:
	case len(a.wishes) > 1:
		err = a.tryAll(ctx, s)
	case a.wait:
		w.revision, err = a.waitFor(ctx, s, w)
	default:
		w.revision, err = a.try(ctx, s, w)
	}
	if err == nil {
		// The validity rests on the lease: a proof that is old would give a short one.
		err = s.prove(ctx, s.ttl/3)
	}
	if err == nil && !s.Add(len(a.wishes)-1) {
		err = errSessionLost
	}
	if err != nil {
		if isOneOf(err, rpctypes.ErrLeaseNotFound) {
			err = s.missing(ctx)
		}
		s.Leave(1)
		return nil, err
	}
	return a.granted(s)
}

// seek looks for keys of requests that were sent before, by another driver perhaps, and takes them for the wishes' own.
// Without it such a request would stand in the queue twice, and wait for itself. It reads each queue once, and not
// again in repetitions: from then on only this driver writes for the request.
func (a *attempt) seek(ctx context.Context) error {
	for i := range a.wishes {
		w := &a.wishes[i]
		if !w.unsought {
			continue
		}
		queue, err := a.read(ctx, w)
		if err != nil {
			a.note(err)
			return err
		}
		w.unsought = false
		if at := indexOfRequest(queue, w.r.RequestID); at >= 0 {
			a.d.settleAt(w, queue[at].key)
		}
	}
	return nil
}

// granted notes the holds and returns their grants. The session may have ended since it was proved, before it knew of
// these holds: nobody has been told then, so the attempt fails instead.
func (a *attempt) granted(s *session) ([]backend.Grant, error) {
	grants := make([]backend.Grant, len(a.wishes))
	for i := range a.wishes {
		w := &a.wishes[i]
		grants[i] = grantOf(w, s)
		h := &hold{session: s, revision: w.revision, lost: w.r.Lost}
		h.promise(grants[i].SentAt.Add(s.ttl))
		a.d.addHold(w.key, w.r.RequestID, h)
		grants[i].Queued = a.queued
	}
	// The session may have ended before addHold, and has told nobody of these holds then.
	if s.Ended() {
		for i, g := range grants {
			a.d.dropHold(a.wishes[i].key, a.d.hold(a.wishes[i].key, g))
		}
		return nil, errSessionLost
	}
	return grants, nil
}

// txn commits then if every comparison holds, and otherwise the other operations. From here on the keys may exist.
//
// The end of ctx ends the wait for the answer and not the request. Cancelled on its way, a request could still be
// carried out, behind the back of a Release that follows; so it goes on as a flight, and that Release waits for it. A
// request that has not yet departed is withdrawn, and then nothing was sent.
func (a *attempt) txn(
	ctx context.Context, cmps []clientv3.Cmp, then, otherwise []clientv3.Op,
) (*clientv3.TxnResponse, error) {
	// A flight of its own, which ends when it is answered or attemptTime has passed, whatever becomes of this call.
	f, err := a.d.launch(ctx, a.session, a.wishes, cmps, then, otherwise)
	if err != nil {
		return nil, err
	}
	var resp *clientv3.TxnResponse
	select {
	case <-f.done:
		resp, err = f.resp, f.err
	case <-ctx.Done():
		err = ctx.Err()
		if a.d.withdraw(f) {
			return nil, err
		}
	}
	if err == nil || !unsent(err) {
		a.sent = true
	}
	if err == nil {
		// Whatever an earlier request did, this one wrote the same keys, or read what stands there.
		a.unknown = false
		return resp, nil
	}
	a.note(err)
	return resp, err
}

// note remembers that a request which changes something was not answered: the outcome of the attempt is unknown from
// now on, and the session looks for what the request may yet write. Refusals leave nothing, and neither do requests
// that never left.
func (a *attempt) note(err error) {
	a.d.trouble()
	if !unsent(err) && !refused(err) && !errors.Is(err, errSessionLost) && !errors.Is(err, errOutgrown) {
		a.unknown = true
		if a.session != nil {
			a.session.doubt()
		}
	}
}

// try takes the name if nothing keeps the claim out, and returns the create revision of the key. It reads the queue in
// the same transaction where the comparison fails, so that "held" costs no second round trip. If an earlier attempt of
// this request waits in the queue, it is taken out again: a try has no place there.
func (a *attempt) try(ctx context.Context, s *session, w *wish) (int64, error) {
	// One transaction takes the name or reads who has it, both at one revision.
	look := clientv3.OpGet(w.dir, clientv3.WithPrefix())
	resp, err := a.txn(ctx, w.claim.free(w.dir, w.key), []clientv3.Op{w.put(s.id)}, []clientv3.Op{look})
	if err != nil {
		return 0, err
	}
	if resp.Succeeded {
		return resp.Header.Revision, nil
	}
	queue, at, err := a.insist(ctx, s, w, resp, func(queue []entry) error {
		if len(w.claim.blockers(queue)) > 0 {
			return heldError(w.r.Name, queue)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	// An earlier attempt of this request queued, with Wait: a try has no place there.
	if len(w.claim.blockers(queue[:at])) > 0 {
		return 0, cmp.Or(a.d.clear(ctx, w.key, anything), heldError(w.r.Name, queue))
	}
	return queue[at].revision, nil
}

// insist returns the queue with our key in it, on our lease, and the key's place. resp is the answer to the first
// request, whose comparisons may have failed for nothing: they know neither how many permits are left nor foreign keys,
// nor that the key stands that the request has. insist writes the key as soon as the queue, as it was read, says
// nothing against it and has not grown since. refuse says what is against it, besides a kind that does not mix.
//
// Each turn of the loop is one transaction, and another one is needed only if somebody came at the same moment, so that
// there is progress among all who insist.
func (a *attempt) insist(
	ctx context.Context, s *session, w *wish, resp *clientv3.TxnResponse, refuse func(queue []entry) error,
) (queue []entry, at int, err error) {
	look := clientv3.OpGet(w.dir, clientv3.WithPrefix())
	for {
		kvs, wrote := lastRead(resp)
		queue = a.d.entriesOf(kvs)
		if at = indexOfRequest(queue, w.r.RequestID); at >= 0 {
			a.d.settleAt(w, queue[at].key)
			if wrote && queue[at].lease == s.id {
				return queue, at, nil
			}
			// It is written again also where it stands on our lease: a deletion that is on its way must not find it as
			// it was read.
			stands := []clientv3.Cmp{asRead(w.key, queue[at].modified)}
			resp, err = a.txn(ctx, stands, []clientv3.Op{w.put(s.id), look}, []clientv3.Op{look})
			if err != nil {
				return nil, 0, err
			}
			continue
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
		// kvs is the whole directory, so what is not among it is vacant as long as nothing is created, which unchanged
		// compares.
		for a.taken(w, kvs) {
			a.d.resettle(w)
		}
		// Nothing was created since the queue was read, so what it says still holds: what went meanwhile only made
		// room.
		since := []clientv3.Cmp{unchanged(w.dir, resp.Header.Revision)}
		resp, err = a.txn(ctx, since, []clientv3.Op{w.put(s.id), look}, []clientv3.Op{look})
		if err != nil {
			return nil, 0, err
		}
	}
}

// lastRead returns what a transaction has read at its end, and whether it wrote. The read is the last operation of
// either branch, of the inner transaction where there is one.
func lastRead(resp *clientv3.TxnResponse) (kvs []*mvccpb.KeyValue, wrote bool) {
	last := resp.Responses[len(resp.Responses)-1]
	if inner := last.GetResponseTxn(); inner != nil {
		kvs, _ = lastRead((*clientv3.TxnResponse)(inner))
		return kvs, inner.Succeeded
	}
	return last.GetResponseRange().Kvs, resp.Succeeded
}

// taken reports whether somebody else's key stands where ours would: another driver has chosen the same station, or the
// key is foreign. It is asked of what was read, never of etcd again.
func (a *attempt) taken(w *wish, kvs []*mvccpb.KeyValue) bool {
	return slices.ContainsFunc(kvs, func(kv *mvccpb.KeyValue) bool {
		e, _ := a.d.entryOf(kv)
		return e.key == w.key && e.value.Request != w.r.RequestID
	})
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

// heldError tells who stands first in the queue, which is one of the holders. How long its lease lasts would cost
// another request: see Look.
func heldError(name string, queue []entry) error {
	return &backend.HeldError{Name: name, Holder: queue[0].value.Owner, HoldID: queue[0].value.HoldID}
}
