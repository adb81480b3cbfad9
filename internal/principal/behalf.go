package principal

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"
)

// behalfKey is the context key for the principal on whose behalf a call is made.
type behalfKey struct{}

// For returns a context for calls that a gateway makes on behalf of a principal: Address for a client without a
// credential. The driver of the bundled server sends the principal with each request in that context. If p is empty,
// the gateway makes the calls for itself.
func For(ctx context.Context, p Principal) context.Context {
	return context.WithValue(ctx, behalfKey{}, p)
}

// CallsFor returns the principal on whose behalf a call is made; empty if the caller makes it for itself.
func CallsFor(ctx context.Context) Principal {
	p, _ := ctx.Value(behalfKey{}).(Principal)
	return p
}

// maxSent bounds a principal on the wire, in bytes.
const maxSent = 256

// ParseSent parses the principal that a gateway sends with a call: one of Kinds or address, a colon and a name.
func ParseSent(text string) (Principal, error) {
	kind, name, _ := strings.Cut(text, ":")
	switch {
	case kind != address && !IsKind(kind), name == "":
		return Nobody, fmt.Errorf("%q: want KIND:NAME, where KIND is one of %s, %s", text, strings.Join(kinds, ", "), address)
	case len(text) > maxSent || !utf8.ValidString(text):
		return Nobody, fmt.Errorf("the principal has %d bytes, want at most %d of UTF-8", len(text), maxSent)
	}
	return Principal(text), nil
}
