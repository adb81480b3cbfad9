package etcdguard

import (
	"context"
	"errors"
	"fmt"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
)

// memoryAt is the state of the guard's keys at one revision.
type memoryAt struct {
	terms     fencing.Terms
	text      string // of the terms; empty without terms
	seen      map[string]fencing.Seen
	at        map[string]int64
	look      []clientv3.Op  // reads all of it
	unchanged []clientv3.Cmp // it is still so
}

// recall reads the terms, and the memory of the claims' resources. Without terms, or with terms of another format, it
// returns an error, and the memory has their text.
func (g *Guard) recall(ctx context.Context, claims []fencing.Claim) (memoryAt, error) {
	answer, err := g.kv.Txn(ctx).Then(g.look(claims)...).Commit()
	if err != nil {
		return memoryAt{}, err
	}
	return g.parse(claims, answer.Responses)
}

func (g *Guard) look(claims []fencing.Claim) []clientv3.Op {
	look := []clientv3.Op{clientv3.OpGet(g.TermsKey())}
	for _, c := range claims {
		look = append(look, clientv3.OpGet(g.Key(c.Resource)))
	}
	return look
}

func (g *Guard) parse(claims []fencing.Claim, responses []*pb.ResponseOp) (m memoryAt, err error) {
	m = memoryAt{look: g.look(claims), seen: map[string]fencing.Seen{}, at: map[string]int64{}}
	failed := fencing.ErrTermsLost
	for i, response := range responses {
		key := g.TermsKey()
		if i > 0 {
			key = g.Key(claims[i-1].Resource)
		}
		var value string
		var revision int64
		if kvs := response.GetResponseRange().Kvs; len(kvs) > 0 {
			value, revision = string(kvs[0].Value), kvs[0].ModRevision
		}
		m.unchanged = append(m.unchanged, clientv3.Compare(clientv3.ModRevision(key), "=", revision))
		if revision == 0 {
			continue
		}
		if i == 0 {
			m.text = value
			m.terms, failed = parseTerms(value)
			continue
		}
		resource := claims[i-1].Resource
		m.at[resource] = revision
		if m.seen[resource], err = parseSeen(value); err != nil {
			return m, fmt.Errorf("the key %s: %w", key, err)
		}
	}
	return m, failed
}

// The values are the texts of package fencing. Format 1 had epoch, token and sequence of a resource, which keeps them
// until it is written to, and epoch, floor and space of the terms, until they are migrated.

func parseSeen(text string) (fencing.Seen, error) {
	if words := strings.Split(text, " "); len(words) == 3 {
		return memory.OlderSeen(words[0], words[1], words[2])
	}
	return fencing.ParseSeen(text)
}

func parseTerms(text string) (fencing.Terms, error) {
	terms, err := fencing.ParseTerms(text)
	if err == nil {
		return terms, nil
	}
	if _, older := olderTerms(text); older == nil {
		return terms, memory.Older()
	}
	return terms, err
}

func olderTerms(text string) (fencing.Terms, error) {
	words := strings.SplitN(text, " ", 3)
	if len(words) != 3 {
		return fencing.Terms{}, &fencing.VersionError{Text: text, Want: fencing.Format}
	}
	return memory.OlderTerms(words[0], words[1], words[2])
}

// Create makes the guard's terms, with a random ID, before the first check. Existing terms stay unchanged; in another
// format they are fencing.ErrGuardVersion, see Migrate. Without terms, but with a resource that the guard has seen,
// the error is fencing.ErrTermsLost.
func (g *Guard) Create(ctx context.Context) error {
	m, err := g.recall(ctx, nil)
	if errors.Is(err, fencing.ErrTermsLost) {
		// The transaction writes only if no key has the prefix of resources. Another client may be faster.
		nothing := clientv3.Compare(clientv3.CreateRevision(g.Key("")).WithPrefix(), "=", 0)
		_, err = g.kv.Txn(ctx).If(append(m.unchanged, nothing)...).
			Then(clientv3.OpPut(g.TermsKey(), fencing.NewTerms().String())).Commit()
		if err == nil {
			_, err = g.recall(ctx, nil)
		}
	}
	if err != nil {
		return fmt.Errorf("etcdguard: create: %w", err)
	}
	return nil
}

