package etcd

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
)

// Renew implements backend.Driver. One keepalive proves the lease of all grants with one TTL, if the session's own loop
// has not done so a moment ago. A lease that lives does not prove that a key does, so one more request asks for the keys
// on it. Only those that it does not name are read themselves before they count as lost.
//
// A grant whose TTL differs from its session's moves to the session of that TTL, and one whose session was outgrown to its
// successor.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	if err := d.begin(ctx); err != nil {
		for i, g := range grants {
			out[i].Err = d.callError("renew", g.Name, err)
		}
		return out
	}
	defer d.work.Done()

	bySession, byTTL := map[*session][]int{}, map[time.Duration][]int{}
	var work sync.WaitGroup
	for i, g := range grants {
		h := d.hold(d.Key(g), g)
		switch {
		case h == nil, g.TTL != h.session.ttl && g.TTL/time.Second != time.Duration(h.session.seconds):
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
		out[i].Err = d.callError("renew", g.Name, out[i].Err)
	}
	return out
}

// opsPerTxn stays below the 128 operations that a server allows in a transaction by default.
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
	var work sync.WaitGroup
	for part := range slices.Chunk(missing, opsPerTxn) {
		work.Go(func() { d.check(ctx, s, sentAt, grants, part, out) })
	}
	work.Wait()
}

// keys returns the keys that stand on the lease, as a leader knows them that may have been overtaken: what is missing may
// be there.
func (s *session) keys(ctx context.Context) (map[string]bool, error) {
	resp, err := s.d.client.TimeToLive(clientv3.WithRequireLeader(ctx), s.id, clientv3.WithAttachedKeys())
	if err != nil {
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

// check reads the keys of the grants whose numbers are in part. It also serves clients whose KV has a namespace and whose
// Lease has not: the two name one key differently.
func (d *Driver) check(
	ctx context.Context, s *session, sentAt backend.Instant, grants []backend.Grant, part []int, out []backend.Renewal,
) {
	ops := make([]clientv3.Op, len(part))
	for n, i := range part {
		// Not keys only: some versions leave out the lease then.
		ops[n] = clientv3.OpGet(d.Key(grants[i]))
	}
	resp, err := d.client.Txn(clientv3.WithRequireLeader(ctx)).Then(ops...).Commit()
	for n, i := range part {
		g := grants[i]
		if err != nil {
			out[i].Err = err
			continue
		}
		kvs := resp.Responses[n].GetResponseRange().Kvs
		if len(kvs) == 1 && kvs[0].CreateRevision == incarnation(g) && clientv3.LeaseID(kvs[0].Lease) == s.id {
			out[i] = backend.Renewal{SentAt: sentAt, TTL: s.ttl}
			continue
		}
		key := d.Key(g)
		h := d.hold(key, g)
		out[i].Err = d.notHeld(ctx, g, h)
		d.dropHold(key, h)
	}
}

// move puts the grants whose numbers are in members on the session of a TTL. The create revisions stay, and with them the
// tokens.
func (d *Driver) move(ctx context.Context, ttl time.Duration, grants []backend.Grant, members []int, out []backend.Renewal) {
	members = slices.DeleteFunc(slices.Clone(members), func(i int) bool {
		bad := incarnation(grants[i]) == 0 || ttl < minTTL || ttl%time.Second != 0
		if bad {
			out[i].Err = &backend.NotHeldError{Name: grants[i].Name}
		}
		return bad
	})
	if len(members) == 0 {
		return
	}
	keys := make([]string, len(members))
	for n, i := range members {
		keys[n] = d.Key(grants[i])
	}
	defer d.begun(keys)()
	s, err := d.provedSession(ctx, ttl)
	if err != nil {
		for _, i := range members {
			out[i].Err = err
		}
		return
	}
	defer s.leave()
	var work sync.WaitGroup
	for part := range slices.Chunk(members, opsPerTxn) {
		work.Go(func() {
			if d.moveTogether(ctx, s, grants, part, out) {
				return
			}
			for _, i := range part { // one is gone, and keeps no other from moving
				d.moveTogether(ctx, s, grants, []int{i}, out)
			}
		})
	}
	work.Wait()
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
		s.leave()
		if !errors.Is(err, errOutgrown) {
			return nil, err
		}
	}
}

// moveTogether puts grants on a session in one transaction, all or none. It is false if one of several is gone.
func (d *Driver) moveTogether(ctx context.Context, s *session, grants []backend.Grant, part []int, out []backend.Renewal) bool {
	cmps, puts := make([]clientv3.Cmp, len(part)), make([]clientv3.Op, len(part))
	for n, i := range part {
		key := d.Key(grants[i])
		cmps[n] = clientv3.Compare(clientv3.CreateRevision(key), "=", incarnation(grants[i]))
		puts[n] = clientv3.OpPut(key, "", clientv3.WithIgnoreValue(), clientv3.WithLease(s.id))
	}
	sentAt := s.provedAt()
	resp, err := d.client.Txn(clientv3.WithRequireLeader(ctx)).If(cmps...).Then(puts...).Commit()
	if err == nil && !resp.Succeeded && len(part) > 1 {
		return false
	}
	if err == nil && resp.Succeeded {
		err = s.joinMore(len(part))
	}
	for _, i := range part {
		g, key := grants[i], d.Key(grants[i])
		h := d.hold(key, g)
		switch {
		case err != nil:
			out[i].Err = err
		case !resp.Succeeded:
			out[i].Err = d.notHeld(ctx, g, h)
			d.dropHold(key, h)
		default:
			moved := &hold{session: s, revision: incarnation(g)}
			if h != nil {
				moved.lost = h.lost
			}
			d.addHold(key, moved)
			out[i] = backend.Renewal{SentAt: sentAt, TTL: s.ttl}
		}
	}
	return true
}
