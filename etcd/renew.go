package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// Renewals. The lease costs requests, not the lock: one keepalive serves all holds on a session, and one request
// lists the keys on it (keys). So a renewal of a thousand locks takes about four messages, and of ten thousand as
// many (bench hold1k). Only keys that are missing from this list are read themselves (check).
//
// Two things make a hold move to another lease (move): it is renewed for another TTL than its session's, or the raft
// term has changed and the session is outgrown. A move reads the keys, writes them on the other lease as they were
// read, up to 100 in a transaction, and keeps create revisions, hence tokens and places. It writes no value, so a grant
// suffices, and a driver can renew the hold of another one, as Description.KeepsHolds promises.
//
// Grants are known by their numbers throughout, and parts of the call run side by side on disjoint sets of numbers. So
// the results need no mutex.

// Renew prolongs holds to a full TTL, and answers each grant in order. It is safe for concurrent use with every other
// call, and with another Renew of the same grants.
//
// One keepalive proves the lease of all grants with one TTL, if the session's own loop has not done so within the last
// sixth of the TTL. A lease that lives does not prove that a key does, so one more request asks for the keys on it.
// Keys that the answer does not name are read individually before they count as lost.
//
// A grant whose TTL differs from its session's moves to the session of that TTL: to a longer one immediately, to a
// shorter one when that does not shorten an earlier promise. A grant whose session was outgrown moves to its
// successor. Renewal.TTL is the granted TTL, counted from Renewal.SentAt; it is never below the requested one.
//
// Renewal.Err wraps backend.ErrNotHeld, with the reason, if the hold is over. After any other error the
// hold may live or not: ErrUnavailable, ErrUnknown, ErrClosed, or ctx's error.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	r := &renewing{d: d, grants: grants, keys: make([]string, len(grants)), out: make([]backend.Renewal, len(grants))}
	ctx, leave, err := d.beginBound(ctx)
	if err == nil {
		defer leave()
		if d.history.err() == nil {
			r.all(ctx)
		}
	}
	lost := d.history.err() != nil
	for i, g := range grants {
		switch {
		case err != nil:
			r.out[i].Err = err
		case lost:
			r.out[i] = backend.Renewal{Err: &backend.NotHeldError{Name: g.Name, Reason: backend.ReasonHistoryLost}}
		}
		r.out[i].Err = d.callError("renew", g.Name, r.out[i].Err)
	}
	return r.out
}

// renewing is one call of Renew. Its parts run concurrently, each for different grants, which they know by their
// numbers: so keys, which is complete before they begin, and out need no mutex.
type renewing struct {
	d      *Driver
	grants []backend.Grant
	keys   []string // on which they stand
	out    []backend.Renewal
}

// all renews every grant: holds that can stay by session, the others by the TTL of the session that they move to.
// Afterwards it records the promises, so that a later, shorter renewal does not shorten them.
func (r *renewing) all(ctx context.Context) {
	// An unknown grant moves, too: it is another driver's, or its session here has ended, and only its key shows
	// whether it still stands.
	bySession, byTTL := map[*session][]int{}, map[time.Duration][]int{}
	var work sync.WaitGroup
	holds := make([]*hold, len(r.grants))
	for i, g := range r.grants {
		r.keys[i] = r.d.Key(g)
		h := r.hold(i)
		holds[i] = h
		switch {
		case h == nil, !h.stays(g.TTL):
			byTTL[g.TTL] = append(byTTL[g.TTL], i)
		case h.session.isOutgrown():
			// Its successor is the session of the requested TTL, whatever the grant says.
			ttl := h.session.asked
			byTTL[ttl] = append(byTTL[ttl], i)
		default:
			bySession[h.session] = append(bySession[h.session], i)
		}
	}
	for ttl, members := range byTTL {
		work.Go(func() { r.move(ctx, ttl, members) })
	}
	for s, members := range bySession {
		work.Go(func() { r.on(ctx, s, members) })
	}
	work.Wait()
	for i, g := range r.grants {
		if r.out[i].Err != nil {
			continue
		}
		// A hold that was renewed for less, and could not move yet, stands on a lease with more. Its holder is promised
		// only the requested TTL, so that the hold can move once the earlier promise has passed.
		if holds[i] != nil && g.TTL < r.out[i].TTL {
			r.out[i].TTL = g.TTL
		}
		if h := r.hold(i); h != nil {
			h.promise(r.out[i].SentAt.Add(r.out[i].TTL))
		}
	}
}

