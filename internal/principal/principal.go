// Package principal names who uses a lock service, as its server or gateway has authenticated them: never as they
// claim.
package principal

import (
	"fmt"
	"slices"
	"strings"
)

// Principal is KIND:NAME, where the kind says how the server knows the name, or Nobody. The kind is part of the
// principal: a token with the name of a certificate is another principal.
type Principal string

const (
	// Nobody is who connects without TLS, or without a certificate.
	Nobody Principal = ""
	// Process is the program of a member, which reaches its server without a socket: a gateway of the member, or the
	// program that embeds it.
	Process Principal = "process:"
)

// The kinds of principals that show something.
const (
	cert   = "cert"   // a certificate that was verified
	spiffe = "spiffe" // such a certificate, with a SPIFFE id
	token  = "token"  // a token
)

// address is the kind that says from where somebody connects who has proven nothing.
const address = "address"

var kinds = []string{cert, spiffe, token}

// Kinds returns the kinds of principals that files name.
func Kinds() []string { return slices.Clone(kinds) }

// IsKind reports whether kind is one of Kinds.
func IsKind(kind string) bool { return slices.Contains(kinds, kind) }

// Parse returns the principal that a file names: one of Kinds, a colon and a name.
func Parse(text string) (Principal, error) {
	kind, name, found := strings.Cut(text, ":")
	if !found || !IsKind(kind) {
		return Nobody, fmt.Errorf("want KIND:NAME, where KIND is one of %s", strings.Join(kinds, ", "))
	}
	if err := CheckName(name); err != nil {
		return Nobody, err
	}
	return Principal(text), nil
}

// maxName bounds the name of a principal, in bytes.
const maxName = 128

// CheckName accepts the name of a principal or group in a file: 1 to 128 printable characters of ASCII without white
// space, comma, quote and *.
func CheckName(name string) error {
	if name == "" || len(name) > maxName {
		return fmt.Errorf("the name has %d bytes, want 1 to %d", len(name), maxName)
	}
	for _, c := range name {
		if c <= ' ' || c > '~' || strings.ContainsRune(`,"*`, c) {
			return fmt.Errorf("the name has %q", c)
		}
	}
	return nil
}

// Certificate returns the principal of a verified certificate with this name.
func Certificate(name string) Principal { return Principal(cert + ":" + name) }

// Address returns the reported principal for Nobody at this host. It owns no session.
func Address(host string) Principal { return Principal(address + ":" + host) }

// Kind returns what stands before the colon: one of Kinds, process or address. It is empty for Nobody.
func (p Principal) Kind() string {
	kind, _, _ := strings.Cut(string(p), ":")
	return kind
}

// MayUse reports whether p may use what belongs to owner, and knows its secret id. What belongs to Nobody or to the
// program of a member is protected by that id alone: such a program uses its server without a socket while that leads,
// and otherwise another member with its certificate.
func (p Principal) MayUse(owner Principal) bool {
	return p == owner || p == Process || owner == Nobody || owner == Process
}
