// Package fencing is the resource's side of a lock: tokens, and guards that refuse the writes of a holder that has lost
// its lock and has not noticed. It imports only the standard library, so a service that only checks tokens needs no
// lock client.
//
// A lock service alone cannot protect data. A holder may be paused between its last check of the lock and its write,
// for longer than any lease, and then write as the second writer. The remedy is a number that grows with every grant of
// the lock: each write carries the number of its hold, and the resource refuses a number smaller than one it has seen.
//
//	holder A ── token 33 ──► guard: highest is 33
//	   (paused)
//	holder B ── token 34 ──► guard: highest is 34
//	holder A ── token 33 ──► guard: ErrStale
//
// A Claim names the hold and the resource that it writes (claim.go). A Guard admits the claims on a resource in the order
// of their tokens (guard.go). Judge is the rule that all guards share (judge.go), Keeper has the calls for operators
// (keeper.go), and Memory guards data in this process (memory.go). The sub-packages have guards for databases and
// protocols. docs/FENCING.md explains where a guard is needed, docs/FENCING-SPEC.md the protocol for writers in other
// languages.
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
// have to carry both, and forgetting one would fail open; a signed column refuses a marked token (see docs/decisions,
// shared-tokens-are-marked).
//
// Tokens of two names do not compare, nor do tokens of two spaces.
type Token uint64

// notExclusive is the mark.
const notExclusive Token = 1 << 63

// Valid reports whether t is a token, so not zero.
func (t Token) Valid() bool { return t != 0 }

// Exclusive reports whether t came from an exclusive hold. Only such a token fences writes.
func (t Token) Exclusive() bool { return t != 0 && t&notExclusive == 0 }

// NotExclusive returns t with the mark of a shared hold or of permits. Drivers call it in the step that grants.
func (t Token) NotExclusive() Token { return t | notExclusive }

// Order returns the number without the mark, for comparing a shared token with others of the same name.
func (t Token) Order() uint64 { return uint64(t &^ notExclusive) }

// String returns the token as decimal digits; a non-exclusive token as digits followed by "s".
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

// ParseToken parses the result of String: no sign, no blanks, at most 63 bits. "0" is the zero Token. Leading zeros
// are accepted.
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

// MarshalText returns the text of String; in JSON a token is a string, since many languages keep numbers in 53 bits.
func (t Token) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText parses the result of MarshalText. After an error t is unchanged.
func (t *Token) UnmarshalText(text []byte) error {
	parsed, err := ParseToken(string(text))
	if err == nil {
		*t = parsed
	}
	return err
}