// hold returns the driver's hold of a grant, or nil if it has no hold.
func (r *renewing) hold(i int) *hold { return r.d.hold(r.keys[i], r.grants[i]) }

// fail records an error for grants that could not be renewed; their holds may live or not.
func (r *renewing) fail(members []int, err error) {
	for _, i := range members {
		r.out[i].Err = err
	}
}

// gone notes that the key of a grant is gone, or stands for another hold. The driver forgets its hold, and the core
// gets the reason.
func (r *renewing) gone(ctx context.Context, i int) {
	h := r.hold(i)
	r.out[i].Err = r.d.notHeld(ctx, r.grants[i], h)
	r.d.dropHold(r.keys[i], h)
}

// stays reports whether a hold that is renewed for ttl stays on its lease. A renewal never shortens a promise: for a
// shorter TTL the hold moves only when the shorter lease lasts until the end of the promise. A fresh proof of the
// shorter lease is at most a third of its TTL old (provedSession), hence two thirds from now on are certain.
func (h *hold) stays(ttl time.Duration) bool {
	s := h.session
	if ttl == s.ttl || ttl.Truncate(time.Second) == s.asked {
		return true
	}
	atLeast := s.d.clock.Now().Add(ttl - ttl/3) // see provedSession
	return ttl < s.ttl && int64(atLeast) < h.until.Load()
}

// promise notes that somebody may rely on a hold until then. It only rises, whatever the order of concurrent
// renewals.
func (h *hold) promise(until backend.Instant) {
	for {
		before := h.until.Load()
		if int64(until) <= before || h.until.CompareAndSwap(before, int64(until)) {
			return
		}
	}
}

// opsPerTxn stays below the 128 operations that a server allows in a transaction by default. For a server that allows
// fewer (--max-txn-ops) see inParts.
const opsPerTxn = 100

// on renews the grants whose numbers are in members, all on one session. The instant of the proof is read before the
// keys are asked for, so that it is not later than they are.
func (r *renewing) on(ctx context.Context, s *session, members []int) {
	err := s.prove(ctx, s.ttl/6)
	if errors.Is(err, errOutgrown) {
		r.move(ctx, s.asked, members)
		return
	}
	sentAt := s.provedAt()
	var attached map[string]bool
	if err == nil {
		attached, err = s.keys(ctx)
	}
	// keys may omit keys that stand. So the keys that it names are renewed, and each other key is read before it is
	// reported as lost.
	var missing []int
	for _, i := range members {
		switch {
		case errors.Is(err, errSessionLost):
			r.out[i].Err = &backend.NotHeldError{Name: r.grants[i].Name, Reason: backend.ReasonSessionExpired}
		case err != nil:
			r.out[i].Err = err
		case attached[r.keys[i]]:
			r.out[i] = backend.Renewal{SentAt: sentAt, TTL: s.ttl}
		default:
			missing = append(missing, i)
		}
	}
	_ = inParts(missing, opsPerTxn, func(part []int) error { return r.check(ctx, s, sentAt, part) })
}

// inParts calls do with at most that many of the members at a time, concurrently, until all have had their turn, and
// returns the remaining errors. If a part fails as a whole it had no effect, and each half is tried: where the server
// allows fewer operations in a transaction, and where one of several keys has changed, which does not affect the
// others.
func inParts[T any](members []T, most int, do func(part []T) error) error {
	var work sync.WaitGroup
	parts := slices.Collect(slices.Chunk(members, most))
	errs := make([]error, len(parts))
	for n, part := range parts {
		work.Go(func() {
			errs[n] = do(part)
			if len(part) > 1 && (errors.Is(errs[n], errChanged) || isOneOf(errs[n], rpctypes.ErrTooManyOps)) {
				errs[n] = inParts(part, (len(part)+1)/2, do)
			}
		})
	}
	work.Wait()
	return errors.Join(errs...)
}