// Migrate converts the guard's terms from format 1 to the current format, with a new ID; earlier versions of this
// package fail on each check from then on. The memory of resources is readable in both formats. Migrate has no effect
// on terms of the current format.
func (g *Guard) Migrate(ctx context.Context) error {
	for {
		m, err := g.recall(ctx, nil)
		var version *fencing.VersionError
		if errors.As(err, &version) && version.Found == 1 {
			m.terms, err = olderTerms(m.text)
		} else if err == nil {
			return nil
		}
		var done *clientv3.TxnResponse
		if err == nil {
			done, err = g.kv.Txn(ctx).If(m.unchanged...).Then(clientv3.OpPut(g.TermsKey(), m.terms.String())).Commit()
		}
		if err != nil {
			return fmt.Errorf("etcdguard: migrate: %w", err)
		}
		if done.Succeeded {
			return nil
		}
	}
}

// Terms returns the guard's terms; see fencing.Keeper.
func (g *Guard) Terms(ctx context.Context) (fencing.Terms, error) {
	m, err := g.recall(ctx, nil)
	if err != nil {
		return fencing.Terms{}, fmt.Errorf("etcdguard: terms: %w", err)
	}
	return m.terms, nil
}

// Seen returns the guard's memory of a resource; see fencing.Keeper.
func (g *Guard) Seen(ctx context.Context, resource string) (fencing.Seen, error) {
	m, err := g.recall(ctx, []fencing.Claim{{Resource: resource}})
	if err != nil {
		return fencing.Seen{}, fmt.Errorf("etcdguard: seen %q: %w", resource, err)
	}
	return m.seen[resource], nil
}

// Accept restarts the guard; see fencing.Keeper.
func (g *Guard) Accept(ctx context.Context, space string, floor fencing.Token) error {
	return g.change(ctx, "accept", func(t fencing.Terms, err error) (fencing.Terms, error) {
		if errors.Is(err, fencing.ErrTermsLost) {
			t, err = fencing.LostTerms(), nil
		}
		if err != nil {
			return t, err
		}
		return t.Accept(space, floor)
	})
}

// Raise raises the floor; see fencing.Keeper.
func (g *Guard) Raise(ctx context.Context, floor fencing.Token) error {
	return g.change(ctx, "raise", func(t fencing.Terms, err error) (fencing.Terms, error) {
		if err != nil {
			return t, err
		}
		return t.Raise(floor)
	})
}

func (g *Guard) change(ctx context.Context, call string, f func(fencing.Terms, error) (fencing.Terms, error)) error {
	for {
		m, err := g.recall(ctx, nil)
		if err == nil {
			err = g.memory.Check(m.terms)
		}
		after, err := f(m.terms, err)
		var answer *clientv3.TxnResponse
		if err == nil {
			answer, err = g.kv.Txn(ctx).If(m.unchanged...).Then(clientv3.OpPut(g.TermsKey(), after.String())).Commit()
		}
		if err != nil {
			return fmt.Errorf("etcdguard: %s: %w", call, err)
		}
		if answer.Succeeded {
			return nil
		}
	}
}

// Clean removes entries that the floor and the epoch make needless; see fencing.Keeper.
func (g *Guard) Clean(ctx context.Context) (removed int64, _ error) {
	const page = 100
	terms, err := g.Terms(ctx)
	if err == nil {
		err = g.memory.Check(terms)
	}
	if err != nil {
		return 0, err
	}
	from, end := g.Key(""), clientv3.GetPrefixRangeEnd(g.Key(""))
	for {
		answer, err := g.kv.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(page))
		if err != nil {
			return removed, fmt.Errorf("etcdguard: clean: %w", err)
		}
		for _, kv := range answer.Kvs {
			key := string(kv.Key)
			from = key + "\x00"
			if seen, err := parseSeen(string(kv.Value)); err != nil || !terms.Needless(seen) {
				continue
			}
			done, err := g.kv.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", kv.ModRevision)).
				Then(clientv3.OpDelete(key)).Commit()
			if err != nil {
				return removed, fmt.Errorf("etcdguard: clean: %w", err)
			}
			if done.Succeeded {
				removed++
			}
		}
		if !answer.More {
			return removed, nil
		}
	}
}
