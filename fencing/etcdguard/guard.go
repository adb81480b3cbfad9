// Package etcdguard guards what is kept in etcd: the check is a comparison in the transaction of the caller's write, so
// both happen or neither does.
//
//	guard, err := etcdguard.New(client, nil)
//
//	err = locks.Do(ctx, "config", func(ctx context.Context, lease *fencelock.Lease) error {
//		claim := fencing.Claim{Resource: "config", Token: lease.Token()}
//		_, err := guard.Do(ctx, claim, clientv3.OpPut("config", "new"))
//		return err // errors.Is(err, fencing.ErrStale): somebody else holds the lock by now
//	})
//
// The lock may come from any service. If it is etcd's own, and in the same cluster, the driver's OwnerCmp asks for more,
// that the hold is still alive, and needs no memory: put it into an OpTxn, alone or inside Do.
//
// # What it takes
//
// Two small keys for each resource, fencing/resource/token and fencing/resource/space, without a lease. They must never be
// deleted: a guard that forgets admits a stale writer. A cluster restored from a backup has forgotten what came after it,
// together with the writes.
package etcdguard

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/fencing"
)

// Options of a guard. Nil is the same as the zero value.
type Options struct {
	// Prefix is in front of the guard's keys. Default "fencing/".
	Prefix string
	// Space is the only one whose tokens are accepted (Lease.TokenSpace); it is remembered beside every token. Empty: any.
	Space string
}

// Guard guards the resources of one cluster. It is safe for concurrent use, and implements fencing.SpaceGuard for writes
// that go elsewhere; those to etcd use Do.
type Guard struct {
	kv     clientv3.KV
	prefix string
	space  string
}

var _ fencing.SpaceGuard = (*Guard)(nil)

// New returns a guard that uses the client, or a clientv3.KV of it. It does no I/O. The error is a *fencing.InvalidError that
// names what cannot be used.
func New(kv clientv3.KV, o *Options) (*Guard, error) {
	if o == nil {
		o = &Options{}
	}
	if kv == nil {
		return nil, fmt.Errorf("etcdguard: new: %w", &fencing.InvalidError{What: "client", Why: "it is nil"})
	}
	if err := fencing.ValidateSpace(o.Space); err != nil {
		return nil, fmt.Errorf("etcdguard: new: %w", err)
	}
	g := &Guard{kv: kv, prefix: o.Prefix, space: o.Space}
	if g.prefix == "" {
		g.prefix = "fencing/"
	}
	return g, nil
}

// Keys returns the keys that the guard keeps for a resource.
func (g *Guard) Keys(resource string) (token, space string) {
	return g.prefix + resource + "/token", g.prefix + resource + "/space"
}

// Check implements fencing.Guard. A write that follows is a step of its own, which others may overtake: see Do.
func (g *Guard) Check(ctx context.Context, resource string, token fencing.Token) error {
	return g.CheckFrom(ctx, "", resource, token)
}

// CheckFrom is Check for a token whose space is known.
func (g *Guard) CheckFrom(ctx context.Context, space, resource string, token fencing.Token) error {
	_, err := g.Do(ctx, fencing.Claim{Resource: resource, Token: token, Space: space})
	return err
}

