package etcd

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
)

// tooMany is the error of a set that the server refuses for its size: the core then takes one name after the other.
func tooMany(n int, err error) error {
	if isOneOf(err, rpctypes.ErrTooManyOps, rpctypes.ErrRequestTooLarge) {
		return fmt.Errorf("%d names in one transaction: %w: %w", n, backend.ErrUnsupported, err)
	}
	return err
}

// Leave is engine.Service's. No key is deleted blindly: what deletes it compares which life of the key it means, or
// that nobody has written it since it was read. The attempts that may arrive late are marked in the same transaction.
func (e *service) Leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	left, err := e.leave(ctx, l)
	if isOneOf(err, rpctypes.ErrLeaseNotFound) { // so no request can arrive on it
		l.Late = nil
		left, err = e.leave(ctx, l)
	}
	return left, err
}

func (e *service) leave(ctx context.Context, l engine.Leaving) (engine.Left, error) {
	var marks []clientv3.Op
	if own := leaseOf(l.Session); own != nil {
		for _, attempt := range l.Late {
			marks = append(marks, clientv3.OpPut(e.overKey(attempt), "", clientv3.WithLease(own.id)))
		}
	}
	if l.Incarnation == "" {
		return e.leaveRequest(ctx, l, marks)
	}
	key, revision := e.keyOf(l.Name, usedBy(l.Grant), l.Incarnation)
	if revision == 0 {
		return engine.Left{}, nil
	}
	cmps := []clientv3.Cmp{created(key, revision)}
	if !l.Known { // a grant that was put together from what others can see of a hold must not end it
		cmps = append(cmps, standsFor(key, l.RequestID)...)
	}
	resp, err := e.release(ctx, l.Name, step{
		cmps: cmps, then: append([]clientv3.Op{clientv3.OpDelete(key)}, marks...), otherwise: marks,
	})
	if err != nil {
		return engine.Left{}, err
	}
	leaseOf(l.Session).forget(key, revision)
	if len(marks) > 0 { // a late Enter may have run before they were written, and have another key
		if _, err := e.leaveRequest(ctx, l, nil); err != nil {
			return engine.Left{}, err
		}
	}
	if resp.Succeeded {
		return engine.Left{Was: true}, nil
	}
	return engine.Left{Loss: e.losses(ctx, []string{l.Name})(l.Name, revision)}, nil
}

// release is do in any history.
func (e *service) release(ctx context.Context, name string, s step) (*clientv3.TxnResponse, error) {
	resp, err := e.do(ctx, name, s)
	if resp != nil {
		err = nil
	}
	return resp, err
}

// leaveRequest deletes whatever a request has. Its read is complete, since the marks are written before.
func (e *service) leaveRequest(ctx context.Context, l engine.Leaving, marks []clientv3.Op) (engine.Left, error) {
	look := append(slices.Clone(marks), clientv3.OpGet(e.dir(l.Name), clientv3.WithPrefix()))
	for range maxWrites {
		resp, err := e.release(ctx, l.Name, step{then: look})
		if err != nil {
			return engine.Left{}, err
		}
		var cmps []clientv3.Cmp
		var deletes []clientv3.Op
		var own []entry
		for _, x := range e.queueOf(resp.Responses[len(look)-1].GetResponseRange().Kvs) {
			if x.value.Request == l.RequestID {
				cmps, deletes = append(cmps, asRead(x.key, x.modified)), append(deletes, clientv3.OpDelete(x.key))
				own = append(own, x)
			}
		}
		if len(own) == 0 {
			return engine.Left{}, nil
		}
		done, err := e.release(ctx, l.Name, step{cmps: cmps, then: deletes})
		if err != nil {
			return engine.Left{}, err
		}
		if done.Succeeded {
			for _, x := range own {
				leaseOf(l.Session).forget(x.key, x.revision)
			}
			return engine.Left{Was: true}, nil
		}
		look = look[len(look)-1:]
	}
	return engine.Left{}, errChanged
}

