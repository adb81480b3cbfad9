// Package fencing is the resource's side of a lock: tokens, and guards that refuse the writes of a holder who has lost
// its lock and does not know it. It imports the standard library only, so that a service which takes no locks can use
// it.
//
// A lock service alone cannot protect data. A holder may be paused between its last look at the lock and its write, for
// longer than any lease, and wake up as the second writer. The remedy is a number that grows with every grant of the
// lock: each write carries the number of its hold, and the resource refuses a number smaller than one it has seen.
//
//	holder A ── token 33 ──► guard: highest is 33
//	   (paused)
//	holder B ── token 34 ──► guard: highest is 34
//	holder A ── token 33 ──► guard: ErrStale
//
// A Claim says who writes, and to what (claim.go). A Guard stands in front of the resource and admits claims in the
// order of their tokens (guard.go); Judge is the rule that all guards share (judge.go), Keeper what an operator does
// with one (keeper.go), and Memory the guard of what lives in this process (memory.go). The sub-packages have guards
// for databases and protocols. docs/FENCING.md tells where a guard is needed, docs/FENCING-SPEC.md how writers in other
// languages take part.
package fencing

import (
	"fmt"
	"strconv"
)

// Token is the number of one hold of a lock, greater than that of every earlier hold of the same name. Zero is no
// token: leases of the efficiency tier carry it and every guard refuses it.
//
// Tokens of exclusive holds stay below 1<<63, so that they fit a signed 64-bit column. Shared holds and permits carry
// tokens too, for ordering only, with the highest bit set as a mark: they do not exclude other writers, so guards
// refuse them. The mark is a bit of the number, and not a second field, because every guard, column and header would
// have to carry both, and forgetting one would fail open; a signed column refuses a marked token by itself (see
// docs/decisions, shared-tokens-are-marked).
//
// Tokens of two names do not compare, nor do tokens of two spaces.
type Token uint64

// notExclusive is the mark.
const notExclusive Token = 1 << 63

// Valid reports whether t is a token at all, that is, not zero.
func (t Token) Valid() bool { return t != 0 }

// Exclusive reports whether t came from an exclusive hold. Only such a token fences writes.
func (t Token) Exclusive() bool { return t != 0 && t&notExclusive == 0 }

// NotExclusive returns t with the mark of a shared hold or of permits. Drivers call it in the step that grants.
func (t Token) NotExclusive() Token { return t | notExclusive }

// Order returns the number without the mark, for comparing a shared token with others of the same name.
func (t Token) Order() uint64 { return uint64(t &^ notExclusive) }

// String returns the token as decimal digits; a token that is not exclusive as digits followed by "s".
//
//	Token(33)                  "33"
//	Token(33).NotExclusive()   "33s"
//	Token(0)                   "0"
func (t Token) String() string {
	s := strconv.FormatUint(t.Order(), 10)
	if t&notExclusive != 0 {
		s += "s"
	}
	return s
}

// ParseToken reads what String wrote, and nothing else: no sign, no blanks, nothing beyond 63 bits. "0" is read as the
// zero Token. Leading zeros are accepted.
func ParseToken(s string) (Token, error) {
	digits, mark := s, Token(0)
	if n := len(s); n > 0 && s[n-1] == 's' {
		digits, mark = s[:n-1], notExclusive
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || (n == 0 && mark != 0) || digits[0] == '+' {
		return 0, fmt.Errorf(
			"fencing: %q is not a token: want decimal digits below 1<<63, and an s if not exclusive", s)
	}
	return Token(n) | mark, nil
}

// MarshalText writes what String returns; in JSON a token is a string, since many languages keep numbers in 53 bits.
func (t Token) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText reads what MarshalText wrote. After an error t is what it was.
func (t *Token) UnmarshalText(text []byte) error {
	parsed, err := ParseToken(string(text))
	if err == nil {
		*t = parsed
	}
	return err
}