// Do checks the claim and, if it is admitted, carries out ops, in one transaction and one round trip; it returns the
// responses to ops. They may be at most 126 by etcd's default, and write to none of the guard's keys. Conditions of the
// caller's own go into an OpTxn among them:
//
//	guard.Do(ctx, claim, clientv3.OpTxn([]clientv3.Cmp{driver.OwnerCmp(grant)}, []clientv3.Op{…}, nil))
func (g *Guard) Do(ctx context.Context, c fencing.Claim, ops ...clientv3.Op) (*clientv3.TxnResponse, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("etcdguard: check: %w", err)
	}
	tokenKey, spaceKey := g.Keys(c.Resource)
	look := []clientv3.Op{clientv3.OpGet(tokenKey), clientv3.OpGet(spaceKey)}
	if fencing.Refused(c, g.space) != nil {
		// The keys are read only to tell the token. Without it the claim is refused as well.
		seen := fencing.Seen{Space: g.space}
		if answer, err := g.kv.Txn(ctx).Then(look...).Commit(); err == nil {
			if read, known, err := parse(answer.Responses); err == nil && known {
				seen = read
			}
		}
		return nil, fencing.Judge(c, g.space, seen)
	}
	// A comparison of a value is false where the key is missing, so both ask for the reason to refuse. They are nested
	// because etcd joins comparisons by "and" only.
	write := append([]clientv3.Op{clientv3.OpPut(tokenKey, text(c.Token)), clientv3.OpPut(spaceKey, g.space)}, ops...)
	stale := clientv3.Compare(clientv3.Value(tokenKey), ">", text(c.Token))
	answer, err := g.kv.Txn(ctx).
		If(clientv3.Compare(clientv3.Value(spaceKey), "!=", g.space)).
		Then(look...).
		Else(clientv3.OpTxn([]clientv3.Cmp{stale}, look, write)).
		Commit()
	if err != nil {
		return nil, fmt.Errorf("etcdguard: check %q: %w", c.Resource, err)
	}
	responses := answer.Responses
	if !answer.Succeeded {
		inner := responses[0].GetResponseTxn()
		responses = inner.Responses
		if !inner.Succeeded {
			return &clientv3.TxnResponse{Header: answer.Header, Succeeded: true, Responses: responses[2:]}, nil
		}
	}
	seen, _, err := parse(responses)
	if err != nil {
		return nil, fmt.Errorf("etcdguard: check %q: %w", c.Resource, err)
	}
	if err := fencing.Judge(c, g.space, seen); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("etcdguard: check %q: the server refused %v, and %+v does not say why", c.Resource, c.Token, seen)
}

// parse reads the answer to a look at both keys. Known is false if there are none.
func parse(responses []*pb.ResponseOp) (seen fencing.Seen, known bool, err error) {
	tokens, spaces := responses[0].GetResponseRange().Kvs, responses[1].GetResponseRange().Kvs
	if len(tokens) == 0 && len(spaces) == 0 {
		return seen, false, nil
	}
	if len(tokens) == 0 || len(spaces) == 0 {
		return seen, false, errors.New("one of the guard's keys is missing")
	}
	n, err := strconv.ParseUint(string(tokens[0].Value), 10, 63)
	if err != nil || len(tokens[0].Value) != digits {
		return seen, false, fmt.Errorf("the key %s holds %q, which no guard wrote", tokens[0].Key, tokens[0].Value)
	}
	return fencing.Seen{Token: fencing.Token(n), Space: string(spaces[0].Value)}, true, nil
}

// AcceptSpace makes the resource one of the space to, whose tokens begin anew, if it is one of the space from, and reports
// whether it was. From then on guards with the space from are refused. It is an administrator's act: after the lock service
// was replaced or restored, and when no holder of the old one can write any more. An empty from names what guards without a
// space have written: the token then stays.
func (g *Guard) AcceptSpace(ctx context.Context, resource, from, to string) (bool, error) {
	err := fencing.Claim{Resource: resource, Space: to}.Validate()
	if err == nil && (to == "" || to == from) {
		err = &fencing.InvalidError{What: "space", Value: to, Why: "it is empty, or the one before"}
	}
	if err != nil {
		return false, fmt.Errorf("etcdguard: accept space %q: %w", to, err)
	}
	tokenKey, spaceKey := g.Keys(resource)
	change := []clientv3.Op{clientv3.OpPut(spaceKey, to)}
	if from != "" {
		change = append(change, clientv3.OpPut(tokenKey, text(0)))
	}
	answer, err := g.kv.Txn(ctx).If(clientv3.Compare(clientv3.Value(spaceKey), "=", from)).Then(change...).Commit()
	if err != nil {
		return false, fmt.Errorf("etcdguard: accept space %q for %q: %w", to, resource, err)
	}
	return answer.Succeeded, nil
}

// digits is how many a token takes, so that etcd, which compares values as text, compares numbers.
const digits = 19

func text(t fencing.Token) string { return fmt.Sprintf("%0*d", digits, uint64(t)) }
