package etcdguard

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/fencing"
)

// memory is what the guard's keys hold at one revision.
type memory struct {
	terms     fencing.Terms
	termsAt   int64 // mod revision; zero: there are none
	seen      map[string]fencing.Seen
	at        map[string]int64
	look      []clientv3.Op  // reads all of it
	unchanged []clientv3.Cmp // it is still so
}

// recall reads the terms, and what is remembered of the claims' resources.
func (g *Guard) recall(ctx context.Context, claims []fencing.Claim) (memory, error) {
	answer, err := g.kv.Txn(ctx).Then(g.look(claims)...).Commit()
	if err != nil {
		return memory{}, err
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

func (g *Guard) parse(claims []fencing.Claim, responses []*pb.ResponseOp) (memory, error) {
	m := memory{look: g.look(claims), seen: map[string]fencing.Seen{}, at: map[string]int64{}}
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
		var err error
		if i == 0 {
			m.termsAt = revision
			m.terms, err = parseTerms(value)
		} else {
			resource := claims[i-1].Resource
			m.at[resource] = revision
			m.seen[resource], err = parseSeen(value)
		}
		if err != nil {
			return m, fmt.Errorf("the key %s holds %q, which no guard wrote", key, value)
		}
	}
	return m, nil
}

// The values are words of decimal digits: epoch, token and sequence of a resource; epoch, floor and space of the terms.

func seenText(s fencing.Seen) string {
	return fmt.Sprintf("%d %d %d", s.Epoch, uint64(s.Token), s.Sequence)
}

func parseSeen(text string) (s fencing.Seen, err error) {
	number, rest, err := numbers(text, 3)
	if err != nil || rest != "" {
		return s, strconv.ErrSyntax
	}
	return fencing.Seen{Epoch: number[0], Token: fencing.Token(number[1]), Sequence: number[2]}, nil
}

func termsText(t fencing.Terms) string {
	return fmt.Sprintf("%d %d %s", t.Epoch, uint64(t.Floor), t.Space)
}

func parseTerms(text string) (t fencing.Terms, err error) {
	number, space, err := numbers(text, 2)
	if err != nil {
		return t, err
	}
	return fencing.Terms{Epoch: number[0], Floor: fencing.Token(number[1]), Space: space}, nil
}

// numbers reads n of them, and returns what follows.
func numbers(text string, n int) (list []uint64, rest string, _ error) {
	words := strings.SplitN(text, " ", n+1)
	if len(words) < n {
		return nil, "", strconv.ErrSyntax
	}
	for _, word := range words[:n] {
		number, err := strconv.ParseUint(word, 10, 63)
		if err != nil {
			return nil, "", err
		}
		list = append(list, number)
	}
	return list, strings.Join(words[n:], ""), nil
}

// Terms returns what the guard remembers as a whole; see fencing.Keeper.
func (g *Guard) Terms(ctx context.Context) (fencing.Terms, error) {
	m, err := g.recall(ctx, nil)
	if err != nil {
		return fencing.Terms{}, fmt.Errorf("etcdguard: terms: %w", err)
	}
	return m.terms, nil
}

// Seen returns what the guard remembers of a resource; see fencing.Keeper.
func (g *Guard) Seen(ctx context.Context, resource string) (fencing.Seen, error) {
	m, err := g.recall(ctx, []fencing.Claim{{Resource: resource}})
	if err != nil {
		return fencing.Seen{}, fmt.Errorf("etcdguard: seen %q: %w", resource, err)
	}
	return m.seen[resource], nil
}

// Accept makes the guard begin anew; see fencing.Keeper.
func (g *Guard) Accept(ctx context.Context, space string, floor fencing.Token) error {
	return g.change(ctx, "accept", func(t fencing.Terms) (fencing.Terms, error) { return t.Accept(space, floor) })
}

// Raise raises the floor; see fencing.Keeper.
func (g *Guard) Raise(ctx context.Context, floor fencing.Token) error {
	return g.change(ctx, "raise", func(t fencing.Terms) (fencing.Terms, error) { return t.Raise(floor) })
}

func (g *Guard) change(ctx context.Context, call string, f func(fencing.Terms) (fencing.Terms, error)) error {
	fail := func(err error) error { return fmt.Errorf("etcdguard: %s: %w", call, err) }
	for {
		m, err := g.recall(ctx, nil)
		if err != nil {
			return fail(err)
		}
		after, err := f(m.terms)
		if err != nil {
			return fail(err)
		}
		answer, err := g.kv.Txn(ctx).If(m.unchanged...).Then(clientv3.OpPut(g.TermsKey(), termsText(after))).Commit()
		if err != nil {
			return fail(err)
		}
		if answer.Succeeded {
			return nil
		}
	}
}

// Clean forgets what the floor and the epoch make needless; see fencing.Keeper.
func (g *Guard) Clean(ctx context.Context) (removed int64, _ error) {
	const page = 100
	terms, err := g.Terms(ctx)
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