// keys returns the keys that stand on the lease, with the namespace of the client if it has one. It is answered by a
// leader that may have been overtaken, so a key that is missing here may stand: the caller reads it. If this leader
// does not know the lease, the lease is proved once more: if that succeeds, an overtaken leader gave the answer.
func (s *session) keys(ctx context.Context) (map[string]bool, error) {
	resp, err := s.d.client.TimeToLive(clientv3.WithRequireLeader(ctx), s.id, clientv3.WithAttachedKeys())
	if err != nil {
		return nil, err
	}
	if err := s.d.hear(resp.ResponseHeader, nil); err != nil {
		return nil, err
	}
	if resp.TTL < 0 {
		if err := s.prove(ctx, s.ttl/20); err != nil {
			return nil, err
		}
		return nil, errOvertaken
	}
	keys := make(map[string]bool, len(resp.Keys))
	for _, key := range resp.Keys {
		keys[string(key)] = true
	}
	return keys, nil
}

// check reads the keys of the grants whose numbers are in part, and renews the grants whose keys stand on the
// session's lease. It also serves clients whose KV has a namespace and whose Lease has not: keys then names all keys
// differently.
func (r *renewing) check(ctx context.Context, s *session, sentAt backend.Instant, part []int) error {
	return r.read(ctx, part, func(i int, e entry, found bool) {
		if found && e.revision == incarnation(r.grants[i]) && e.lease == s.id {
			r.out[i] = backend.Renewal{SentAt: sentAt, TTL: s.ttl}
		} else {
			r.gone(ctx, i)
		}
	})
}

// move puts the grants whose numbers are in members on the session of a TTL. The create revisions stay, and with them
// the tokens.
//
// While it runs, the keys count as being called, and unknown grants become holds of the driver (adopt). So sweep
// spares them, and a release that overtakes the move finds them and leaves no key
// (TestRenewalThatIsOvertakenByAReleaseLeavesNothing). An adopted grant that has not moved is dropped at the end.
func (r *renewing) move(ctx context.Context, ttl time.Duration, members []int) {
	// First find the grants that can move at all: they name a key, have a TTL that a session can have, and their keys
	// stand as the grants say.
	failed := func(i int) bool { return r.out[i].Err != nil }
	for _, i := range members {
		if incarnation(r.grants[i]) == 0 || r.keys[i] == "" || ttl < minTTL || ttl%time.Second != 0 {
			r.out[i].Err = &backend.NotHeldError{Name: r.grants[i].Name}
		}
	}
	members = slices.DeleteFunc(slices.Clone(members), failed)
	stand := r.identify(ctx, members)
	members = slices.DeleteFunc(members, failed)
	if len(members) == 0 {
		return
	}
	// From here on the keys count as called; every way out ends that.
	r.d.mu.Lock()
	for _, i := range members {
		r.d.callLocked(r.keys[i], r.grants[i].RequestID)
	}
	r.d.mu.Unlock()
	defer func() {
		for _, i := range members {
			r.d.endCall(r.keys[i])
		}
	}()
	s, err := r.d.provedSession(ctx, ttl)
	if err != nil {
		r.fail(members, err)
		return
	}
	// The user that sessionFor added is this call; each hold that moves becomes a separate user.
	defer s.Leave(1)
	if err := r.adopt(s, members); err != nil {
		r.fail(members, err)
	} else {
		_ = inParts(members, opsPerTxn, func(part []int) error { return r.moveTogether(ctx, s, stand, part) })
	}
	for _, i := range members {
		// It was adopted for the move, and has not moved.
		if h := r.hold(i); h != nil && h.adopted {
			r.d.dropHold(r.keys[i], h)
		}
	}
}

// identify reads the keys of grants and returns them by number. A grant is over if its key is gone, or if this driver
// does not know it and its key stands for another request: moving by name and revision alone would let a client that
// has seen a hold, and not its request id, move it.
func (r *renewing) identify(ctx context.Context, members []int) []entry {
	stand := make([]entry, len(r.grants))
	_ = inParts(members, opsPerTxn, func(part []int) error {
		return r.read(ctx, part, func(i int, e entry, found bool) {
			g := r.grants[i]
			if !found || e.revision != incarnation(g) || r.hold(i) == nil && e.value.Request != g.RequestID {
				r.gone(ctx, i)
			}
			stand[i] = e
		})
	})
	return stand
}

