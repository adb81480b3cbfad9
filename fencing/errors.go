package fencing

// The refusals. Each reason is a sentinel to branch on and a type that carries both tokens, so that a log line of a
// refusal names the overtaken and the overtaking hold. Any other error (see Refusal) is a fault of the store, and not
// a verdict on the claim.

import (
	"errors"
	"fmt"
)

// Why a guard refuses, to branch on with errors.Is.
var (
	// ErrStale: a higher token, or one of a later generation, was admitted for this resource before. A *StaleError is in
	// the chain.
	ErrStale = errors.New("fencing: token is stale")
	// ErrNoToken: the token is zero. The usual cause is a lease of the efficiency tier. A *NoTokenError is in the
	// chain.
	ErrNoToken = errors.New("fencing: no token")
	// ErrNotExclusive: the token is of a shared hold or of permits, which do not exclude other writers. A
	// *NotExclusiveError is in the chain.
	ErrNotExclusive = errors.New("fencing: token does not belong to an exclusive hold")
	// ErrSpace: the token comes from another cluster than the one the guard trusts, or its origin is unknown, or its
	// generation has the number of another one (see Generation). A *SpaceError is in the chain.
	ErrSpace = errors.New("fencing: token belongs to another space")
	// ErrHold: another hold with the same token was admitted for this resource: the lock service has issued the token
	// twice, as after a restore. A *HoldError is in the chain.
	ErrHold = errors.New("fencing: token belongs to another hold")
	// ErrRepeated: the hold has made the write with this Claim.Sequence, which is not executed twice. A *SequenceError is
	// in the chain.
	ErrRepeated = errors.New("fencing: write is repeated")
	// ErrReordered: the hold has made a write with a later Claim.Sequence, or one of a set of claims is repeated and
	// another is not. A *SequenceError is in the chain.
	ErrReordered = errors.New("fencing: write is reordered")
	// ErrNested: a guarded section within another one of the same guard, or a check in a savepoint, where a rollback
	// would undo the check and keep other writes.
	ErrNested = errors.New("fencing: nested guarded section")
	// ErrTermsLost: the guard has no terms, or was used in a later epoch than theirs. The guard was never created, or
	// its terms were deleted, or a part of the store was restored. The guard refuses all claims until it is created
	// or an operator accepts a space; see Keeper.
	ErrTermsLost = errors.New("fencing: the guard's terms are missing: call Create (fencelock guard install) before " +
		"the first check, and after a loss Accept (fencelock guard accept)")
	// ErrGuardVersion: the guard's memory has another format than this version of the package writes. The guard
	// refuses all claims. A *VersionError is in the chain.
	ErrGuardVersion = errors.New("fencing: the guard's memory has another format")
	// ErrGuardID: the guard's memory has another ID than Options.ID, or than this guard saw first: the store was
	// dropped and recreated, or is another store.
	ErrGuardID = errors.New("fencing: the guard's memory has another ID than before")
	// ErrUnfenced: the transaction of a guarded section ended before the section did, by an implicit commit, a deadlock
	// or a COMMIT in a statement, for example. Other holders may have written since, and part of the section's writes
	// may be durable. It is no verdict on the claim, and guards do not retry such a section.
	ErrUnfenced = errors.New("fencing: the transaction ended inside its guarded section: part of it may be durable")
	// ErrUnknown: a guarded section was verified, and the answer to its commit is missing or ambiguous: it is committed
	// or not, as a whole.
	ErrUnknown = errors.New("fencing: the outcome of the guarded section's commit is unknown")
	// ErrInvalid: a resource or space that no guard can remember. An *InvalidError is in the chain.
	ErrInvalid = errors.New("fencing: invalid claim")
)

// StaleError has both tokens of a refused write.
type StaleError struct {
	Resource string
	Token    Token // the refused one
	Highest  Token // the highest one admitted before

	Generation        Generation // of the refused token
	HighestGeneration Generation // of the highest one
}

// Error names the resource and both tokens, and both generations if they differ.
func (e *StaleError) Error() string {
	if e.Generation != e.HighestGeneration {
		return fmt.Sprintf("fencing: token %v of generation %d for %q is stale: %v of generation %d was admitted before",
			e.Token, e.Generation.Number, e.Resource, e.Highest, e.HighestGeneration.Number)
	}
	return fmt.Sprintf("fencing: token %v for %q is stale: %v was admitted before", e.Token, e.Resource, e.Highest)
}

// Is reports true for ErrStale.
func (e *StaleError) Is(target error) bool { return target == ErrStale }

// NoTokenError reports a write with the zero token.
type NoTokenError struct {
	Resource string
	Highest  Token // the highest one admitted before; zero without one, or if the resource could not be asked
}

// Error names the resource and the usual cause.
func (e *NoTokenError) Error() string {
	return fmt.Sprintf("fencing: no token for %q%s: leases of the efficiency tier carry none",
		e.Resource, before(e.Highest))
}

// Is reports true for ErrNoToken.
func (e *NoTokenError) Is(target error) bool { return target == ErrNoToken }

// NotExclusiveError reports a write with the token of a shared hold or of permits.
type NotExclusiveError struct {
	Resource string
	Token    Token // the refused one
	Highest  Token // the highest one admitted before; zero without one, or if the resource could not be asked
}

// Error names the resource and the token.
func (e *NotExclusiveError) Error() string {
	return fmt.Sprintf("fencing: token %v for %q is not of an exclusive hold%s", e.Token, e.Resource, before(e.Highest))
}

// Is reports true for ErrNotExclusive.
func (e *NotExclusiveError) Is(target error) bool { return target == ErrNotExclusive }