// losses asks why holds of names are gone. Without an answer the reasons are less exact, and the holds as much gone.
func (e *service) losses(ctx context.Context, names []string) (loss func(name string, revision int64) backend.Loss) {
	found := map[string]forced{}
	_ = inParts(e, names, maxOps-1, func(part []string) error {
		ops := []clientv3.Op{clientv3.OpGet(e.spaceKey())}
		for _, name := range part {
			ops = append(ops, clientv3.OpGet(e.forcedKey(name)))
		}
		resp, err := e.look(ctx, ops...)
		if err != nil {
			return err
		}
		if e.history.tokenSpace().name != "" {
			if err := e.checkSpace(ctx, resp.Responses[0].GetResponseRange().Kvs); err != nil {
				return err
			}
		}
		for i, name := range part {
			var f forced
			kvs := resp.Responses[i+1].GetResponseRange().Kvs
			if len(kvs) == 1 && json.Unmarshal(kvs[0].Value, &f) == nil {
				found[name] = f
			}
		}
		return nil
	})
	return func(name string, revision int64) backend.Loss {
		switch f, ok := found[name]; {
		case e.history.err() != nil:
			return backend.Loss{Reason: backend.ReasonHistoryLost}
		case ok && f.names(revision):
			return f.loss()
		}
		return backend.Loss{}
	}
}

// Extend is engine.Service's. One request names the keys on the lease; those that it does not name, and those that the
// engine does not know there, are read, and move to the lease if they are on another one. A move keeps the create
// revision, and with it the token and the place.
func (e *service) Extend(ctx context.Context, s engine.Session, holds []engine.Holding) ([]engine.Outcome, error) {
	out := make([]engine.Outcome, len(holds))
	l := leaseOf(s)
	on, err := e.keys(ctx, l)
	if err != nil {
		return nil, err
	}
	var rest []int
	for i, h := range holds {
		key, revision := e.keyOf(h.Name, usedBy(h.Grant), h.Incarnation)
		if !h.Known || !on[key] || revision == 0 || !l.has(key, revision) {
			rest = append(rest, i)
		}
	}
	var moves []move
	err = inParts(e, rest, maxOps, func(part []int) error {
		ops := make([]clientv3.Op, len(part))
		for n, i := range part {
			key, _ := e.keyOf(holds[i].Name, usedBy(holds[i].Grant), holds[i].Incarnation)
			ops[n] = clientv3.OpGet(key) // not keys only: some versions leave out the lease then
		}
		resp, err := e.txn(ctx, nil, ops, nil)
		if err != nil {
			return err
		}
		for n, i := range part {
			key, revision := e.keyOf(holds[i].Name, usedBy(holds[i].Grant), holds[i].Incarnation)
			found := e.queueOf(resp.Responses[n].GetResponseRange().Kvs)
			switch {
			case len(found) == 0 || found[0].revision != revision ||
				!holds[i].Known && found[0].value.Request != holds[i].RequestID:
				out[i].Gone = true
				l.forget(key, revision)
				continue
			case found[0].lease != l.id:
				moves = append(moves, move{i, found[0]})
			}
			l.place(key, revision)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = inParts(e, moves, maxOps, func(part []move) error {
		if err := engine.Abandoned(ctx); err != nil {
			return err
		}
		ops := make([]clientv3.Op, len(part))
		for n, m := range part {
			ops[n] = clientv3.OpTxn([]clientv3.Cmp{asRead(m.key, m.modified)}, []clientv3.Op{
				clientv3.OpPut(m.key, "", clientv3.WithIgnoreValue(), clientv3.WithLease(l.id)),
			}, nil)
		}
		resp, err := e.txn(ctx, nil, ops, nil)
		if err != nil {
			return err
		}
		for n, m := range part {
			if !resp.Responses[n].GetResponseTxn().Succeeded {
				out[m.hold].Err = errChanged // the next renewal finds out
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var names []string
	for i, h := range holds {
		if out[i].Gone {
			names = append(names, h.Name)
		}
	}
	slices.Sort(names)
	loss := e.losses(ctx, slices.Compact(names))
	for i, h := range holds {
		if out[i].Gone {
			_, revision := e.keyOf(h.Name, usedBy(h.Grant), h.Incarnation)
			out[i].Loss = loss(h.Name, revision)
		}
	}
	return out, e.history.err()
}

// move is a hold that is to move to another lease.
type move struct {
	hold int
	entry
}
