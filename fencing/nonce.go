package fencing

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// Nonce is 128 random bits that name one grant or one restore. Tokens order grants; a nonce distinguishes two grants
// of one token, which can exist after a restore of the lock service. It is public and grants no right. Nonces are
// comparable with ==; the zero Nonce means that the claim has no nonce.
type Nonce [16]byte

// NewNonce returns a random Nonce. It never fails: crypto/rand ends the program if the system has no randomness.
func NewNonce() Nonce {
	var n Nonce
	for n == (Nonce{}) {
		_, _ = rand.Read(n[:]) // never returns an error
	}
	return n
}

// String returns n as 32 lower-case hexadecimal digits, and "" for the zero Nonce.
func (n Nonce) String() string {
	if n == (Nonce{}) {
		return ""
	}
	return hex.EncodeToString(n[:])
}

// ParseNonce parses the result of String, and no other form. The empty string is the zero Nonce.
func ParseNonce(s string) (Nonce, error) {
	if s == "" {
		return Nonce{}, nil
	}
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(Nonce{}) || Nonce(b) == (Nonce{}) || strings.ToLower(s) != s {
		return Nonce{}, fmt.Errorf("fencing: %q is not a nonce: want 32 lower-case hexadecimal digits, not all 0", s)
	}
	return Nonce(b), nil
}

// Generation is the history of a lock service to which a token belongs. A service that was restored from a backup, or
// recovered from a minority of its members, raises the generation, because it may issue tokens a second time.
//
// Generations are ordered by Number. Two generations with the same number and different ids come from two independent
// restores: neither is later. The zero Generation means a service that was never restored, and for a claim
// without a generation.
type Generation struct {
	Number uint64
	ID     Nonce // random, drawn by the restore; zero if and only if Number is zero
}

// Compare returns -1, 0 or +1 as g is earlier than, equal to or later than other, and false if the numbers are equal
// and the ids differ: such generations have no order.
func (g Generation) Compare(other Generation) (int, bool) {
	return cmp.Compare(g.Number, other.Number), g.Number != other.Number || g.ID == other.ID
}

// String returns the number and the id with a dot between them, and "0" for the zero Generation.
func (g Generation) String() string {
	if g == (Generation{}) {
		return "0"
	}
	return strconv.FormatUint(g.Number, 10) + "." + g.ID.String()
}

// ParseGeneration parses the result of String, and no other form.
func ParseGeneration(s string) (Generation, error) {
	if s == "0" {
		return Generation{}, nil
	}
	number, id, _ := strings.Cut(s, ".")
	n, err := strconv.ParseUint(number, 10, 63)
	nonce, idErr := ParseNonce(id)
	g := Generation{Number: n, ID: nonce}
	if err != nil || idErr != nil || n == 0 || g.String() != s || id == "" {
		return Generation{}, fmt.Errorf("fencing: %q is not a generation: want NUMBER.ID, or 0", s)
	}
	return g, nil
}