// SpaceError has both spaces and both tokens of a refused write. If the spaces are equal, the generations differ.
type SpaceError struct {
	Resource string
	Token    Token  // the refused one
	Highest  Token  // the highest one admitted before; zero without one, or if the resource could not be asked
	Space    string // the refused one; empty if unknown
	Want     string // the one of the guard, or of the claims admitted before

	Generation     Generation // of the refused token
	WantGeneration Generation // of the claims admitted before
}

// Error names the resource, and both spaces or both generations.
func (e *SpaceError) Error() string {
	if e.Space == e.Want {
		return fmt.Sprintf("fencing: token %v for %q is of generation %v, %v was admitted before: "+
			"two restores of the lock service did not know of each other",
			e.Token, e.Resource, e.Generation, e.WantGeneration)
	}
	return fmt.Sprintf("fencing: token %v for %q is of space %q, the guard accepts %q%s",
		e.Token, e.Resource, e.Space, e.Want, before(e.Highest))
}

// Is reports true for ErrSpace.
func (e *SpaceError) Is(target error) bool { return target == ErrSpace }

// HoldError is the refusal of a write by another hold than the guard admitted with the same token.
type HoldError struct {
	Resource string
	Token    Token
	Nonce    Nonce // of the refused hold; zero if the claim has no nonce
	Want     Nonce // of the hold that was admitted
}

// Error names the resource, the token and both holds.
func (e *HoldError) Error() string {
	return fmt.Sprintf("fencing: token %v for %q was admitted for the hold %v, this one is %q",
		e.Token, e.Resource, e.Want, e.Nonce)
}

// Is reports true for ErrHold.
func (e *HoldError) Is(target error) bool { return target == ErrHold }

// SequenceError reports a write that the hold has already made, or that a later write has overtaken; see Claim.At.
type SequenceError struct {
	Resource string
	Token    Token
	Sequence uint64 // the refused one
	Last     uint64 // the last one admitted with that token

	// Mixed is the resources of a set of claims that are repeated, where others have sequences that are new: the set is
	// not the write that was made. Empty for other reasons.
	Mixed []string
}

// Error returns a message that distinguishes a repetition from a late write.
func (e *SequenceError) Error() string {
	what := "comes after a later one"
	switch {
	case len(e.Mixed) > 0:
		return fmt.Sprintf("fencing: some writes of this set were made before, with token %v, and others were not: "+
			"those for %q were", e.Token, e.Mixed)
	case e.Sequence == e.Last:
		what = "was made before"
	}
	return fmt.Sprintf("fencing: write %d with token %v for %q %s (the last was %d)",
		e.Sequence, e.Token, e.Resource, what, e.Last)
}

// Is reports true for ErrRepeated if the write was the last one and is not mixed with others, and else for
// ErrReordered.
func (e *SequenceError) Is(target error) bool {
	repeated := e.Sequence == e.Last && len(e.Mixed) == 0
	return target == ErrRepeated && repeated || target == ErrReordered && !repeated
}

// VersionError names the format of a guard's memory, and the format that this version of the package reads and
// writes.
type VersionError struct {
	Found int    // 0: it is not known; see Text
	Text  string // the text found, if Found is 0
	Want  int    // Format
}

// Error names both formats, and the remedy.
func (e *VersionError) Error() string {
	switch {
	case e.Found == 0:
		return fmt.Sprintf("fencing: the guard's memory holds %s, which is not of format %d", quoted(e.Text), e.Want)
	case e.Found < e.Want:
		return fmt.Sprintf("fencing: the guard's memory has format %d, and this program reads format %d: "+
			"migrate it (Migrate, or fencelock guard migrate)", e.Found, e.Want)
	}
	return fmt.Sprintf("fencing: the guard's memory has format %d, and this program reads format %d: upgrade this program",
		e.Found, e.Want)
}

// Is reports true for ErrGuardVersion.
func (e *VersionError) Is(target error) bool { return target == ErrGuardVersion }

// before is the end of a sentence about a refused token.
func before(highest Token) string {
	if highest == 0 {
		return ""
	}
	return fmt.Sprintf(" (%v was admitted before)", highest)
}

// InvalidError names an invalid value: a mistake in the program, or a malformed header. The guard has not checked the
// claim.
type InvalidError struct {
	What  string // "resource", for example
	Value string
	Why   string
}

// Error names the value, truncated if it is long, and the problem.
func (e *InvalidError) Error() string {
	return fmt.Sprintf("fencing: %s %s: %s", e.What, quoted(e.Value), e.Why)
}

// Is reports true for ErrInvalid.
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// quoted returns s in quotes, cut where it is long.
func quoted(s string) string {
	const most = 64
	if len(s) > most {
		return fmt.Sprintf("%q...", s[:most])
	}
	return fmt.Sprintf("%q", s)
}

// Refusal reports whether err is a guard's verdict against the claim: repeating the claim is useless. Any
// other error is no verdict on the claim; the holder may retry with the same token.
//
//	switch err := guard.Check(ctx, claim); {
//	case fencing.Refusal(err): // overtaken, or never a holder: stop
//		return err
//	case err != nil: // the store does not answer: do not write, perhaps try again
//	}
func Refusal(err error) bool {
	if errors.Is(err, ErrUnfenced) {
		return false
	}
	for _, each := range []error{ErrStale, ErrNoToken, ErrNotExclusive, ErrSpace, ErrHold, ErrRepeated, ErrReordered} {
		if errors.Is(err, each) {
			return true
		}
	}
	return false
}
