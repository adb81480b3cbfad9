package fencing

// The texts that guards store, the same in every store: one for the terms and one for each resource. The memory of a
// resource is one text in one column or field, so that a writer of another version cannot update half of it.

import (
	"fmt"
	"strconv"
	"strings"
)

// Format is the version of the texts, in the terms. Version 1 kept numbers in separate fields.
const Format = 2

// noNonce represents a zero nonce, pinned for a space that is set.
const (
	noNonce  = "-"
	pinned   = "="
	unpinned = "-"
)

// String returns the terms as guards keep them: the format, ID, epoch, floor, and the space behind an equals sign, or
// a hyphen before the first claim.
//
//	2 0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 0 0 =etcd-d1cfaf99
func (t Terms) String() string {
	space := unpinned
	if t.Pinned {
		space = pinned + t.Space
	}
	return fmt.Sprintf("%d %s %d %d %s", Format, nonceText(t.ID), t.Epoch, uint64(t.Floor), space)
}

// ParseTerms reads the text of Terms.String. Any other text is a *VersionError: another version of the package wrote
// it, or no guard.
func ParseTerms(text string) (Terms, error) {
	words := strings.SplitN(text, " ", 5)
	if len(words) < 2 {
		return Terms{}, &VersionError{Text: text, Want: Format}
	}
	var t Terms
	var err [3]error
	t.ID, err[0] = parseNonce(words[1])
	if found, _ := strconv.ParseUint(words[0], 10, 31); err[0] == nil && found > 0 && found != Format {
		return Terms{}, &VersionError{Found: int(found), Want: Format} //nolint:gosec // of 31 bits
	}
	if len(words) != 5 {
		return Terms{}, &VersionError{Text: text, Want: Format}
	}
	t.Epoch, err[1] = strconv.ParseUint(words[2], 10, 63)
	t.Floor, err[2] = ParseToken(words[3])
	t.Space, t.Pinned = strings.CutPrefix(words[4], pinned)
	if !t.Pinned {
		t.Space = ""
	}
	if err != [3]error{} || t.String() != text {
		return Terms{}, &VersionError{Text: text, Want: Format}
	}
	return t, nil
}

// String returns the text that guards keep of a resource: epoch, generation, token, nonce and sequence. A hyphen stands
// for no nonce.
//
//	0 1.0c9e7c3bd7fd44d5b1b3a0d1c3e2f405 33 5a2f19fbb6b44c5f8f7b1d3c9a0e6f21 7
func (s Seen) String() string {
	return fmt.Sprintf("%d %v %d %s %d", s.Epoch, s.Generation, uint64(s.Token), nonceText(s.Nonce), s.Sequence)
}

// ParseSeen reads the text of Seen.String. Any other text is a *VersionError, as for ParseTerms.
func ParseSeen(text string) (Seen, error) {
	words := strings.Split(text, " ")
	if len(words) != 5 {
		return Seen{}, &VersionError{Text: text, Want: Format}
	}
	var s Seen
	var err [5]error
	s.Epoch, err[0] = strconv.ParseUint(words[0], 10, 63)
	s.Generation, err[1] = ParseGeneration(words[1])
	s.Token, err[2] = ParseToken(words[2])
	s.Nonce, err[3] = parseNonce(words[3])
	s.Sequence, err[4] = strconv.ParseUint(words[4], 10, 63)
	if err != [5]error{} || s.String() != text {
		return Seen{}, &VersionError{Text: text, Want: Format}
	}
	return s, nil
}

func nonceText(n Nonce) string {
	if n == (Nonce{}) {
		return noNonce
	}
	return n.String()
}

func parseNonce(text string) (Nonce, error) {
	if text == noNonce {
		return Nonce{}, nil
	}
	return ParseNonce(text)
}
