package fencing

// The guard of resources that live in one process, and the reference for guards of other stores: it only applies
// Judge under a mutex.

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
	terms Terms
	seen  map[string]Seen
}

var (
	_ Guard  = (*Memory)(nil)
	_ Keeper = (*Memory)(nil)
)

// Check admits the claims or refuses them; see Guard. It does not block, but returns the error of an ended ctx
// without remembering the claims.
func (g *Memory) Check(ctx context.Context, claims Claims) error { return g.do(ctx, claims, nil) }

// Do is Check, and calls write if the claims are admitted, so that check and write are one step for all other users of
// the guard. It returns write's error. The tokens are remembered in any case, the sequences (Claim.Sequence) only if
// the error is nil: a failed write may be repeated.
//
// Where the hold has made the write before (ErrRepeated) write is not called a second time, and Do returns nil: a
// request repeated after a lost answer succeeds. write runs under the guard's mutex; it must not use the guard, and
// keeps all other writers waiting.
//
//	err := guard.Do(ctx, lease.Claim("accounts/42"), func() error {
//		balance["42"] -= amount
//		return nil
//	})
func (g *Memory) Do(ctx context.Context, claims Claims, write func() error) error {
	if write == nil {
		return fmt.Errorf("fencing: do: %w", &InvalidError{What: "function", Why: "it is nil"})
	}
	return g.do(ctx, claims, write)
}

func (g *Memory) do(ctx context.Context, claims Claims, write func() error) error {
	list, err := Sorted(claims)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("fencing: check %q: %w", list[0].Resource, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	recall := func(resource string) (Seen, error) { return g.seen[resource], nil }
	remember := func(claims []Claim) error {
		seen, err := JudgeAll(claims, g.terms, recall)
		if err != nil {
			return err
		}
		g.setLocked(g.terms.Pin(claims[0]))
		for i, c := range claims {
			g.seen[c.Resource] = seen[i]
		}
		return nil
	}
	if write == nil {
		return remember(Unordered(list))
	}
	if _, err := JudgeAll(list, g.terms, recall); err != nil {
		if errors.Is(err, ErrRepeated) {
			return nil
		}
		return err
	}
	if err := remember(Unordered(list)); err != nil {
		return err
	}
	if err := write(); err != nil {
		return err
	}
	return remember(list)
}

// setLocked sets the terms of the guard. The caller holds mu.
func (g *Memory) setLocked(t Terms) {
	g.terms = t
	if g.seen == nil {
		g.seen = map[string]Seen{}
	}
}

// Create has no effect, and never fails: the memory exists as long as the guard, and has no ID.
func (g *Memory) Create(context.Context) error { return nil }

// Migrate has no effect, and never fails.
func (g *Memory) Migrate(context.Context) error { return nil }

// Terms returns the guard's terms; the zero value before the first claim. It never fails.
func (g *Memory) Terms(context.Context) (Terms, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.terms, nil
}

// Seen returns the guard's memory of a resource; the zero value for an unknown resource. It never fails.
func (g *Memory) Seen(_ context.Context, resource string) (Seen, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.seen[resource], nil
}

// Accept makes the guard start over; see Keeper. Older entries stay until Clean or a claim replaces them.
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

// Clean removes entries that the floor and the epoch make needless; see Keeper. It never fails.
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
