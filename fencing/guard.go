package fencing

import "context"

// Guard stands in front of a resource and admits writes in the order of their tokens.
//
// Check admits a token that is not below the highest one admitted for resource, and remembers it; otherwise it returns
// an error that wraps ErrStale, ErrNoToken, ErrNotExclusive or ErrSpace. The same token is admitted again and again: a
// hold may write many times. The remembering is atomic, and as durable as the resource that is guarded. Where the write
// and the check are not one atomic step, a write may still be overtaken between the two; guards that live in the
// resource's own transaction close that gap.
//
// An error of any other kind, a server that does not answer for example, admits nothing: the caller must not write. What
// the guard remembers may have grown all the same, which is harmless: the holder of that token tries again.
//
// Check is safe for concurrent use, unless the guard is bound to a transaction that is not, and returns within ctx.
type Guard interface {
	Check(ctx context.Context, resource string, token Token) error
}

// SpaceGuard is a Guard that can be told where a token comes from. All guards of this module are.
type SpaceGuard interface {
	Guard

	// CheckFrom is Check for a token whose space is known: Lease.TokenSpace. It is one more reason to refuse, never one
	// less. A guard that was given no space of its own accepts tokens of any, and does not look at this one.
	CheckFrom(ctx context.Context, space, resource string, token Token) error
}

// Check asks g about a claim, and tells it the claim's space if g wants to know.
func Check(ctx context.Context, g Guard, c Claim) error {
	if g, ok := g.(SpaceGuard); ok {
		return g.CheckFrom(ctx, c.Space, c.Resource, c.Token)
	}
	return g.Check(ctx, c.Resource, c.Token)
}
