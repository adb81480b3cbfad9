package fencing

// Claims of writes, alone or in sets, and their transport in a context. All guards check and sort claims with the
// functions here, so that every guard accepts the same claims.

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of a guard's memory, so that every store has room for it.
const (
	// MaxResourceBytes bounds Claim.Resource, MaxSpaceBytes Claim.Space, in bytes of UTF-8.
	MaxResourceBytes = 512
	MaxSpaceBytes    = 255

	// MaxToken is the greatest token that a guard admits. No lock service comes near it; a greater token would lock all
	// other clients out permanently.
	MaxToken Token = 1 << 62
	// MaxSequence is the greatest Claim.Sequence.
	MaxSequence = 1<<63 - 1
)

// Claim accompanies a write and names its hold: Lease.Claim makes one. It is a value, and never changes. It is no
// secret and no proof: any program can make one. Authentication decides who may call.
type Claim struct {
	Resource string // the target of the write: the name under which the guard remembers tokens, often the lock's
	Token    Token  // Lease.Token
	Space    string // Lease.TokenSpace; empty if unknown
	Sequence uint64 // orders the writes of one hold; zero: they need no order. See At

	Generation Generation // Lease.Generation; zero if the lock service was never restored
	Nonce      Nonce      // Lease.Nonce: distinguishes two holds with one token; zero if the driver draws no nonces
}

// At returns the claim of the hold's nth write. A guard remembers n with the token: a repeated write is ErrRepeated
// and is not executed twice, and a write that arrives after a later write is ErrReordered. Numbers start at 1 and may
// have gaps; 0 is a write that needs no order. The numbers belong to one hold, so a new holder begins at 1.
func (c Claim) At(n uint64) Claim { c.Sequence = n; return c }

// Unordered returns the claims without their sequences, as a check shows them that makes no write: only a step that
// writes may remember a sequence.
func Unordered(claims []Claim) Set {
	set := make(Set, len(claims))
	for i, c := range claims {
		set[i] = c.At(0)
	}
	return set
}

// Claims is the argument of a guard: one Claim, or a Set of them for a write to several resources.
type Claims interface {
	// List returns the claims one by one. The caller does not change the slice.
	List() []Claim
}

// List returns the claim alone.
func (c Claim) List() []Claim { return []Claim{c} }

// Set is several claims of one write, for example of the leases of AcquireAll. A guard admits all of them or refuses
// all.
//
//	guard.Check(ctx, fencing.Set{a.Claim("accounts/1"), b.Claim("accounts/2")})
type Set []Claim

// List returns the set itself, unsorted and unchecked; guards call Sorted.
func (s Set) List() []Claim { return s }

// Sorted returns the claims in the order in which every guard asks about them, by the bytes of their resources, so that
// two writers never wait for each other. It returns an *InvalidError if there is no claim, if one of them is not valid,
// or if two name one resource and differ otherwise; of equal ones it returns one.
func Sorted(claims Claims) ([]Claim, error) {
	if claims == nil {
		return nil, &InvalidError{What: "claims", Why: "at least one is required"}
	}
	list := slices.Clone(claims.List())
	if len(list) == 0 {
		return nil, &InvalidError{What: "claims", Why: "at least one is required"}
	}
	for _, c := range list {
		if err := c.Validate(); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(list, func(a, b Claim) int { return strings.Compare(a.Resource, b.Resource) })
	list = slices.Compact(list)
	for i := 1; i < len(list); i++ {
		if list[i].Resource == list[i-1].Resource {
			return nil, &InvalidError{
				What: "claims", Value: list[i].Resource, Why: "two of them name this resource, and differ"}
		}
	}
	return list, nil
}

// Validate returns an *InvalidError for a claim that no guard can remember: the resource must be valid UTF-8 of 1 to
// MaxResourceBytes bytes, the space of 0 to MaxSpaceBytes, both without control characters; an exclusive token is at
// most MaxToken, the sequence at most MaxSequence, and the generation has a number and an id or neither. It does not
// judge whether the token may write.
func (c Claim) Validate() error {
	switch {
	case c.Resource == "":
		return &InvalidError{What: "resource", Value: "", Why: "it is empty"}
	case c.Token.Exclusive() && c.Token > MaxToken:
		return &InvalidError{
			What: "token", Value: c.Token.String(), Why: fmt.Sprintf("it is greater than %v", MaxToken)}
	case c.Sequence > MaxSequence:
		return &InvalidError{
			What: "sequence", Value: fmt.Sprint(c.Sequence),
			Why: fmt.Sprintf("it is greater than %d", uint64(MaxSequence))}
	case c.Generation.Number > MaxSequence || (c.Generation.Number == 0) != (c.Generation.ID == Nonce{}):
		return &InvalidError{
			What: "generation", Value: c.Generation.String(), Why: "want a number below 1<<63 and an id, or neither"}
	}
	if err := validateText("resource", c.Resource, MaxResourceBytes); err != nil {
		return err
	}
	return ValidateSpace(c.Space)
}

// ValidateSpace returns an *InvalidError unless the space can be remembered; see Claim.Validate.
func ValidateSpace(space string) error { return validateText("space", space, MaxSpaceBytes) }

// validateText refuses text that some store could not return unchanged: too many bytes, text that is not UTF-8, and
// control characters. Empty text passes; Validate refuses an empty resource itself.
func validateText(what, s string, most int) error {
	why := ""
	switch {
	case len(s) > most:
		why = fmt.Sprintf("it has %d bytes, more than %d", len(s), most)
	case !utf8.ValidString(s):
		why = "it is not valid UTF-8"
	default:
		for i, r := range s {
			if unicode.IsControl(r) {
				why = fmt.Sprintf("it has the control character %U at byte %d", r, i)
				break
			}
		}
	}
	if why == "" {
		return nil
	}
	return &InvalidError{What: what, Value: s, Why: why}
}

// incomingKey and outgoingKey are two keys, so that the claims of a request are never sent along to another service.
type incomingKey struct{}

type outgoingKey struct{}

// NewOutgoingContext returns a context with claims that the clients of packages httpguard and grpcguard send along.
// Use it only for calls to the service that guards the resource.
func NewOutgoingContext(ctx context.Context, claims Claims) context.Context {
	return context.WithValue(ctx, outgoingKey{}, claims)
}

// FromOutgoingContext returns the claims that NewOutgoingContext put there.
func FromOutgoingContext(ctx context.Context) (Claims, bool) {
	c, ok := ctx.Value(outgoingKey{}).(Claims)
	return c, ok
}

// NewIncomingContext returns a context that carries the claims of a request to its handler. Calls that the handler
// makes with it do not carry the claims, which are about this service's resources.
func NewIncomingContext(ctx context.Context, claims Claims) context.Context {
	return context.WithValue(ctx, incomingKey{}, claims)
}

// FromIncomingContext returns the claims that NewIncomingContext put there.
func FromIncomingContext(ctx context.Context) (Claims, bool) {
	c, ok := ctx.Value(incomingKey{}).(Claims)
	return c, ok
}
