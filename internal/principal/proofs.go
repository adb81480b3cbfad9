package principal

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Proofs are the credentials of principals, from one file. They are immutable, so all methods are safe for concurrent
// use.
type Proofs struct {
	tokens   map[Hash]tokenProof
	subjects map[string]Principal // by the certificate's subject
	uris     map[string]Principal // by the certificate's SPIFFE id
}

type tokenProof struct {
	who     Principal
	expires time.Time // zero: never
}

// SyntaxError describes an error in a line of a file of proofs. It never contains a token.
type SyntaxError struct {
	Line  int
	Value string // the invalid part of the line
	Why   string
}

// Error implements error.
func (e *SyntaxError) Error() string { return fmt.Sprintf("line %d: %q: %s", e.Line, e.Value, e.Why) }

// secretValue is the Value of a SyntaxError about a token.
const secretValue = "(a token)"

// ParseProofs parses a file of proofs: each line has a principal and its credential. The error is a *SyntaxError.
//
//	# a comment
//	token:ci    sha256:5fec…  expires=2027-03-01T00:00:00Z
//	cert:pay    "CN=pay,O=corp"
//	spiffe:pay  spiffe://corp/ns/pay/sa/worker
//
// A line for a token has its hash and optionally its expiry. A line for a certificate has its subject in the form of
// RFC 2253, as a Go string in double quotes, or its SPIFFE id. A principal may have several lines, so that the old and
// the new token or certificate are both valid during a replacement.
func ParseProofs(text []byte) (*Proofs, error) {
	p := &Proofs{tokens: map[Hash]tokenProof{}, subjects: map[string]Principal{}, uris: map[string]Principal{}}
	n := 0
	for line := range bytes.Lines(text) {
		n++
		if err := p.line(n, string(line)); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *Proofs) line(n int, text string) error {
	wrong := func(value, why string) error {
		if CheckToken(value) == nil {
			value = secretValue
		}
		return &SyntaxError{n, value, why}
	}
	if !utf8.ValidString(text) {
		return wrong(text, "it is not valid UTF-8")
	}
	text = strings.TrimSpace(text)
	if text == "" || text[0] == '#' {
		return nil
	}
	at := strings.IndexFunc(text, unicode.IsSpace)
	if at < 0 {
		at = len(text)
	}
	who, err := Parse(text[:at])
	if err != nil {
		return wrong(text[:at], err.Error())
	}
	proof := strings.TrimSpace(text[at:])
	if proof == "" {
		return wrong(text, "the proof is missing after it")
	}
	switch who.Kind() {
	case token:
		if value, err := p.addToken(who, proof); err != nil {
			return wrong(value, err.Error())
		}
		return nil
	case cert:
		subject, err := strconv.Unquote(proof)
		if err != nil || proof[0] != '"' {
			return wrong(proof, `want the subject of a certificate in double quotes, like "CN=pay,O=corp"`)
		}
		err = add(p.subjects, subject, who)
		if err != nil {
			return wrong(proof, err.Error())
		}
		return nil
	}
	if err := checkSPIFFE(proof); err != nil {
		return wrong(proof, err.Error())
	}
	if err := add(p.uris, proof, who); err != nil {
		return wrong(proof, err.Error())
	}
	return nil
}

// addToken adds the hash of a token. With an error it returns the invalid value.
func (p *Proofs) addToken(who Principal, text string) (value string, err error) {
	words := strings.Fields(text)
	if len(words) > 2 {
		return words[2], errors.New("want nothing behind the hash and the time at which the token expires")
	}
	if CheckToken(words[0]) == nil {
		return secretValue, errors.New("the file must contain hashes of tokens, not tokens: this token is no longer " +
			"secret")
	}
	h, err := parseHash(words[0])
	if err != nil {
		return words[0], err
	}
	of := tokenProof{who: who}
	if len(words) == 2 {
		at, found := strings.CutPrefix(words[1], expiresWord)
		if of.expires, err = time.Parse(time.RFC3339, at); err != nil || !found {
			return words[1], errors.New("want expires=TIME, like expires=2027-03-01T00:00:00Z")
		}
	}
	if old, found := p.tokens[h]; found && old != of {
		return words[0], fmt.Errorf("an earlier line has the same hash, for %s", old.who)
	}
	p.tokens[h] = of
	return "", nil
}

// expiresWord precedes the time at which a token expires.
const expiresWord = "expires="

// TokenLine returns the line of a token in a file of proofs. A zero time means no expiry.
func TokenLine(who Principal, token string, expires time.Time) string {
	line := string(who) + " " + HashOf(token).String()
	if !expires.IsZero() {
		line += " " + expiresWord + expires.UTC().Format(time.RFC3339)
	}
	return line
}

// add adds a proof of one principal. It returns an error if another principal has the proof.
func add(to map[string]Principal, proof string, who Principal) error {
	if old, found := to[proof]; found && old != who {
		return fmt.Errorf("an earlier line has it too, for %s", old)
	}
	to[proof] = who
	return nil
}

// checkSPIFFE returns an error if id cannot be the SPIFFE id of a certificate.
func checkSPIFFE(id string) error {
	u, err := url.Parse(id)
	if err != nil || u.Scheme != "spiffe" || u.Host == "" || u.Path == "" || u.String() != id {
		return errors.New("want a SPIFFE id, like spiffe://corp/ns/pay/sa/worker")
	}
	return nil
}

// The errors of Proofs.Token.
var (
	ErrUnknownToken = errors.New("the token is unknown")
	ErrExpiredToken = errors.New("the token has expired")
)

// Token returns the principal of a token at the wall-clock time now. Its errors are ErrNoToken, ErrUnknownToken and
// ErrExpiredToken.
func (p *Proofs) Token(text string, now time.Time) (Principal, error) {
	if err := CheckToken(text); err != nil {
		return Nobody, err
	}
	of, found := p.tokens[HashOf(text)]
	switch {
	case !found:
		return Nobody, ErrUnknownToken
	case !of.expires.IsZero() && !now.Before(of.expires):
		return Nobody, ErrExpiredToken
	}
	return of.who, nil
}

// Certificate returns the principal of a verified certificate: by its SPIFFE id if it has one, otherwise by its
// subject. It returns Nobody if the file does not have the id or subject, or if the certificate has several SPIFFE ids.
func (p *Proofs) Certificate(leaf *x509.Certificate) Principal {
	id := ""
	for _, u := range leaf.URIs {
		switch {
		case u.Scheme != "spiffe":
		case id != "":
			return Nobody // a certificate may have only one
		default:
			id = u.String()
		}
	}
	if id != "" {
		return p.uris[id]
	}
	return p.subjects[leaf.Subject.String()]
}
