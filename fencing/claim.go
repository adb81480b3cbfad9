package fencing

import (
	"context"
	"fmt"
	"unicode"
	"unicode/utf8"
)

// Bounds of what guards remember, so that every store has room for it.
const (
	MaxResourceBytes = 512
	MaxSpaceBytes    = 255
)

// Claim is what a write says of itself.
type Claim struct {
	Resource string // what is written to: the name under which the guard remembers tokens, often the lock's
	Token    Token  // Lease.Token
	Space    string // Lease.TokenSpace; empty if not told
}

// Seen is what a guard remembers of one resource.
type Seen struct {
	Token Token  // the highest one admitted
	Space string // where it came from; empty for a guard that accepts tokens of any space
}

// Judge is the rule that all guards share: nil if a guard that trusts space, and remembers seen of the resource, admits
// the claim, and otherwise the error that says why not. An empty space trusts every one and compares none. For a resource
// that the guard does not know, seen is Seen{Space: space}.
//
// Judging, and remembering the token that was admitted, must be one atomic step of the store: Judge is for guards that
// hold a lock of their own, or translate what the store has decided.
func Judge(c Claim, space string, seen Seen) error {
	switch {
	case !c.Token.Valid():
		return &NoTokenError{Resource: c.Resource, Highest: seen.Token}
	case !c.Token.Exclusive():
		return &NotExclusiveError{Resource: c.Resource, Token: c.Token, Highest: seen.Token}
	case space != "" && c.Space != space:
		return &SpaceError{Resource: c.Resource, Token: c.Token, Highest: seen.Token, Space: c.Space, Want: space}
	case seen.Space != space:
		return &SpaceError{Resource: c.Resource, Token: c.Token, Highest: seen.Token, Space: space, Want: seen.Space}
	case c.Token < seen.Token:
		return &StaleError{Resource: c.Resource, Token: c.Token, Highest: seen.Token}
	}
	return nil
}

// Refused is Judge without a look at the resource: an error if the claim is refused whatever was seen, nil if the
// resource has to be asked.
func Refused(c Claim, space string) error { return Judge(c, space, Seen{Space: space}) }

// Validate returns an *InvalidError for a claim that no guard can remember: the resource must be valid UTF-8 of 1 to
// MaxResourceBytes bytes, the space of 0 to MaxSpaceBytes, both without control characters. It does not judge the token.
func (c Claim) Validate() error {
	if c.Resource == "" {
		return &InvalidError{What: "resource", Value: "", Why: "it is empty"}
	}
	if err := validateText("resource", c.Resource, MaxResourceBytes); err != nil {
		return err
	}
	return ValidateSpace(c.Space)
}

// ValidateSpace returns an *InvalidError unless the space can be remembered; see Claim.Validate.
func ValidateSpace(space string) error { return validateText("space", space, MaxSpaceBytes) }

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

type contextKey struct{}

// NewContext returns a context that carries the claim to the guards of package httpguard and grpcguard: from a holder to
// the client's transport, and from the server's middleware to the handler.
func NewContext(ctx context.Context, c Claim) context.Context {
	return context.WithValue(ctx, contextKey{}, c)
}

// FromContext returns the claim that NewContext put there.
func FromContext(ctx context.Context) (Claim, bool) {
	c, ok := ctx.Value(contextKey{}).(Claim)
	return c, ok
}