// read reads the keys of the grants whose numbers are in part, in one transaction, and calls see for each. If the
// read fails, all grants fail, and see is not called.
func (r *renewing) read(ctx context.Context, part []int, see func(i int, e entry, found bool)) error {
	ops := make([]clientv3.Op, len(part))
	for n, i := range part {
		// Not keys only: some versions omit the lease then.
		ops[n] = clientv3.OpGet(r.keys[i])
	}
	resp, err := r.d.commit(clientv3.WithRequireLeader(ctx), nil, ops, nil)
	if err != nil {
		r.fail(part, err)
		return err
	}
	for n, i := range part {
		r.out[i].Err = nil // of a larger part
		var e entry
		kvs := resp.Responses[n].GetResponseRange().Kvs
		found := len(kvs) == 1
		if found {
			e, found = r.d.entryOf(kvs[0])
		}
		see(i, e, found)
	}
	return nil
}

// provedSession is sessionFor with a proof that is at most a third of the TTL old. If a session turns out to be
// outgrown, its successor takes its place.
func (d *Driver) provedSession(ctx context.Context, ttl time.Duration) (*session, error) {
	for {
		s, err := d.sessionFor(ctx, ttl)
		if err != nil {
			return nil, err
		}
		if err = s.prove(ctx, s.ttl/3); err == nil {
			return s, nil
		}
		s.Leave(1)
		if !errors.Is(err, errOutgrown) {
			return nil, err
		}
	}
}

// adopt makes holds of grants that the driver does not know: another driver's, or grants whose session has ended. A
// concurrent release finds the hold, so that no key is left. Each is a user of s until it is dropped or has moved.
func (r *renewing) adopt(s *session, members []int) error {
	for _, i := range members {
		if r.hold(i) != nil {
			continue
		}
		if !s.Add(1) {
			return errSessionLost
		}
		g := r.grants[i]
		r.d.addHold(r.keys[i], g.RequestID, &hold{session: s, revision: incarnation(g), adopted: true})
	}
	return nil
}

// errChanged: a key is no longer as it was read. It may have gone, or an earlier transaction that was
// carried out late has moved it; the next renewal finds out.
var errChanged = fmt.Errorf("%w: a key has changed since it was read", backend.ErrUnavailable)

// moveTogether puts grants on a session in one atomic transaction, if their keys are as they were read; else it
// fails with errChanged.
//
// The validity rests on the session's last proof before the transaction. It was sent before the keys stood on the
// lease, and the lease lives at least a TTL from then on.
func (r *renewing) moveTogether(ctx context.Context, s *session, stand []entry, part []int) error {
	cmps, puts := make([]clientv3.Cmp, len(part)), make([]clientv3.Op, len(part))
	// The driver's hold of each grant before the transaction, so that moveHold sees a release meanwhile; nil if it
	// was released before.
	holds := make([]*hold, len(part))
	for n, i := range part {
		holds[n] = r.hold(i)
		cmps[n] = asRead(r.keys[i], stand[i].modified)
		puts[n] = clientv3.OpPut(r.keys[i], "", clientv3.WithIgnoreValue(), clientv3.WithLease(s.id))
	}
	// Before the transaction: a later proof may be of a moment at which the key has gone.
	sentAt := s.provedAt()
	resp, err := r.d.commit(clientv3.WithRequireLeader(ctx), cmps, puts, nil)
	switch {
	case err != nil:
	case !resp.Succeeded:
		err = errChanged
	case !s.Add(len(part)):
		err = errSessionLost
	}
	if err != nil {
		r.fail(part, err)
		return err
	}
	for n, i := range part {
		r.d.moveHold(r.keys[i], holds[n], s)
		r.out[i] = backend.Renewal{SentAt: sentAt, TTL: s.ttl}
	}
	return nil
}
