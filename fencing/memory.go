package fencing

import (
	"context"
	"fmt"
	"sync"
)

// Memory is a Guard that remembers in memory: for tests, examples, and resources that live in this process only. It
// forgets when the process ends, and a guard that forgets admits a stale writer, so it is no guard for a database. The
// zero value is ready to use and accepts tokens of any space.
type Memory struct {
	mu      sync.Mutex // protects the following fields
	space   string     // empty: any
	highest map[string]Token
}

var _ SpaceGuard = (*Memory)(nil)

// NewMemory returns a guard that accepts tokens of one space only (Lease.TokenSpace), or of any if space is empty.
func NewMemory(space string) *Memory { return &Memory{space: space} }

// Check implements Guard. If the guard was given a space, it refuses with ErrSpace, since the token's space is not told:
// use CheckFrom.
func (g *Memory) Check(ctx context.Context, resource string, token Token) error {
	return g.CheckFrom(ctx, "", resource, token)
}

// CheckFrom is Check for a token whose space is known.
func (g *Memory) CheckFrom(ctx context.Context, space, resource string, token Token) error {
	return g.Do(ctx, Claim{Resource: resource, Token: token, Space: space}, nil)
}

// Do is CheckFrom, and calls write if the claim is admitted, so that check and write are one step for everybody else who
// uses the guard. It returns what write returns. The token is remembered whatever that is. Write must not use the guard.
func (g *Memory) Do(ctx context.Context, c Claim, write func() error) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("fencing: check %q: %w", c.Resource, err)
	}
	if err := c.Validate(); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := Judge(c, g.space, Seen{Token: g.highest[c.Resource], Space: g.space}); err != nil {
		return err
	}
	if g.highest == nil {
		g.highest = map[string]Token{}
	}
	g.highest[c.Resource] = c.Token
	if write == nil {
		return nil
	}
	return write()
}

// AcceptSpace makes the guard accept tokens of another space from now on, and forget the tokens of the old one. It is an
// administrator's act: after the lock service was replaced or restored, and when no holder of the old one can write any
// more.
func (g *Memory) AcceptSpace(space string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.space = space
	g.highest = nil
}
