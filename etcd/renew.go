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
// A grant whose TTL differs from its session's moves to the session of that TTL, with one transaction of its own.
func (d *Driver) Renew(ctx context.Context, grants []backend.Grant) []backend.Renewal {
	out := make([]backend.Renewal, len(grants))
	if err := d.begin(ctx); err != nil {
		for i, g := range grants {
			out[i].Err = d.callError("renew", g.Name, err)
		}
		return out
	}
	defer d.work.Done()

	bySession := map[*session][]int{}
	var work sync.WaitGroup
	for i, g := range grants {
		h := d.hold(d.Key(g), g)
		switch {
		case h == nil || g.TTL != h.session.ttl && g.TTL/time.Second != time.Duration(h.session.seconds):
			work.Go(func() { out[i] = d.move(ctx, g, h) })
		default:
			bySession[h.session] = append(bySession[h.session], i)
		}
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
	if err := s.prove(ctx, s.ttl/6); err != nil {
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

// move puts a hold on the session of another TTL. The create revision stays, and with it the token.
func (d *Driver) move(ctx context.Context, g backend.Grant, h *hold) backend.Renewal {
	revision := incarnation(g)
	if revision == 0 || g.TTL < minTTL || g.TTL%time.Second != 0 {
		return backend.Renewal{Err: &backend.NotHeldError{Name: g.Name}}
	}
	s, err := d.sessionFor(ctx, g.TTL)
	if err != nil {
		return backend.Renewal{Err: err}
	}
	key := d.Key(g)
	defer d.begun([]string{key})()
	if err = s.prove(ctx, s.ttl/3); err == nil {
		resp, txnErr := d.client.Txn(clientv3.WithRequireLeader(ctx)).
			If(clientv3.Compare(clientv3.CreateRevision(key), "=", revision)).
			Then(clientv3.OpPut(key, "", clientv3.WithIgnoreValue(), clientv3.WithLease(s.id))).
			Commit()
		if err = txnErr; err == nil && !resp.Succeeded {
			err = d.notHeld(ctx, g, h)
			d.dropHold(key, h)
		}
	}
	if err != nil {
		s.leave()
		return backend.Renewal{Err: err}
	}
	moved := &hold{session: s, revision: revision}
	if h != nil {
		moved.lost = h.lost
	}
	d.addHold(key, moved)
	return backend.Renewal{SentAt: s.provedAt(), TTL: s.ttl}
}
