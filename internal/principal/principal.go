// Package principal identifies the clients of a lock service as its server or gateway has authenticated them, never by
// their own claims.
package principal

import (
	"fmt"
	"slices"
	"strings"
)

// Principal is Nobody, or KIND:NAME, where the kind is the method of authentication. A token and a certificate with the
// same name are different principals.
type Principal string

const (
	// Nobody is a client without a credential.
	Nobody Principal = ""
	// Process is the program of a member, which calls its server without a socket: a gateway in the member, or the program
	// that embeds the member.
	Process Principal = "process:"
)

// The kinds of principals with a credential.
const (
	cert   = "cert"   // a verified certificate
	spiffe = "spiffe" // a verified certificate with a SPIFFE id
	token  = "token"  // a token
)

// address is the kind of a client without a credential, which its network address identifies.
const address = "address"

var kinds = []string{cert, spiffe, token}

// Kinds returns the kinds of principals that files can name.
func Kinds() []string { return slices.Clone(kinds) }

// IsKind reports whether kind is one of Kinds.
func IsKind(kind string) bool { return slices.Contains(kinds, kind) }

// Parse parses a principal in a file: one of Kinds, a colon and a name.
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

// CheckName returns an error if name cannot be the name of a principal or group in a file: 1 to 128 printable ASCII
// characters without white space, commas, double quotes and asterisks.
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

// Address returns the principal that reports use for Nobody at this host. It owns no sessions.
func Address(host string) Principal { return Principal(address + ":" + host) }

// Kind returns the part before the colon: one of Kinds, process or address. It is empty for Nobody.
func (p Principal) Kind() string {
	kind, _, _ := strings.Cut(string(p), ":")
	return kind
}

// MayUse reports whether p, which knows the secret id of an object of owner, may use the object. Only that id protects
// the objects of Nobody and of Process: the program of a member calls its own server without a socket while that server
// leads, and otherwise another member with its certificate.
func (p Principal) MayUse(owner Principal) bool {
	return p == owner || p == Process || owner == Nobody || owner == Process
}
