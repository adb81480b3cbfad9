package fencing

// The operator's side. A guard never decides by itself to forget: what looks like a fault (tokens that fall, another
// space) can be a stale writer, so a person who knows what happened tells it. docs/FENCING.md, "The day after", has the
// occasions.

import (
	"context"
	"fmt"
)

// Keeper is the operator's side of a guard: what `fencelock guard` calls. All guards of this module are keepers.
type Keeper interface {
	// Terms returns what the guard remembers as a whole; the zero value before the first claim.
	Terms(ctx context.Context) (Terms, error)

	// Seen returns what the guard remembers of one resource; the zero value if it does not know it.
	Seen(ctx context.Context, resource string) (Seen, error)

	// Accept makes the guard begin anew: it forgets all tokens, and admits those of the space that are not below floor.
	// It is for the day after the lock service was replaced (the new space, and floor 0), after the guarded store was
	// restored from a backup, and after somebody showed a token that no lock service issued (the same space, and as
	// floor a token that was issued now). No holder from before may be able to write any more: the guard has forgotten
	// whom to refuse.
	//
	// It takes effect in one step, beside which no check runs. Forgetting is an epoch that is raised, so it costs the
	// same for one resource and for a million.
	Accept(ctx context.Context, space string, floor Token) error

	// Raise makes floor the smallest token that is admitted, and forgets nothing. A floor below the present one is an
	// *InvalidError.
	Raise(ctx context.Context, floor Token) error

	// Clean removes what is remembered of resources whose tokens the floor, or the epoch, refuses anyway, and returns
	// how many there were.
	Clean(ctx context.Context) (resources int64, err error)
}

// Accept returns the terms of a guard that begins anew; see Keeper. An *InvalidError for a space that cannot be
// remembered, or a floor above MaxToken.
func (t Terms) Accept(space string, floor Token) (Terms, error) {
	err := ValidateSpace(space)
	if err == nil && floor > MaxToken {
		err = &InvalidError{
			What: "floor", Value: floor.String(), Why: fmt.Sprintf("it is not exclusive, or greater than %v", MaxToken)}
	}
	return Terms{Epoch: t.Epoch + 1, Space: space, Floor: floor}, err
}

// Raise returns the terms with a higher floor; see Keeper. An *InvalidError, and the same terms, for a floor above
// MaxToken, or one that is lower than the present one: lowering it would admit who was refused.
func (t Terms) Raise(floor Token) (Terms, error) {
	switch {
	case floor > MaxToken:
		return t, &InvalidError{
			What: "floor", Value: floor.String(), Why: fmt.Sprintf("it is not exclusive, or greater than %v", MaxToken)}
	case floor < t.Floor:
		return t, &InvalidError{
			What: "floor", Value: floor.String(), Why: fmt.Sprintf("the present one, %v, is higher", t.Floor)}
	}
	t.Floor = floor
	return t, nil
}

// Needless reports whether nothing depends on what was seen of a resource: all tokens up to it are refused without it.
// Only such an entry may be removed; a guard that forgets another one admits a stale writer.
func (t Terms) Needless(seen Seen) bool { return seen.Epoch < t.Epoch || seen.Token < t.Floor }
