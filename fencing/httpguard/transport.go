package httpguard

import (
	"net/http"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/wire"
)

// Header carries the claims of a request, one in each of its values or all in one, separated by commas:
//
//	Fencing-Claim: 33; space=etcd-d1cfaf99; resource=%2Faccounts%2F42; seq=7
//
// The token is in the form of Token.String; the other fields are optional and percent-encoded.
const Header = "Fencing-Claim"

const fromHeader = "header " + Header

// Transport puts the claims in a request's context (fencing.NewOutgoingContext) into its header. A request without
// claims passes as it is. It is safe for concurrent use.
//
// A redirect is a request like any other: the claims go to wherever the service sends the client.
type Transport struct {
	Base http.RoundTripper // nil: http.DefaultTransport
}

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if claims, ok := fencing.FromOutgoingContext(r.Context()); ok {
		r = r.Clone(r.Context())
		SetHeader(r.Header, claims)
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

// SetHeader writes the claims, for clients that use no Transport.
func SetHeader(h http.Header, claims fencing.Claims) {
	h.Del(Header)
	for _, c := range claims.List() {
		h.Add(Header, wire.Text(c))
	}
}

// ClaimsFrom reads the header that SetHeader wrote, for the resources that the request writes to. If there is one of
// both, the claim is about it, under any name; else each resource gets the claim that names it. A resource without a
// claim gets one without a token, which guards refuse. A header that cannot be read is a *fencing.InvalidError.
func ClaimsFrom(h http.Header, resources ...string) (fencing.Set, error) {
	claims, err := wire.Read(fromHeader, h.Values(Header))
	if err != nil {
		return nil, err
	}
	return wire.Match(fromHeader, claims, resources)
}
