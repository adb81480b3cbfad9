package redisguard

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/fencing"
)

// hash is what one of the guard's keys holds.
type hash struct {
	seen  fencing.Seen
	space string // of the terms
}

func (g *Guard) look(ctx context.Context, key string) (h hash, known bool, _ error) {
	fields, err := look.Run(ctx, g.client, []string{key}).StringSlice()
	if err != nil || len(fields) != 4 || fields[0] == "" {
		return h, false, err
	}
	var number [3]uint64
	for i, at := range []int{0, 2, 3} {
		if fields[at] == "" {
			continue
		}
		if number[i], err = strconv.ParseUint(fields[at], 10, 63); err != nil {
			return h, false, fmt.Errorf("the key %s holds %q, which no guard wrote", key, fields)
		}
	}
	return hash{fencing.Seen{Epoch: number[0], Token: fencing.Token(number[1]), Sequence: number[2]}, fields[1]}, true,
		nil
}

// Terms returns what the guard remembers as a whole; see fencing.Keeper.
func (g *Guard) Terms(ctx context.Context) (fencing.Terms, error) {
	h, _, err := g.look(ctx, g.TermsKey())
	if err != nil {
		return fencing.Terms{}, fmt.Errorf("redisguard: terms: %w", err)
	}
	return fencing.Terms{Epoch: h.seen.Epoch, Space: h.space, Floor: h.seen.Token}, nil
}

// Seen returns what the guard remembers of a resource; see fencing.Keeper.
func (g *Guard) Seen(ctx context.Context, resource string) (fencing.Seen, error) {
	h, _, err := g.look(ctx, g.Key(resource))
	if err != nil {
		return fencing.Seen{}, fmt.Errorf("redisguard: seen %q: %w", resource, err)
	}
	return h.seen, nil
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
	fail := func(err error) error { return fmt.Errorf("redisguard: %s: %w", call, err) }
	for {
		before, err := g.Terms(ctx)
		if err != nil {
			return fail(err)
		}
		after, err := f(before)
		if err != nil {
			return fail(err)
		}
		done, err := change.Run(ctx, g.client, []string{g.TermsKey()}, digits(before.Epoch),
			digits(uint64(before.Floor)),
			digits(after.Epoch), after.Space, digits(uint64(after.Floor))).Bool()
		if err != nil {
			return fail(err)
		}
		if done {
			return nil
		}
	}
}

// Clean forgets what the floor and the epoch make needless; see fencing.Keeper. It looks at every key of the server, a
// few at a time.
func (g *Guard) Clean(ctx context.Context) (removed int64, _ error) {
	terms, err := g.Terms(ctx)
	if err != nil {
		return 0, err
	}
	sweep := func(ctx context.Context, client redis.Cmdable) error {
		keys := client.Scan(ctx, 0, glob(g.prefix)+"{*}", 1000).Iterator()
		for keys.Next(ctx) {
			n, err := forget.Run(ctx, g.client, []string{keys.Val()}, digits(terms.Epoch),
				digits(uint64(terms.Floor))).Int64()
			if err != nil {
				return err
			}
			removed += n
		}
		return keys.Err()
	}
	if cluster, ok := g.client.(*redis.ClusterClient); ok {
		var nodes []*redis.Client
		one := make(chan struct{}, 1) // ForEachMaster calls its function in many goroutines
		err = cluster.ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
			one <- struct{}{}
			nodes = append(nodes, node)
			<-one
			return nil
		})
		for _, node := range nodes {
			if err == nil {
				err = sweep(ctx, node)
			}
		}
	} else {
		err = sweep(ctx, g.client)
	}
	if err != nil {
		return removed, fmt.Errorf("redisguard: clean: %w", err)
	}
	return removed, nil
}

// glob returns a pattern that matches the text and nothing else.
func glob(text string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(text)
}
