package redisguard

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
)

// terms reads the terms, and their text.
func (g *Guard) terms(ctx context.Context) (fencing.Terms, string, error) {
	text, err := lookTerms.Run(ctx, g.client, []string{g.TermsKey()}).Text()
	if err != nil {
		return fencing.Terms{}, "", err
	}
	terms, err := parseTerms(text)
	return terms, text, err
}

// older is the prefix of the texts of the terms of format 1, as lookTerms makes them.
const older = "1\n"

func parseTerms(text string) (fencing.Terms, error) {
	switch {
	case text == "":
		return fencing.Terms{}, fencing.ErrTermsLost
	case strings.HasPrefix(text, older):
		return fencing.Terms{}, memory.Older()
	}
	return fencing.ParseTerms(text)
}

func parseSeen(text string) (fencing.Seen, error) {
	if text == "" {
		return fencing.Seen{}, nil
	}
	return fencing.ParseSeen(text)
}

// Create makes the guard's terms, with a random ID, before the first check. Existing terms stay unchanged; in another
// format they are fencing.ErrGuardVersion, see Migrate. Without terms it scans all keys of the server, a few at a
// time; if the guard has seen a resource, the error is fencing.ErrTermsLost.
func (g *Guard) Create(ctx context.Context) error {
	_, _, err := g.terms(ctx)
	if errors.Is(err, fencing.ErrTermsLost) {
		err = g.each(ctx, func(string) error { return fencing.ErrTermsLost })
		if err == nil {
			// Another client may be faster.
			err = change.Run(ctx, g.client, []string{g.TermsKey()}, "", fencing.NewTerms().String()).Err()
		}
	}
	if err != nil {
		return fmt.Errorf("redisguard: create: %w", err)
	}
	return nil
}

// Migrate converts the guard's terms from format 1 to the current format, with a new ID; earlier versions of this
// package fail on each check from then on. The memory of resources is readable in both formats. Migrate has no effect
// on terms of the current format.
func (g *Guard) Migrate(ctx context.Context) error {
	for {
		terms, text, err := g.terms(ctx)
		if old, is := strings.CutPrefix(text, older); is {
			parts := strings.SplitN(old, "\n", 3)
			terms, err = memory.OlderTerms(parts[0], parts[1], parts[2])
		} else if err == nil {
			return nil
		}
		var done bool
		if err == nil {
			done, err = change.Run(ctx, g.client, []string{g.TermsKey()}, text, terms.String()).Bool()
		}
		if err != nil {
			return fmt.Errorf("redisguard: migrate: %w", err)
		}
		if done {
			return nil
		}
	}
}

// Terms returns the guard's terms; see fencing.Keeper.
func (g *Guard) Terms(ctx context.Context) (fencing.Terms, error) {
	terms, _, err := g.terms(ctx)
	if err != nil {
		return fencing.Terms{}, fmt.Errorf("redisguard: terms: %w", err)
	}
	return terms, nil
}

// Seen returns the guard's memory of a resource; see fencing.Keeper.
func (g *Guard) Seen(ctx context.Context, resource string) (fencing.Seen, error) {
	_, _, err := g.terms(ctx)
	var seen fencing.Seen
	if err == nil {
		seen, err = g.seen(ctx, g.Key(resource))
	}
	if err != nil {
		return fencing.Seen{}, fmt.Errorf("redisguard: seen %q: %w", resource, err)
	}
	return seen, nil
}

func (g *Guard) seen(ctx context.Context, key string) (fencing.Seen, error) {
	text, err := look.Run(ctx, g.client, []string{key}).Text()
	if err != nil {
		return fencing.Seen{}, err
	}
	return parseSeen(text)
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
		before, text, err := g.terms(ctx)
		if err == nil {
			err = g.memory.Check(before)
		}
		after, err := f(before, err)
		var done bool
		if err == nil {
			done, err = change.Run(ctx, g.client, []string{g.TermsKey()}, text, after.String()).Bool()
		}
		if err != nil {
			return fmt.Errorf("redisguard: %s: %w", call, err)
		}
		if done {
			return nil
		}
	}
}

// Clean removes entries that the floor and the epoch make needless; see fencing.Keeper. It scans all keys of the
// server, a few at a time.
func (g *Guard) Clean(ctx context.Context) (removed int64, _ error) {
	terms, _, err := g.terms(ctx)
	if err == nil {
		err = g.memory.Check(terms)
	}
	if err == nil {
		err = g.each(ctx, func(key string) error {
			seen, err := g.seen(ctx, key)
			if err != nil || !terms.Needless(seen) {
				return err
			}
			n, err := forget.Run(ctx, g.client, []string{key}, seen.String()).Int64()
			removed += n
			return err
		})
	}
	if err != nil {
		return removed, fmt.Errorf("redisguard: clean: %w", err)
	}
	return removed, nil
}

// each calls f with the key of every resource that the guard has seen, until it fails.
func (g *Guard) each(ctx context.Context, f func(key string) error) error {
	sweep := func(ctx context.Context, client redis.Cmdable) error {
		keys := client.Scan(ctx, 0, glob(g.prefix)+"{*}", 1000).Iterator()
		for keys.Next(ctx) {
			if err := f(keys.Val()); err != nil {
				return err
			}
		}
		return keys.Err()
	}
	var nodes []*redis.Client
	one := make(chan struct{}, 1) // the client calls its function in many goroutines
	add := func(_ context.Context, node *redis.Client) error {
		one <- struct{}{}
		nodes = append(nodes, node)
		<-one
		return nil
	}
	var err error
	switch client := g.client.(type) {
	case *redis.ClusterClient:
		err = client.ForEachMaster(ctx, add)
	case *redis.Ring:
		err = client.ForEachShard(ctx, add)
	default:
		return sweep(ctx, client)
	}
	for _, node := range nodes {
		if err == nil {
			err = sweep(ctx, node)
		}
	}
	return err
}

// glob returns a pattern that matches only the text.
func glob(text string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(text)
}
