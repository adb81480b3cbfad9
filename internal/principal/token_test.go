package principal

import (
	"errors"
	"strings"
	"testing"
)

func TestToken(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		text := NewToken()
		if err := CheckToken(text); err != nil || seen[text] || len(text) != 53 {
			t.Fatalf("%q: %v, seen before: %v", text, err, seen[text])
		}
		seen[text] = true
	}
	text := NewToken()
	for i := range text {
		other := byte('a')
		if text[i] == other {
			other = 'b'
		}
		if changed := text[:i] + string(other) + text[i+1:]; !errors.Is(CheckToken(changed), ErrNoToken) {
			t.Errorf("%q with another character at %d is a token too", text, i)
		}
	}
	for _, wrong := range []string{"", "flk_", text[:52], text + "0", " " + text, strings.ToUpper(text)} {
		if !errors.Is(CheckToken(wrong), ErrNoToken) {
			t.Errorf("%q is a token", wrong)
		}
	}
}

// Issued tokens stay valid, and hashes in files keep matching their tokens.
func TestTokenFormatStays(t *testing.T) {
	const issued = "flk_0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefg3mLDk0"
	const hash = "sha256:" +
		"65e19d2f0084fea48bd47e66039b75d48aa164cc33a8b9740ddd48c80b82e7d7"
	if err := CheckToken(issued); err != nil {
		t.Error(err)
	}
	if got := HashOf(issued).String(); got != hash {
		t.Errorf("its hash is %s", got)
	}
}
