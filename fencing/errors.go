package fencing

// The refusals. Each reason is a sentinel to branch on and a type that carries both tokens, so that a log line of a
// refusal says who was overtaken by whom. An error that is none of these (see Refusal) is a fault of the store, and
// says nothing about the claim.

import (
	"errors"
	"fmt"
)

// Why a guard refuses, to branch on with errors.Is.
var (
	// ErrStale: a higher token was admitted for this resource before. A *StaleError is in the chain.
	ErrStale = errors.New("fencing: token is stale")
	// ErrNoToken: the token is zero. The usual cause is a lease of the efficiency tier. A *NoTokenError is in the
	// chain.
	ErrNoToken = errors.New("fencing: no token")
	// ErrNotExclusive: the token is of a shared hold or of permits, which do not exclude other writers. A
	// *NotExclusiveError is in the chain.
	ErrNotExclusive = errors.New("fencing: token is not of an exclusive hold")
	// ErrSpace: the token comes from another cluster than the one the guard trusts, or its origin was not told. A
	// *SpaceError is in the chain.
	ErrSpace = errors.New("fencing: token is of another space")
	// ErrRepeated: the hold has made the write with this Claim.Sequence, which is not carried out twice. A
	// *SequenceError is in the chain.
	ErrRepeated = errors.New("fencing: write is repeated")
	// ErrReordered: the hold has made a write with a later Claim.Sequence. A *SequenceError is in the chain.
	ErrReordered = errors.New("fencing: write is reordered")
	// ErrNested: a guarded section within another one of the same guard, or a check in a savepoint, where a rollback
	// would undo the check and keep what others write.
	ErrNested = errors.New("fencing: nested guarded section")
	// ErrTermsLost: the guard remembers resources, and its terms are gone: somebody has deleted them, or restored a
	// part of the store. Nothing is admitted until an operator has accepted a space; see Keeper.
	ErrTermsLost = errors.New("fencing: the guard's terms are gone, though it remembers resources; accept a space")
	// ErrInvalid: a resource or space that no guard can remember. An *InvalidError is in the chain.
	ErrInvalid = errors.New("fencing: invalid claim")
)

// StaleError tells both tokens of a refused write.
type StaleError struct {
	Resource string
	Token    Token // the refused one
	Highest  Token // the highest one admitted before
}

// Error names the resource and both tokens.
func (e *StaleError) Error() string {
	return fmt.Sprintf("fencing: token %v for %q is stale: %v was admitted before", e.Token, e.Resource, e.Highest)
}

// Is reports true for ErrStale.
func (e *StaleError) Is(target error) bool { return target == ErrStale }

// NoTokenError tells of a write that came with the zero token.
type NoTokenError struct {
	Resource string
	Highest  Token // the highest one admitted before; zero if there is none or the resource could not be asked
}

// Error names the resource and the usual cause.
func (e *NoTokenError) Error() string {
	return fmt.Sprintf("fencing: no token for %q%s: leases of the efficiency tier carry none",
		e.Resource, before(e.Highest))
}

// Is reports true for ErrNoToken.
func (e *NoTokenError) Is(target error) bool { return target == ErrNoToken }

// NotExclusiveError tells of a write with the token of a shared hold or of permits.
type NotExclusiveError struct {
	Resource string
	Token    Token // the refused one
	Highest  Token // the highest one admitted before; zero if there is none or the resource could not be asked
}

// Error names the resource and the token.
func (e *NotExclusiveError) Error() string {
	return fmt.Sprintf("fencing: token %v for %q is not of an exclusive hold%s", e.Token, e.Resource, before(e.Highest))
}

// Is reports true for ErrNotExclusive.
func (e *NotExclusiveError) Is(target error) bool { return target == ErrNotExclusive }

// SpaceError tells both spaces and both tokens of a refused write.
type SpaceError struct {
	Resource string
	Token    Token  // the refused one
	Highest  Token  // the highest one admitted before; zero if there is none or the resource could not be asked
	Space    string // the refused one; empty if not told
	Want     string // the one of the guard, or of what was admitted before
}

// Error names the resource and both spaces.
func (e *SpaceError) Error() string {
	return fmt.Sprintf("fencing: token %v for %q is of space %q, the guard accepts %q%s",
		e.Token, e.Resource, e.Space, e.Want, before(e.Highest))
}

// Is reports true for ErrSpace.
func (e *SpaceError) Is(target error) bool { return target == ErrSpace }

// SequenceError tells of a write that the hold has made already, or that a later one has overtaken; see Claim.At.
type SequenceError struct {
	Resource string
	Token    Token
	Sequence uint64 // the refused one
	Last     uint64 // the last one admitted with that token
}

// Error says whether the write is a repetition or came too late.
func (e *SequenceError) Error() string {
	what := "comes after a later one"
	if e.Sequence == e.Last {
		what = "was made before"
	}
	return fmt.Sprintf("fencing: write %d with token %v for %q %s (the last was %d)",
		e.Sequence, e.Token, e.Resource, what, e.Last)
}

// Is reports true for ErrRepeated if the write was the last one, and else for ErrReordered.
func (e *SequenceError) Is(target error) bool {
	return target == ErrRepeated && e.Sequence == e.Last || target == ErrReordered && e.Sequence != e.Last
}

// before is the end of a sentence about a refused token.
func before(highest Token) string {
	if highest == 0 {
		return ""
	}
	return fmt.Sprintf(" (%v was admitted before)", highest)
}

// InvalidError names a value that no guard can use. It is a mistake of the program, or a header that cannot be read;
// nothing was checked.
type InvalidError struct {
	What  string // "resource", for example
	Value string
	Why   string
}

// Error names the value, cut where it is long, and what is wrong with it.
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

// Refusal reports whether a guard has judged the claim and does not admit it: showing the same claim again is useless.
// Any other error says nothing about the claim; the holder may try again with the same token.
//
//	switch err := guard.Check(ctx, claim); {
//	case fencing.Refusal(err): // overtaken, or never a holder: stop
//		return err
//	case err != nil: // the store does not answer: do not write, perhaps try again
//	}
func Refusal(err error) bool {
	for _, each := range []error{ErrStale, ErrNoToken, ErrNotExclusive, ErrSpace, ErrRepeated, ErrReordered} {
		if errors.Is(err, each) {
			return true
		}
	}
	return false
}
