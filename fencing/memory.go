package fencing

// The guard of resources that live in one process, and the reference for guards of other stores: it applies Judge under
// a mutex and does nothing else.

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Memory is a Guard that remembers in memory: for tests, examples, and resources that live in this process only. It
// forgets when the process ends, and a guard that forgets admits a stale writer, so it is no guard for a database. The
// zero value is ready to use. It is safe for concurrent use; it grows by one entry for each resource, until Clean.
type Memory struct {
	mu    sync.Mutex // protects the following fields
	known bool       // the terms are set
	terms Terms
	seen  map[string]Seen
}

var (
	_ Guard  = (*Memory)(nil)
	_ Keeper = (*Memory)(nil)
)

// Check admits the claims or refuses them; see Guard. It does not wait, but an ended ctx is its error, and nothing is
// remembered then.
func (g *Memory) Check(ctx context.Context, claims Claims) error { return g.Do(ctx, claims, nil) }

// Do is Check, and calls write if the claims are admitted, so that check and write are one step for everybody else who
// uses the guard. It returns what write returns. The tokens are remembered whatever that is.
//
// Where the hold has made the write before (ErrRepeated) write is not called again, and Do returns nil: a request that
// was repeated after a lost answer succeeds. write runs under the guard's mutex; it must not use the guard, and keeps
// all other writers waiting.
//
//	err := guard.Do(ctx, lease.Claim("accounts/42"), func() error {
//		balance["42"] -= amount
//		return nil
//	})
func (g *Memory) Do(ctx context.Context, claims Claims, write func() error) error {
	list, err := Sorted(claims)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("fencing: check %q: %w", list[0].Resource, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	terms := g.terms
	if !g.known {
		terms = First(list[0])
	}
	remember, err := JudgeAll(list, terms, func(resource string) (Seen, error) { return g.seen[resource], nil })
	if write != nil && errors.Is(err, ErrRepeated) {
		return nil
	}
	if err != nil {
		return err
	}
	g.setLocked(terms)
	for i, c := range list {
		g.seen[c.Resource] = remember[i]
	}
	if write == nil {
		return nil
	}
	return write()
}

// setLocked makes the terms those of the guard. The caller holds mu.
func (g *Memory) setLocked(t Terms) {
	g.known, g.terms = true, t
	if g.seen == nil {
		g.seen = map[string]Seen{}
	}
}

// Terms returns what the guard remembers as a whole; the zero value before the first claim. It never fails.
func (g *Memory) Terms(context.Context) (Terms, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.terms, nil
}

// Seen returns what the guard remembers of a resource; the zero value if it does not know it. It never fails.
func (g *Memory) Seen(_ context.Context, resource string) (Seen, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.seen[resource], nil
}

// Accept makes the guard begin anew; see Keeper. Older entries stay until Clean or a claim replaces them.
func (g *Memory) Accept(_ context.Context, space string, floor Token) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	terms, err := g.terms.Accept(space, floor)
	if err != nil {
		return err
	}
	g.setLocked(terms)
	return nil
}

// Raise raises the floor; see Keeper.
func (g *Memory) Raise(_ context.Context, floor Token) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	terms, err := g.terms.Raise(floor)
	if err != nil {
		return err
	}
	g.setLocked(terms)
	return nil
}

// Clean forgets what the floor and the epoch make needless; see Keeper. It never fails.
func (g *Memory) Clean(context.Context) (int64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := int64(0)
	for resource, seen := range g.seen {
		if g.terms.Needless(seen) {
			delete(g.seen, resource)
			n++
		}
	}
	return n, nil
}
