package fencing

// Claims: what a write says of itself, one or several of them, and how they travel with a context. All guards check and
// sort claims with the functions here, so that what one guard can remember every guard can.

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of what guards remember, so that every store has room for it.
const (
	// MaxResourceBytes bounds Claim.Resource, MaxSpaceBytes Claim.Space, in bytes of UTF-8.
	MaxResourceBytes = 512
	MaxSpaceBytes    = 255

	// MaxToken is the greatest token that a guard admits. No lock service comes near it; a token that is greater would
	// lock everybody else out for good.
	MaxToken Token = 1 << 62
	// MaxSequence is the greatest Claim.Sequence.
	MaxSequence = 1<<63 - 1
)

// Claim is what a write says of itself: Lease.Claim makes one. It is a value, and never changes. It is no secret and no
// proof: anybody can make one. Who may call is a question of authentication.
type Claim struct {
	Resource string // what is written to: the name under which the guard remembers tokens, often the lock's
	Token    Token  // Lease.Token
	Space    string // Lease.TokenSpace; empty if not told
	Sequence uint64 // orders the writes of one hold; zero: they need no order. See At
}

// At returns the claim of the hold's nth write. A guard remembers n with the token: the same write again is ErrRepeated
// and is not carried out twice, one that comes after a later one is ErrReordered. Numbers start at 1 and may have gaps;
// 0 is a write that needs no order. The numbers belong to one hold, so a new holder begins at 1 again.
func (c Claim) At(n uint64) Claim { c.Sequence = n; return c }

// Claims is what a guard is asked about: one Claim, or a Set of them for a write to several resources.
type Claims interface {
	// List returns the claims one by one. The caller does not change the slice.
	List() []Claim
}

// List returns the claim alone.
func (c Claim) List() []Claim { return []Claim{c} }

// Set is several claims of one write, for example those of the leases of AcquireAll. All are admitted or none is.
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
		return nil, &InvalidError{What: "claims", Why: "there is none"}
	}
	list := slices.Clone(claims.List())
	if len(list) == 0 {
		return nil, &InvalidError{What: "claims", Why: "there is none"}
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
// most MaxToken, the sequence at most MaxSequence. It does not judge whether the token may write.
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
	}
	if err := validateText("resource", c.Resource, MaxResourceBytes); err != nil {
		return err
	}
	return ValidateSpace(c.Space)
}

// ValidateSpace returns an *InvalidError unless the space can be remembered; see Claim.Validate.
func ValidateSpace(space string) error { return validateText("space", space, MaxSpaceBytes) }

// validateText refuses what some store could not give back as it was: too many bytes, text that is not UTF-8, and
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

// NewOutgoingContext returns a context whose claims the clients of packages httpguard and grpcguard send along. A
// holder makes it for calls to the service that guards the resource, and for no others.
func NewOutgoingContext(ctx context.Context, claims Claims) context.Context {
	return context.WithValue(ctx, outgoingKey{}, claims)
}

// FromOutgoingContext returns what NewOutgoingContext put there.
func FromOutgoingContext(ctx context.Context) (Claims, bool) {
	c, ok := ctx.Value(outgoingKey{}).(Claims)
	return c, ok
}

// NewIncomingContext returns a context that carries the claims of a request to its handler. Calls that the handler
// makes with it carry none: the claims are about this service's resources.
func NewIncomingContext(ctx context.Context, claims Claims) context.Context {
	return context.WithValue(ctx, incomingKey{}, claims)
}

// FromIncomingContext returns what NewIncomingContext put there.
func FromIncomingContext(ctx context.Context) (Claims, bool) {
	c, ok := ctx.Value(incomingKey{}).(Claims)
	return c, ok
}
