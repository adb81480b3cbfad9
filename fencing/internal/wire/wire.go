// Package wire is the form in which claims cross a network: one text for each.
//
//	33
//	33; space=etcd-d1cfaf99; resource=%2Faccounts%2F42; seq=7
//	33; generation=2.0c9e7c3bd7fd44d5b1b3a0d1c3e2f405; nonce=5a2f19fbb6b44c5f8f7b1d3c9a0e6f21
//
// The token has the form of Token.String; values are percent-encoded as in a URL's path, so that no value holds a
// comma, a semicolon or a character outside of plain ASCII. A list of them is joined by commas, or comes as several
// values.
package wire

import (
	"net/url"
	"strconv"
	"strings"

	"github.com/fencelock/fencelock/fencing"
)

// Text returns the claim as it is sent.
func Text(c fencing.Claim) string {
	var b strings.Builder
	b.WriteString(c.Token.String())
	for _, each := range []struct{ name, value string }{{"space", c.Space}, {"resource", c.Resource}} {
		if each.value != "" {
			b.WriteString("; " + each.name + "=" + url.PathEscape(each.value))
		}
	}
	if c.Generation != (fencing.Generation{}) {
		b.WriteString("; generation=" + c.Generation.String())
	}
	if c.Nonce != (fencing.Nonce{}) {
		b.WriteString("; nonce=" + c.Nonce.String())
	}
	if c.Sequence != 0 {
		b.WriteString("; seq=" + strconv.FormatUint(c.Sequence, 10))
	}
	return b.String()
}

// Read reads claims, in one or several values. An unreadable text is a *fencing.InvalidError that names from
// where.
func Read(from string, values []string) ([]fencing.Claim, error) {
	var all []fencing.Claim
	for _, value := range values {
		for text := range strings.SplitSeq(value, ",") {
			c, why := read(text)
			if why != "" {
				return nil, &fencing.InvalidError{What: from, Value: value, Why: why}
			}
			all = append(all, c)
		}
	}
	return all, nil
}

func read(text string) (c fencing.Claim, why string) {
	first, rest, more := strings.Cut(text, ";")
	token, err := fencing.ParseToken(strings.TrimSpace(first))
	if err != nil {
		return c, "want decimal digits below 1<<63, and an s if not exclusive"
	}
	c.Token = token
	seen := map[string]bool{}
	for more {
		var each string
		each, rest, more = strings.Cut(rest, ";")
		name, value, _ := strings.Cut(strings.TrimSpace(each), "=")
		value, err := url.PathUnescape(value)
		if err != nil {
			return c, "the percent-encoding is broken"
		}
		if seen[name] {
			return c, "it has " + name + " twice"
		}
		seen[name] = true
		switch name {
		case "space":
			c.Space = value
		case "resource":
			c.Resource = value
		case "generation":
			if c.Generation, err = fencing.ParseGeneration(value); err != nil {
				return c, "generation is not NUMBER.ID"
			}
		case "nonce":
			if c.Nonce, err = fencing.ParseNonce(value); err != nil || value == "" {
				return c, "nonce is not 32 lower-case hexadecimal digits"
			}
		case "seq":
			if c.Sequence, err = strconv.ParseUint(value, 10, 63); err != nil {
				return c, "seq is no number below 1<<63"
			}
		default: // of a later edition: ignoring it could admit a write that it forbids
			return c, "it has the unknown parameter " + strconv.Quote(name)
		}
	}
	return c, ""
}

// Match returns the claims for the resources that a request writes to: one claim for one resource, under any name that
// it came with, and else for each resource the claim that names it. A resource without a claim gets one without a
// token, which every guard refuses. A claim that no guard could remember, or two claims for one resource, is a
// *fencing.InvalidError.
func Match(from string, claims []fencing.Claim, resources []string) (fencing.Set, error) {
	set := make(fencing.Set, 0, len(resources))
	for _, resource := range resources {
		var match fencing.Claim
		found := 0
		for _, c := range claims {
			if c.Resource == resource || len(claims) == 1 && len(resources) == 1 {
				match = c
				found++
			}
		}
		if found > 1 {
			return nil, &fencing.InvalidError{What: from, Value: resource, Why: "two claims name this resource"}
		}
		match.Resource = resource
		set = append(set, match)
	}
	_, err := fencing.Sorted(set)
	return set, err
}
