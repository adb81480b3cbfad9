package etcdguard

import (
	"context"
	"errors"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
)

// ErrCondition: the claims are admitted, but a condition that was given to Do does not hold. No key was written.
var ErrCondition = errors.New("etcdguard: a condition does not hold")

// Options of a guard. Nil is the same as the zero value.
type Options struct {
	// Prefix is in front of the guard's keys. Default "fencing/".
	Prefix string

	// ID is the expected ID of the guard's memory (fencing.Terms.ID): another ID is fencing.ErrGuardID. Zero: the ID that
	// this Guard sees first, so that keys that were deleted and recreated before that are not detected.
	ID fencing.Nonce
}

// Guard guards the resources of one cluster. It is safe for concurrent use.
type Guard struct {
	kv     clientv3.KV
	prefix string
	memory *memory.Pin
}

var (
	_ fencing.Guard  = (*Guard)(nil)
	_ fencing.Keeper = (*Guard)(nil)
)

// New returns a guard that uses the client, or a clientv3.KV of it. It does no I/O: Create comes before the first
// check. The error is a *fencing.InvalidError that names the invalid argument.
func New(kv clientv3.KV, o *Options) (*Guard, error) {
	if o == nil {
		o = &Options{}
	}
	if kv == nil {
		return nil, fmt.Errorf("etcdguard: new: %w", &fencing.InvalidError{What: "client", Why: "it is nil"})
	}
	g := &Guard{kv: kv, prefix: o.Prefix, memory: memory.NewPin(o.ID)}
	if g.prefix == "" {
		g.prefix = "fencing/"
	}
	return g, nil
}

// Key returns the key that the guard keeps for a resource.
func (g *Guard) Key(resource string) string { return g.prefix + "resources/" + resource }

// TermsKey returns the key that the guard keeps for all.
func (g *Guard) TermsKey() string { return g.prefix + "terms" }

// Check shows the claims: from then on lower tokens are refused. A write that follows is another step, which others may
// overtake; see Update and Do.
func (g *Guard) Check(ctx context.Context, claims fencing.Claims) error {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return fmt.Errorf("etcdguard: check: %w", err)
	}
	_, err = g.txn(ctx, "check", fencing.Unordered(list), nil, nil)
	return err
}

// Do checks the claims and, if they are admitted and the conditions hold, carries out ops, in one transaction; it
// returns the responses to ops. They may be at most 125 by etcd's default, less one for each further claim, and write
// to no key of the guard. ErrCondition: a condition does not hold. Where the hold has made the write before
// (Claim.Sequence) the error is fencing.ErrRepeated: it is there.
//
//	guard.Do(ctx, claim, []clientv3.Cmp{driver.OwnerCmp(grant)}, clientv3.OpPut("config", "new"))
func (g *Guard) Do(ctx context.Context, claims fencing.Claims, conditions []clientv3.Cmp, ops ...clientv3.Op,
) (*clientv3.TxnResponse, error) {
	return g.txn(ctx, "do", claims, conditions, ops)
}

// Update shows the claims, reads the value of key, and writes the result of f, if the claims are still admitted and
// the key was not changed; otherwise it retries, until ctx ends. old is nil if the key does not exist, and a nil
// result deletes the key. If f fails, Update returns its error and writes no key. f may be called more than once, so
// it must have no side effects.
func (g *Guard) Update(ctx context.Context, claims fencing.Claims, key string,
	f func(old []byte) ([]byte, error)) error {
	if f == nil {
		return fmt.Errorf("etcdguard: update: %w", &fencing.InvalidError{What: "function", Why: "it is nil"})
	}
	list, err := fencing.Sorted(claims)
	if err != nil {
		return fmt.Errorf("etcdguard: update: %w", err)
	}
	looking := fencing.Unordered(list) // the reading is no write of the hold, and needs no order
	for {
		if _, err := g.txn(ctx, "update", looking, nil, nil); err != nil {
			return err
		}
		answer, err := g.kv.Get(ctx, key) // after the claims were shown
		if err != nil {
			return fmt.Errorf("etcdguard: update %q: %w", key, err)
		}
		var old []byte
		var revision int64
		if len(answer.Kvs) > 0 {
			old, revision = append([]byte{}, answer.Kvs[0].Value...), answer.Kvs[0].ModRevision
		}
		value, err := f(old)
		if err != nil {
			return err
		}
		write := clientv3.OpDelete(key)
		if value != nil {
			write = clientv3.OpPut(key, string(value), clientv3.WithIgnoreLease())
			if revision == 0 {
				write = clientv3.OpPut(key, string(value))
			}
		}
		same := clientv3.Compare(clientv3.ModRevision(key), "=", revision)
		_, err = g.txn(ctx, "update", fencing.Set(list), []clientv3.Cmp{same}, []clientv3.Op{write})
		switch {
		case errors.Is(err, fencing.ErrRepeated):
			return nil // it is there
		case !errors.Is(err, ErrCondition):
			return err
		}
	}
}

// txn reads the guard's memory, judges, and carries out ops if the memory has not changed; otherwise it judges again.
func (g *Guard) txn(ctx context.Context, call string, claims fencing.Claims, conditions []clientv3.Cmp,
	ops []clientv3.Op,
) (*clientv3.TxnResponse, error) {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return nil, fmt.Errorf("etcdguard: %s: %w", call, err)
	}
	fail := func(err error) (*clientv3.TxnResponse, error) {
		return nil, fmt.Errorf("etcdguard: %s %q: %w", call, list[0].Resource, err)
	}
	m, err := g.recall(ctx, list)
	if err != nil {
		return fail(err)
	}
	for {
		if err := g.memory.Check(m.terms); err != nil {
			return fail(err)
		}
		terms := m.terms.Pin(list[0])
		remember, err := fencing.JudgeAll(list, terms, func(resource string) (fencing.Seen, error) {
			return m.seen[resource], nil
		})
		if err != nil {
			if !fencing.Refusal(err) {
				return fail(err)
			}
			return nil, err
		}
		writes := make([]clientv3.Op, 0, len(list)+1+len(ops))
		if terms != m.terms {
			writes = append(writes, clientv3.OpPut(g.TermsKey(), terms.String()))
		}
		for i, c := range list {
			if remember[i] != m.seen[c.Resource] || m.at[c.Resource] == 0 {
				writes = append(writes, clientv3.OpPut(g.Key(c.Resource), remember[i].String()))
			}
		}
		own := len(writes)
		then := append(writes, ops...)
		if len(conditions) > 0 {
			then = []clientv3.Op{clientv3.OpTxn(conditions, then, nil)}
		}
		answer, err := g.kv.Txn(ctx).If(m.unchanged...).Then(then...).Else(m.look...).Commit()
		if err != nil {
			return fail(err)
		}
		if !answer.Succeeded {
			if m, err = g.parse(list, answer.Responses); err != nil {
				return fail(err)
			}
			continue
		}
		responses := answer.Responses
		if len(conditions) > 0 {
			inner := responses[0].GetResponseTxn()
			if !inner.Succeeded {
				return fail(ErrCondition)
			}
			responses = inner.Responses
		}
		return &clientv3.TxnResponse{Header: answer.Header, Succeeded: true, Responses: responses[own:]}, nil
	}
}
