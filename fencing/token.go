// Package fencing is the resource's side of a lock: tokens, and guards that refuse the writes of a holder who lost its
// lock and does not know it. It imports the standard library only, so that a service which takes no locks can use it.
//
// A lock service alone cannot protect data. A holder may be paused between its last look at the lock and its write, for
// longer than any lease, and wake up as the second writer. The remedy is a number that grows with every grant of the
// lock: each write carries the number of its hold, and the resource refuses a number smaller than one it has seen.
//
//	holder A ── token 33 ──► guard: highest is 33
//	   (paused)
//	holder B ── token 34 ──► guard: highest is 34
//	holder A ── token 33 ──► guard: ErrStale
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
// refuse them.
type Token uint64

const notExclusive Token = 1 << 63

// Valid reports whether t is a token at all, that is, not zero.
func (t Token) Valid() bool { return t != 0 }

// Exclusive reports whether t came from an exclusive hold. Only such a token fences writes.
func (t Token) Exclusive() bool { return t != 0 && t&notExclusive == 0 }

// NotExclusive returns t with the mark of a shared hold or of permits. Drivers call it.
func (t Token) NotExclusive() Token { return t | notExclusive }

// Order returns the number without the mark, for comparing a shared token with others of the same name.
func (t Token) Order() uint64 { return uint64(t &^ notExclusive) }

// String returns the token as decimal digits; a token that is not exclusive as digits followed by "s".
func (t Token) String() string {
	s := strconv.FormatUint(t.Order(), 10)
	if t&notExclusive != 0 {
		s += "s"
	}
	return s
}

// ParseToken reads what String wrote. "0" is read as the zero Token.
func ParseToken(s string) (Token, error) {
	digits, mark := s, Token(0)
	if n := len(s); n > 0 && s[n-1] == 's' {
		digits, mark = s[:n-1], notExclusive
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || (n == 0 && mark != 0) || digits[0] == '+' {
		return 0, fmt.Errorf("fencing: %q is not a token: want decimal digits below 1<<63, and an s if not exclusive", s)
	}
	return Token(n) | mark, nil
}

// MarshalText writes what String returns.
func (t Token) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (t *Token) UnmarshalText(text []byte) error {
	parsed, err := ParseToken(string(text))
	if err == nil {
		*t = parsed
	}
	return err
}
