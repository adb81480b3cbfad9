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
	"github.com/fencelock/fencelock/fencing"
)

// An acquire, from the call to the grant. acquire validates, and repeats once until it succeeds, gets a final answer,
// or is no longer wanted. Every repetition writes the same keys. So each request has one key, however many
// repetitions are carried out, and its create revision, which is the token, comes from the first. once gets a session
// and then goes one of two ways: waitFor with waiting (queue.go), take without, for one name or several. Both write
// through txn, and end in granted.
//
// The common case is one transaction: it compares that no key stands in the way, and writes the request's key. A
// comparison of ranges cannot express everything: how many permits are left, which keys are foreign, whether the
// request has a key already. These cases take a second transaction, whose comparison sinceRead derives from the
// queue.
//
// The class of an error says whether the attempt may have left a key (ErrUnavailable, ErrUnknown, or the bare end of
// the context). The fields sent, unknown, failed and left of an attempt record what happened, and giveUp decides.

// tries bounds an attempt without Wait whose answers get lost. The client sends each to the next
// endpoint, so that three reach every member of a usual cluster. With Wait there is no bound but ctx.
const tries = 3

// Acquire acquires a lock. Its token is greater than all earlier tokens of the name. Without Wait it makes one
// attempt, of up to three tries if answers get lost. With Wait the request stands in the name's queue, and a watch
// notifies it of its turn; when ctx ends, the driver removes the place in the background. A repeated RequestID gets
// the same hold while that stands. A TTL is in whole seconds from 1 s to 30 days; Grant.TTL is the TTL that the
// server granted.
//
// Errors wrap backend.ErrHeld; ErrLimitMismatch; ErrInvalidName, ErrInvalidTTL, ErrInvalidOption or ErrUnsupported
// for an invalid request; ErrUnavailable (no request was sent); ErrUnknown (the request may have left a hold that could
// not be released); ErrHistoryLost (another cluster answers); ErrClosed; or ctx's error.
func (d *Driver) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	grants, err := d.AcquireAll(ctx, []backend.Request{r})
	if err != nil {
		return backend.Grant{}, err
	}
	return grants[0], nil
}

// acquire acquires one name, or all of a set. When it returns, no call is left that could write the wishes' keys;
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

	// Places to remove are counted before the call ends, so that they stay this request's without a gap.
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

// attempt is one Acquire or AcquireAll, over all its tries. It belongs to the goroutine of its caller.
type attempt struct {
	d      *Driver
	wishes []wish // one, or the members of a set
	wait   bool
	ttl    time.Duration
	// A transaction was answered, or sent without an answer: the keys may stand.
	sent bool
	// A request was sent and not answered. The answer to a later request ends that: it shows the keys as they are,
	// and sweep removes a later write.
	unknown bool
	// The session of the last try. Its loop is notified when a request goes unanswered.
	session *session
	// Somebody else was in the way: Grant.Queued.
	queued bool
	// The last failure without a change, because no connection stood. The caller gets it when the context ends:
	// the context's error alone would not say the cause.
	failed error
	// giveUp has found that places in the queue may be left; acquire removes them.
	left bool
}

// wish is the request for one name, and the key that it is to have. The key changes when another driver's request
// turns out to have it, see resettle.
type wish struct {
	r        backend.Request
	use      use
	dir, key string
	// taken counts the encounters with somebody else's key: each widens the next choice.
	taken int
	// The request may have a key that this driver does not know of: see seek.
	unsought bool
	// The create revision of the key: the token, once it is granted. Until then 0, unless the key was found standing.
	revision int64
	// The Grant.Nonce that the next put writes: the nonce of the key that was found standing, or a new one.
	nonce fencing.Nonce
	// The value.Since that the next put writes, likewise.
	since int64
}

// attempt prepares an acquire: every wish gets its place, and is a call of it until endCall. A fresh request was
// never sent before; any other may have a key that another driver wrote, which seek looks for.
func (d *Driver) attempt(rs []backend.Request) *attempt {
	a := &attempt{d: d, wait: rs[0].Wait, ttl: rs[0].TTL, wishes: make([]wish, len(rs))}
	for i, r := range rs {
		w := &a.wishes[i]
		*w = wish{r: r, use: use(kit.UseOf(r)), dir: d.dir(r.Name)}
		known := d.settle(w)
		w.unsought = !r.Fresh && !known
	}
	return a
}

