package fencing

// The operator's side. A guard never forgets automatically: an apparent fault (smaller tokens, another space) can be
// a stale writer, so an operator who knows the cause has to decide. docs/FENCING.md, "The day after", has the
// occasions.

import (
	"context"
	"fmt"
	"time"
)

// Keeper is the operator's side of a guard: what `fencelock guard` calls. All guards of this module are keepers.
type Keeper interface {
	// Create makes the guard's memory, with a random ID (Terms.ID), before the first check. An existing memory stays
	// unchanged. If the terms were lost but other memory exists, the error is ErrTermsLost: only Accept repairs that.
	Create(ctx context.Context) error

	// Migrate converts a memory of an earlier format to the current one, with a new ID. Earlier versions of the guard
	// refuse all claims from then on. Migrate has no effect on the current format, and returns ErrGuardVersion for a
	// later one.
	Migrate(ctx context.Context) error

	// Terms returns the guard's terms.
	Terms(ctx context.Context) (Terms, error)

	// Seen returns the guard's memory of one resource; the zero value for an unknown resource.
	Seen(ctx context.Context, resource string) (Seen, error)

	// Accept resets the guard: it forgets all tokens, and admits tokens of the space that are not below floor. Use it
	// after the lock service was replaced (the new space, and floor 0), after the guarded store was restored from a
	// backup, and after a client showed a token that no lock service issued (the same space, and as floor a newly
	// issued token). First make sure that no earlier holder can still write: the guard has forgotten its tokens.
	//
	// If the terms are lost (ErrTermsLost) it makes new ones, with a new ID, so that guards that have seen the old ID
	// return ErrGuardID until they are created again.
	//
	// It takes effect in one step, without a concurrent check. It raises the epoch, so it costs the same for one
	// resource and for a million.
	Accept(ctx context.Context, space string, floor Token) error

	// Raise makes floor the smallest admitted token, and keeps the memory. A floor below the current one is
	// an *InvalidError.
	Raise(ctx context.Context, floor Token) error

	// Clean removes the memory of resources with tokens that the floor, or the epoch, refuses anyway, and returns the
	// number of removed resources.
	Clean(ctx context.Context) (resources int64, err error)
}

// LostTerms returns the argument of Accept for lost terms: a new ID, and the seconds since 1970 as the epoch, so that
// the next one is above each that was.
func LostTerms() Terms {
	return Terms{ID: NewNonce(), Epoch: uint64(max(0, time.Now().Unix()))} //nolint:gosec // not negative
}

// Accept returns the terms of a guard that starts over; see Keeper. An *InvalidError for a space that cannot be
// remembered, or a floor above MaxToken.
func (t Terms) Accept(space string, floor Token) (Terms, error) {
	err := ValidateSpace(space)
	if err == nil && floor > MaxToken {
		err = &InvalidError{
			What: "floor", Value: floor.String(), Why: fmt.Sprintf("it is not exclusive, or greater than %v", MaxToken)}
	}
	return Terms{ID: t.ID, Epoch: t.Epoch + 1, Pinned: true, Space: space, Floor: floor}, err
}

// Raise returns the terms with a higher floor; see Keeper. It returns an *InvalidError, and the same terms, for a
// floor above MaxToken or below the current one: lowering it would admit refused holders.
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

// Needless reports whether the memory of a resource can be removed: all claims that it refuses are refused without
// it. A guard that removes any other entry admits a stale writer. The floor makes no entry with a generation
// needless: it does not refuse a greater token of an earlier generation.
func (t Terms) Needless(seen Seen) bool {
	return seen.Epoch < t.Epoch || seen.Generation == Generation{} && seen.Token < t.Floor
}
