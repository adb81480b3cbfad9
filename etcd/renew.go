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

// Renew prolongs holds. One keepalive proves the lease of all grants with one TTL, if the session's own loop has not
// done so a moment ago. A lease that lives does not prove that a key does, so one more request asks for the keys on it.
// Only those that it does not name are read themselves before they count as lost.
//
// A grant whose TTL differs from its session's moves to the session of that TTL, to a shorter one when that cuts
// nothing short, and a grant whose session was outgrown to its successor.
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

// renewing is one call of Renew. Its parts run side by side, each for grants of its own, which it knows by their number.
type renewing struct {
	d      *Driver
	grants []backend.Grant
	keys   []string // on which they stand
	out    []backend.Renewal
}

func (r *renewing) all(ctx context.Context) {
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
			ttl := h.session.asked()
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
		if holds[i] != nil && g.TTL < r.out[i].TTL { // it stood on a lease with more
			r.out[i].TTL = g.TTL
		}
		if h := r.hold(i); h != nil {
			h.promise(r.out[i].SentAt.Add(r.out[i].TTL))
		}
	}
}

// hold returns the hold of a grant, or nil.
func (r *renewing) hold(i int) *hold { return r.d.hold(r.keys[i], r.grants[i]) }

// fail notes what kept grants from being renewed, which says nothing of the holds.
func (r *renewing) fail(members []int, err error) {
	for _, i := range members {
		r.out[i].Err = err
	}
}

// gone notes that the key of a grant is not there any more, or stands for another hold.
func (r *renewing) gone(ctx context.Context, i int) {
	h := r.hold(i)
	r.out[i].Err = r.d.notHeld(ctx, r.grants[i], h)
	r.d.dropHold(r.keys[i], h)
}

// stays reports whether a hold that is renewed for ttl stays on its lease. A renewal never shortens what was promised:
// for less, it moves only when the shorter lease lasts until the end of that.
func (h *hold) stays(ttl time.Duration) bool {
	s := h.session
	if ttl == s.ttl || ttl/time.Second == time.Duration(s.seconds) {
		return true
	}
	atLeast := s.d.clock.Now().Add(ttl - ttl/3) // see provedSession
	return ttl < s.ttl && int64(atLeast) < h.until.Load()
}

// promise notes that somebody may believe in a hold until then.
func (h *hold) promise(until backend.Instant) {
	for {
		before := h.until.Load()
		if int64(until) <= before || h.until.CompareAndSwap(before, int64(until)) {
			return
		}
	}
}

// opsPerTxn stays below the 128 operations that a server allows in a transaction by default. For one that allows fewer
// it is halved until they fit: see inParts.
const opsPerTxn = 100

// on renews the grants whose numbers are in members, all on one session.
func (r *renewing) on(ctx context.Context, s *session, members []int) {
	err := s.prove(ctx, s.ttl/6)
	if errors.Is(err, errOutgrown) {
		r.move(ctx, s.asked(), members)
		return
	}
	sentAt := s.provedAt()
	var attached map[string]bool
	if err == nil {
		attached, err = s.keys(ctx)
	}
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
	r.d.inParts(missing, func(part []int) (tooMany bool) { return r.check(ctx, s, sentAt, part) })
}

// inParts calls do with some of the members at a time, until all have had their turn. do reports whether they were too
// many operations for one transaction, of which the server has done none; then fewer are tried, now and later.
func (d *Driver) inParts(members []int, do func(part []int) (tooMany bool)) {
	var work sync.WaitGroup
	for part := range slices.Chunk(members, opsPerTxn/(1<<d.halvings.Load())) {
		work.Go(func() {
			if !do(part) || len(part) == 1 {
				return
			}
			halvings := d.halvings.Load()
			if opsPerTxn/(1<<halvings) >= len(part) {
				d.halvings.CompareAndSwap(halvings, halvings+1)
			}
			d.inParts(part, do)
		})
	}
	work.Wait()
}

