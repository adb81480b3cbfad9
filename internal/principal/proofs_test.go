package principal

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2027, 1, 1, 12, 0, 0, 0, time.UTC)

func certificate(t *testing.T, common string, uris ...string) *x509.Certificate {
	t.Helper()
	c := &x509.Certificate{Subject: pkix.Name{CommonName: common, Organization: []string{"corp"}}}
	for _, text := range uris {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		c.URIs = append(c.URIs, u)
	}
	return c
}

func TestProofs(t *testing.T) {
	lasting, ending, unknown := NewToken(), NewToken(), NewToken()
	p, err := ParseProofs([]byte("# who is who\n\n" +
		TokenLine("token:ci", lasting, time.Time{}) + "\n  " + TokenLine("token:ci", ending, noon) + "  \r\n" +
		"cert:pay \"CN=pay,O=corp\"\ncert:pay\t\"CN=pay 2,O=corp\"\nspiffe:pay spiffe://corp/ns/pay/sa/worker"))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		text string
		at   time.Time
		who  Principal
		err  error
	}{
		{lasting, noon, "token:ci", nil}, {ending, noon.Add(-time.Second), "token:ci", nil},
		{ending, noon, Nobody, ErrExpiredToken}, {unknown, noon, Nobody, ErrUnknownToken},
		{HashOf(lasting).String(), noon, Nobody, ErrNoToken}, {"", noon, Nobody, ErrNoToken},
	} {
		if who, err := p.Token(x.text, x.at); who != x.who || !errors.Is(err, x.err) {
			t.Errorf("%q at %v: %q, %v; want %q, %v", x.text, x.at, who, err, x.who, x.err)
		}
	}
	const worker = "spiffe://corp/ns/pay/sa/worker"
	for want, certificates := range map[Principal][]*x509.Certificate{
		"cert:pay":   {certificate(t, "pay"), certificate(t, "pay 2"), certificate(t, "pay", "https://corp/pay")},
		"spiffe:pay": {certificate(t, "pay", worker), certificate(t, "else", "https://corp/pay", worker)},
		Nobody: {
			certificate(t, "PAY"), certificate(t, "pay,O=corp"), certificate(t, ""),
			certificate(t, "pay", worker+"2"), certificate(t, "pay", worker, worker),
		},
	} {
		for i, c := range certificates {
			if got := p.Certificate(c); got != want {
				t.Errorf("certificate %d of %q is of %q", i, want, got)
			}
		}
	}
}

func TestProofsThatMakeNoSense(t *testing.T) {
	secret := NewToken()
	hash := HashOf(secret).String()
	for text, want := range map[string]string{
		"user:ci " + hash:                        `line 1: "user:ci": want KIND:NAME`,
		"process: " + hash:                       `line 1: "process:": want KIND:NAME`,
		"\n# two\ntoken:a*b " + hash:             `line 3: "token:a*b": the name has '*'`,
		"token: " + hash:                         `line 1: "token:": the name has 0 bytes`,
		"token:ci":                               `line 1: "token:ci": the proof is missing`,
		"token:ci " + hash[:70]:                  `line 1: "` + hash[:70] + `": want sha256:`,
		"token:ci " + hash[7:]:                   `line 1: "` + hash[7:] + `": want sha256:`,
		"token:ci " + hash + " tomorrow":         `line 1: "tomorrow": want expires=TIME`,
		"token:ci " + hash + " expires=tomorrow": `line 1: "expires=tomorrow": want expires=TIME`,
		"token:ci " + hash + " expires=2027-01-01T00:00:00Z more": `line 1: "more": want nothing behind`,
		"token:ci " + secret:                                 `line 1: "(a token)": the file must contain hashes of tokens`,
		secret:                                               `line 1: "(a token)": want KIND:NAME`,
		"token:a " + hash + "\ntoken:b " + hash:              `line 2: "` + hash + `": an earlier line has the same hash, for token:a`,
		"cert:pay CN=pay":                                    `line 1: "CN=pay": want the subject`,
		"cert:pay `CN=pay`":                                  "line 1: \"`CN=pay`\": want the subject",
		"cert:a \"CN=pay\"\ncert:b \"CN=pay\"":               `an earlier line has it too, for cert:a`,
		"spiffe:pay https://corp/pay":                        `line 1: "https://corp/pay": want a SPIFFE id`,
		"spiffe:pay spiffe://corp":                           `line 1: "spiffe://corp": want a SPIFFE id`,
		"spiffe:pay spiffe://corp/a b":                       `want a SPIFFE id`,
		"spiffe:a spiffe://corp/a\nspiffe:b spiffe://corp/a": `line 2: "spiffe://corp/a": an earlier line`,
		"token:ci \xff":                                      `it is not valid UTF-8`,
		"token:" + strings.Repeat("a", 129) + " " + hash:     `the name has 129 bytes`,
		"token:ci " + hash + "\ntoken:ci " + hash + " expires=" + "2027-01-01T00:00:00Z": `an earlier line has the same hash, for token:ci`,
	} {
		_, err := ParseProofs([]byte(text))
		if !errors.As(err, new(*SyntaxError)) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %s", text, err, want)
		}
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("the error has the token: %v", err)
		}
	}
}

// For any file and any request, a client is a principal only if a line of the file has its credential.
func FuzzProofs(f *testing.F) {
	secret := NewToken()
	f.Add(TokenLine("token:ci", secret, noon)+"\ncert:pay \"CN=pay,O=corp\"\nspiffe:pay spiffe://corp/a\n", secret)
	f.Add("token:ci sha256:00", "flk_")
	f.Fuzz(func(t *testing.T, file, given string) {
		p, err := ParseProofs([]byte(file))
		if err != nil {
			if p != nil || !errors.As(err, new(*SyntaxError)) {
				t.Fatalf("%v, %v", p, err)
			}
			return
		}
		who, err := p.Token(given, noon.Add(-time.Hour))
		if (err == nil) != (who != Nobody) {
			t.Fatalf("%q, %v", who, err)
		}
		if err == nil && !strings.Contains(strings.ToLower(file), HashOf(given).String()) {
			t.Fatalf("%q is %s without its hash in the file", given, who)
		}
	})
}