// decided reports whether err is a final answer of etcd, after which the request has no key: a repetition would get
// the same answer, and there is no key to remove.
func decided(err error) bool {
	return errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLimitMismatch) ||
		errors.Is(err, backend.ErrUnsupported)
}

// giveUp adds to err the attempt's knowledge of leftover keys.
//
//   - After a final answer, or the end of the driver, no key is left: Close revokes the lease, and the key goes with
//     it.
//   - A request that went unanswered may have left a key, or may yet. That is ErrUnknown, and the core decides: it
//     repeats the request, or calls Release. The driver does not remove the key here: a removal that finds no key
//     is no proof.
//   - A place in the queue that etcd has confirmed is removed in the background, and the error stays the context's.
//   - If the context ended while no server was reachable, that is ErrUnavailable, with both errors in the chain.
func (a *attempt) giveUp(ctx context.Context, err error) error {
	// Close revokes the lease, and the key goes with it.
	if cause := context.Cause(ctx); errors.Is(cause, backend.ErrClosed) {
		err = cause
	}
	if decided(err) {
		return err
	}
	// A key of this request may stand, or stand again from a backup: it is removed, although the driver acquires no
	// locks any more.
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

// once makes one try on a session. After a success the caller is a user of the session, once for each name.
func (a *attempt) once(ctx context.Context) ([]backend.Grant, error) {
	// Without a session the driver cannot write, and a lease alone blocks no name: the failure is plain
	// unavailability. But the end of the context counts as unknown, unless an earlier failure said that no connection
	// stood.
	s, err := a.d.sessionFor(ctx, a.ttl)
	if err != nil {
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
	case a.wait:
		w.revision, err = a.waitFor(ctx, s, w)
	default:
		err = a.take(ctx, s)
	}
	if err == nil {
		// The validity rests on the lease: an old proof would give a short one.
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

// seek looks for keys of requests that were sent before, by another driver perhaps, and assigns them to the wishes.
// Without it such a request would stand in the queue twice, and wait for itself. It reads each queue once: from then
// on only this driver writes for the request.
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

// granted notes the holds and returns their grants. If the session ended after it was proved, but before it knew of
// these holds, nobody was notified, so the try fails instead.
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
	// The session may have ended before addHold, and has notified nobody of these holds then.
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
// The end of ctx ends the wait for the answer, not the request. The server could still carry out a cancelled request,
// concurrently with a Release that follows; so it goes on as a flight, and that Release waits for it. A request that
// has not yet departed is withdrawn unsent.
func (a *attempt) txn(
	ctx context.Context, cmps []clientv3.Cmp, then, otherwise []clientv3.Op,
) (*clientv3.TxnResponse, error) {
	// The flight ends when it is answered or callTime has passed, whatever becomes of this call.
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
		// Whatever an earlier request did, this one wrote the same keys, or read them.
		a.unknown = false
		return resp, nil
	}
	a.note(err)
	return resp, err
}

// note remembers that a request which changes keys was not answered: from now on the outcome of the attempt is
// unknown, and the session looks for late writes. Refused and unsent requests leave no keys.
func (a *attempt) note(err error) {
	if !unsent(err) && !refused(err) && !errors.Is(err, errSessionLost) && !errors.Is(err, errOutgrown) {
		a.unknown = true
		if a.session != nil {
			a.session.doubt()
		}
	}
}

// take writes the keys of all wishes in one transaction, and notes their create revisions. It reads the queues in the
// same transaction where the comparison fails, so that "held" costs no second round trip. It repeats only if somebody
// came at the same moment or a comparison failed without cause, so that there is progress among all who try.
func (a *attempt) take(ctx context.Context, s *session) error {
	var since []clientv3.Cmp
	var looks []clientv3.Op
	for i := range a.wishes {
		w := &a.wishes[i]
		w.vacate()
		since = append(since, w.use.free(w.dir, w.key)...)
		looks = append(looks, clientv3.OpGet(w.dir, clientv3.WithPrefix()))
	}
	for {
		// Every key is written, even a standing one, so that all are on this lease.
		puts := make([]clientv3.Op, len(a.wishes))
		for i := range puts {
			puts[i] = a.wishes[i].put(s.id)
		}
		resp, err := a.txn(ctx, since, puts, looks)
		if len(puts) > 1 && isOneOf(err, rpctypes.ErrTooManyOps, rpctypes.ErrRequestTooLarge) {
			// The core goes on with one name after the other.
			return fmt.Errorf("%d names in one transaction: %w: %w", len(puts), backend.ErrUnsupported, err)
		}
		if err != nil {
			return err
		}
		if resp.Succeeded {
			for i := range a.wishes {
				a.wishes[i].revision = cmp.Or(a.wishes[i].revision, resp.Header.Revision)
			}
			return nil
		}
		if since, err = a.judge(ctx, resp); err != nil {
			return err
		}
	}
}

// judge decides from the queues of all names, as resp has them, under which comparisons the wishes can be written. If
// one name is refused, it removes all keys of the wishes, even those of an earlier attempt or try of the same
// requests: a place in the queue, for example, if the earlier attempt waited.
func (a *attempt) judge(ctx context.Context, resp *clientv3.TxnResponse) (since []clientv3.Cmp, refusal error) {
	var stand []string
	for i := range a.wishes {
		w := &a.wishes[i]
		same, before := a.sinceRead(w, resp.Responses[i].GetResponseRange().Kvs, resp.Header.Revision)
		since = append(since, same)
		if w.revision != 0 {
			stand = append(stand, w.key)
		}
		if refusal == nil {
			refusal = w.use.mismatch(w.r.Name, before)
		}
		if refusal == nil && len(w.use.blockers(before)) > 0 {
			refusal = heldError(w.r.Name, before)
		}
	}
	if refusal == nil {
		return since, nil
	}
	for _, key := range stand {
		if err := a.d.clear(ctx, key, anything); err != nil {
			return nil, err
		}
	}
	return nil, refusal
}

// sinceRead takes a directory that was read whole at a revision. It returns the entries before a wish's key, and the
// comparison under which the transaction may write that key and no other entry comes before it. A key that the
// request already has stays: it is written as it was read, and wish.revision is its create revision. It is written
// even if it stands on our lease, so that a delayed deletion does not match its old mod revision. A new key comes
// last, if no key is created meanwhile; deletions only make room. If somebody else's key stands at that place, the
// wish gets another place.
func (a *attempt) sinceRead(
	w *wish, kvs []*mvccpb.KeyValue, revision int64,
) (same clientv3.Cmp, before []entry) {
	before = a.d.entriesOf(kvs)
	if at := indexOfRequest(before, w.r.RequestID); at >= 0 {
		a.d.settleAt(w, before[at].key)
		w.revision, w.nonce, w.since = before[at].revision, before[at].value.nonce(), before[at].value.Since
		return asRead(w.key, before[at].modified), before[:at]
	}
	for a.taken(w, kvs) {
		a.d.resettle(w)
	}
	w.vacate()
	return unchanged(w.dir, revision), before
}

// vacate notes that the wish has no key that is known to stand: the next put makes a new hold.
func (w *wish) vacate() { w.revision, w.nonce, w.since = 0, fencing.NewNonce(), time.Now().UnixMilli() }

// taken reports whether somebody else's key stands at our place: another driver has chosen the same station, or the
// key is foreign. It looks only at kvs and does no I/O.
func (a *attempt) taken(w *wish, kvs []*mvccpb.KeyValue) bool {
	return slices.ContainsFunc(kvs, func(kv *mvccpb.KeyValue) bool {
		e, _ := a.d.entryOf(kv)
		return e.key == w.key && e.value.Request != w.r.RequestID
	})
}

// read returns the present queue, confirmed by a majority of the cluster.
func (a *attempt) read(ctx context.Context, w *wish) ([]entry, error) {
	ctx, cancel := a.d.bounded(ctx)
	defer cancel()
	resp, err := a.d.get(ctx, w.dir, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	return a.d.entriesOf(resp.Kvs), nil
}

// heldError names the first holder in the queue. The remaining time of its lease would cost another request: see
// Look.
func heldError(name string, queue []entry) error {
	return &backend.HeldError{Name: name, Holder: queue[0].value.Owner, HoldID: queue[0].value.HoldID}
}
