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
	out := make([]backend.Renewal, len(grants))
	if err := d.begin(ctx); err != nil {
		for i, g := range grants {
			out[i].Err = d.callError("renew", g.Name, err)
		}
		return out
	}
	defer d.gate.Leave()
	ctx, done := d.gate.Bind(ctx)
	defer done()
	if d.history.err() == nil {
		d.renewAll(ctx, grants, out)
	}
	lost := d.history.err() != nil
	for i, g := range grants {
		if lost {
			out[i] = backend.Renewal{Err: &backend.NotHeldError{Name: g.Name, Reason: backend.ReasonHistoryLost}}
		}
		out[i].Err = d.callError("renew", g.Name, out[i].Err)
	}
	return out
}

func (d *Driver) renewAll(ctx context.Context, grants []backend.Grant, out []backend.Renewal) {
	bySession, byTTL := map[*session][]int{}, map[time.Duration][]int{}
	var work sync.WaitGroup
	holds := make([]*hold, len(grants))
	for i, g := range grants {
		h := d.hold(d.Key(g), g)
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
		work.Go(func() { d.move(ctx, ttl, grants, members, out) })
	}
	for s, members := range bySession {
		work.Go(func() { d.renewOn(ctx, s, grants, members, out) })
	}
	work.Wait()
	for i, g := range grants {
		if out[i].Err != nil {
			continue
		}
		if holds[i] != nil && g.TTL < out[i].TTL { // it stood on a lease with more
			out[i].TTL = g.TTL
		}
		if h := d.hold(d.Key(g), g); h != nil {
			h.promise(out[i].SentAt.Add(out[i].TTL))
		}
	}
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

// renewOn renews the grants whose numbers are in members, all on one session.
func (d *Driver) renewOn(ctx context.Context, s *session, grants []backend.Grant, members []int, out []backend.Renewal) {
	err := s.prove(ctx, s.ttl/6)
	if errors.Is(err, errOutgrown) {
		d.move(ctx, s.asked(), grants, members, out)
		return
	}
	if err != nil {
		for _, i := range members {
			if out[i].Err = err; errors.Is(err, errSessionLost) {
				out[i].Err = &backend.NotHeldError{Name: grants[i].Name, Reason: backend.ReasonSessionExpired}
			}
		}
		return
	}
	sentAt := s.provedAt()
	attached, err := s.keys(ctx)
	var missing []int
	for _, i := range members {
		switch {
		case errors.Is(err, errSessionLost):
			out[i].Err = &backend.NotHeldError{Name: grants[i].Name, Reason: backend.ReasonSessionExpired}
		case err != nil:
			out[i].Err = err
		case attached[d.Key(grants[i])]:
			out[i] = backend.Renewal{SentAt: sentAt, TTL: s.ttl}
		default:
			missing = append(missing, i)
		}
	}
	d.inParts(missing, func(part []int) (tooMany bool) { return d.check(ctx, s, sentAt, grants, part, out) })
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
func (d *Driver) check(
	ctx context.Context, s *session, sentAt backend.Instant, grants []backend.Grant, part []int, out []backend.Renewal,
) (tooMany bool) {
	return d.read(ctx, grants, part, out, func(i int, e entry, found bool) {
		g := grants[i]
		if found && e.revision == incarnation(g) && e.lease == s.id {
			out[i] = backend.Renewal{SentAt: sentAt, TTL: s.ttl}
			return
		}
		key := d.Key(g)
		h := d.hold(key, g)
		out[i].Err = d.notHeld(ctx, g, h)
		d.dropHold(key, h)
	})
}

// move puts the grants whose numbers are in members on the session of a TTL. The create revisions stay, and with them
// the tokens.
func (d *Driver) move(ctx context.Context, ttl time.Duration, grants []backend.Grant, members []int, out []backend.Renewal) {
	members = slices.DeleteFunc(slices.Clone(members), func(i int) bool {
		bad := incarnation(grants[i]) == 0 || d.Key(grants[i]) == "" || ttl < minTTL || ttl%time.Second != 0
		if bad {
			out[i].Err = &backend.NotHeldError{Name: grants[i].Name}
		}
		return bad
	})
	stand := d.identify(ctx, grants, members, out)
	members = slices.DeleteFunc(members, func(i int) bool { return out[i].Err != nil })
	if len(members) == 0 {
		return
	}
	keys := make([]string, len(grants))
	for _, i := range members {
		keys[i] = d.Key(grants[i])
	}
	d.mu.Lock()
	for _, i := range members {
		d.callLocked(keys[i], grants[i].RequestID)
	}
	d.mu.Unlock()
	defer func() {
		for _, i := range members {
			d.endCall(keys[i])
		}
	}()
	s, err := d.provedSession(ctx, ttl)
	if err != nil {
		for _, i := range members {
			out[i].Err = err
		}
		return
	}
	defer s.Leave(1)
	if err := d.adopt(s, grants, members); err != nil {
		for _, i := range members {
			out[i].Err = err
		}
	} else {
		d.moveAll(ctx, s, grants, stand, members, out)
	}
	for _, i := range members {
		if h := d.hold(keys[i], grants[i]); h != nil && h.adopted { // it did not move
			d.dropHold(keys[i], h)
		}
	}
}

// identify reads the keys of grants, by number. Those that are gone, or of which this driver knows nothing and that
// stand for another request, are told so.
func (d *Driver) identify(ctx context.Context, grants []backend.Grant, members []int, out []backend.Renewal) []entry {
	stand := make([]entry, len(grants))
	d.inParts(members, func(part []int) (tooMany bool) {
		return d.read(ctx, grants, part, out, func(i int, e entry, found bool) {
			g, key := grants[i], d.Key(grants[i])
			h := d.hold(key, g)
			if !found || e.revision != incarnation(g) || h == nil && e.value.Request != g.RequestID {
				out[i].Err = d.notHeld(ctx, g, h)
				d.dropHold(key, h)
			}
			stand[i] = e
		})
	})
	return stand
}

// read reads the keys of the grants whose numbers are in part, and calls see for each, unless there was an error.
func (d *Driver) read(
	ctx context.Context, grants []backend.Grant, part []int, out []backend.Renewal, see func(i int, e entry, found bool),
) (tooMany bool) {
	ops := make([]clientv3.Op, len(part))
	for n, i := range part {
		// Not keys only: some versions leave out the lease then.
		ops[n] = clientv3.OpGet(d.Key(grants[i]))
	}
	resp, err := d.commit(clientv3.WithRequireLeader(ctx), nil, ops, nil)
	for n, i := range part {
		if out[i].Err = err; err != nil {
			continue
		}
		var e entry
		kvs := resp.Responses[n].GetResponseRange().Kvs
		found := len(kvs) == 1
		if found {
			e, found = d.entryOf(kvs[0])
		}
		see(i, e, found)
	}
	return isOneOf(err, rpctypes.ErrTooManyOps)
}

func (d *Driver) moveAll(
	ctx context.Context, s *session, grants []backend.Grant, stand []entry, members []int, out []backend.Renewal,
) {
	d.inParts(members, func(part []int) (tooMany bool) {
		done, tooMany := d.moveTogether(ctx, s, grants, stand, part, out)
		if !done {
			for _, i := range part { // one has changed, and keeps no other from moving
				d.moveTogether(ctx, s, grants, stand, []int{i}, out)
			}
		}
		return tooMany
	})
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
func (d *Driver) adopt(s *session, grants []backend.Grant, members []int) error {
	for _, i := range members {
		key := d.Key(grants[i])
		if d.hold(key, grants[i]) != nil {
			continue
		}
		if !s.Add(1) {
			return errSessionLost
		}
		d.addHold(key, grants[i].RequestID, &hold{session: s, revision: incarnation(grants[i]), adopted: true})
	}
	return nil
}

// errChanged: a key is not any more what it was when it was read. It may have gone, or have been moved by an earlier
// transaction that was carried out late; the next renewal finds out.
var errChanged = fmt.Errorf("%w: a key has changed since it was read", backend.ErrUnavailable)

// moveTogether puts grants on a session in one transaction, all or none, if their keys are as they were read. done is
// false if one of several is not.
func (d *Driver) moveTogether(
	ctx context.Context, s *session, grants []backend.Grant, stand []entry, part []int, out []backend.Renewal,
) (done, tooMany bool) {
	cmps, puts := make([]clientv3.Cmp, len(part)), make([]clientv3.Op, len(part))
	holds := make([]*hold, len(part)) // nil: given back meanwhile
	for n, i := range part {
		key := d.Key(grants[i])
		holds[n] = d.hold(key, grants[i])
		cmps[n] = asRead(key, stand[i].modified)
		puts[n] = clientv3.OpPut(key, "", clientv3.WithIgnoreValue(), clientv3.WithLease(s.id))
	}
	sentAt := s.provedAt()
	resp, err := d.commit(clientv3.WithRequireLeader(ctx), cmps, puts, nil)
	if err == nil && !resp.Succeeded && len(part) > 1 {
		return false, false
	}
	if err == nil && resp.Succeeded && !s.Add(len(part)) {
		err = errSessionLost
	}
	for n, i := range part {
		switch {
		case err != nil:
			out[i].Err = err
		case !resp.Succeeded:
			out[i].Err = errChanged
		default:
			d.moveHold(d.Key(grants[i]), holds[n], s)
			out[i] = backend.Renewal{SentAt: sentAt, TTL: s.ttl}
		}
	}
	return true, isOneOf(err, rpctypes.ErrTooManyOps)
}