// keys returns the keys that stand on the lease, as a leader knows them that may have been overtaken: what is missing
// may be there.
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

// check reads the keys of the grants whose numbers are in part. It also serves clients whose KV has a namespace and
// whose Lease has not: the two name one key differently.
func (r *renewing) check(ctx context.Context, s *session, sentAt backend.Instant, part []int) (tooMany bool) {
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
func (r *renewing) move(ctx context.Context, ttl time.Duration, members []int) {
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
	defer s.Leave(1)
	if err := r.adopt(s, members); err != nil {
		r.fail(members, err)
	} else {
		r.d.inParts(members, func(part []int) (tooMany bool) {
			done, tooMany := r.moveTogether(ctx, s, stand, part)
			if !done {
				for _, i := range part { // one has changed, and keeps no other from moving
					r.moveTogether(ctx, s, stand, []int{i})
				}
			}
			return tooMany
		})
	}
	for _, i := range members {
		if h := r.hold(i); h != nil && h.adopted { // it did not move
			r.d.dropHold(r.keys[i], h)
		}
	}
}

// identify reads the keys of grants, by number. Those that are gone, or of which this driver knows nothing and that
// stand for another request, are told so.
func (r *renewing) identify(ctx context.Context, members []int) []entry {
	stand := make([]entry, len(r.grants))
	r.d.inParts(members, func(part []int) (tooMany bool) {
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

// read reads the keys of the grants whose numbers are in part, and calls see for each, unless there was an error.
func (r *renewing) read(ctx context.Context, part []int, see func(i int, e entry, found bool)) (tooMany bool) {
	ops := make([]clientv3.Op, len(part))
	for n, i := range part {
		// Not keys only: some versions leave out the lease then.
		ops[n] = clientv3.OpGet(r.keys[i])
	}
	resp, err := r.d.commit(clientv3.WithRequireLeader(ctx), nil, ops, nil)
	if err != nil {
		r.fail(part, err)
		return isOneOf(err, rpctypes.ErrTooManyOps)
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
	return false
}

// provedSession is sessionFor with a proof that is fresh.
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

// adopt makes holds of those grants that the driver does not know, another driver's or such whose session has ended.
// Who gives one back while it moves finds it, so that it leaves nothing.
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

// errChanged: a key is not any more what it was when it was read. It may have gone, or have been moved by an earlier
// transaction that was carried out late; the next renewal finds out.
var errChanged = fmt.Errorf("%w: a key has changed since it was read", backend.ErrUnavailable)

// moveTogether puts grants on a session in one transaction, all or none, if their keys are as they were read. done is
// false if one of several is not.
func (r *renewing) moveTogether(ctx context.Context, s *session, stand []entry, part []int) (done, tooMany bool) {
	cmps, puts := make([]clientv3.Cmp, len(part)), make([]clientv3.Op, len(part))
	holds := make([]*hold, len(part)) // nil: given back meanwhile
	for n, i := range part {
		holds[n] = r.hold(i)
		cmps[n] = asRead(r.keys[i], stand[i].modified)
		puts[n] = clientv3.OpPut(r.keys[i], "", clientv3.WithIgnoreValue(), clientv3.WithLease(s.id))
	}
	sentAt := s.provedAt()
	resp, err := r.d.commit(clientv3.WithRequireLeader(ctx), cmps, puts, nil)
	switch {
	case err != nil:
	case !resp.Succeeded && len(part) > 1:
		return false, false
	case !resp.Succeeded:
		err = errChanged
	case !s.Add(len(part)):
		err = errSessionLost
	}
	if err != nil {
		r.fail(part, err)
		return true, isOneOf(err, rpctypes.ErrTooManyOps)
	}
	for n, i := range part {
		r.d.moveHold(r.keys[i], holds[n], s)
		r.out[i] = backend.Renewal{SentAt: sentAt, TTL: s.ttl}
	}
	return true, false
}
