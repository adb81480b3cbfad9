package httpguard

import (
	"net/http"
	"net/url"

	"github.com/fencelock/fencelock/fencing"
)

// The headers of a request.
const (
	// TokenHeader carries the token as Token.String writes it. Without it the token is zero.
	TokenHeader = "Fencing-Token"
	// SpaceHeader carries the token's space, with what is not plain ASCII percent-encoded. Without it the space is not told.
	SpaceHeader = "Fencing-Token-Space"
)

// Transport puts the claim in a request's context (fencing.NewContext) into its headers; the claim's resource stays behind,
// since the service says what is written to. A request without a claim passes as it is. It is safe for concurrent use.
//
// A redirect is a request like any other: the token goes to wherever the service sends the client.
type Transport struct {
	Base http.RoundTripper // nil: http.DefaultTransport
}

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if c, ok := fencing.FromContext(r.Context()); ok {
		r = r.Clone(r.Context())
		SetHeader(r.Header, c)
	}
	return t.base().RoundTrip(r)
}

// CloseIdleConnections is called by the method of http.Client with that name.
func (t *Transport) CloseIdleConnections() {
	if base, ok := t.base().(interface{ CloseIdleConnections() }); ok {
		base.CloseIdleConnections()
	}
}

func (t *Transport) base() http.RoundTripper {
	if t.Base == nil {
		return http.DefaultTransport
	}
	return t.Base
}

// SetHeader writes the claim's token and space, for clients that use no Transport.
func SetHeader(h http.Header, c fencing.Claim) {
	h.Set(TokenHeader, c.Token.String())
	h.Del(SpaceHeader)
	if c.Space != "" {
		h.Set(SpaceHeader, url.PathEscape(c.Space))
	}
}

// ClaimFrom reads what SetHeader wrote. Without a header the token is zero, which guards refuse; a header that cannot be
// read, or is there twice, is a *fencing.InvalidError.
func ClaimFrom(h http.Header, resource string) (fencing.Claim, error) {
	c := fencing.Claim{Resource: resource}
	token, err := single(h, TokenHeader)
	if err != nil {
		return c, err
	}
	if token != "" {
		if c.Token, err = fencing.ParseToken(token); err != nil {
			return c, invalid(TokenHeader, token, "want decimal digits below 1<<63, and an s if not exclusive")
		}
	}
	space, err := single(h, SpaceHeader)
	if err != nil {
		return c, err
	}
	if c.Space, err = url.PathUnescape(space); err != nil {
		return c, invalid(SpaceHeader, space, "the percent-encoding is broken")
	}
	return c, fencing.ValidateSpace(c.Space)
}

func single(h http.Header, name string) (string, error) {
	switch values := h.Values(name); len(values) {
	case 0:
		return "", nil
	case 1:
		return values[0], nil
	default:
		return "", invalid(name, values[1], "the header is there more than once")
	}
}

func invalid(header, value, why string) error {
	return &fencing.InvalidError{What: "header " + header, Value: value, Why: why}
}
