package gateway

import (
	"crypto/x509"
	"net"
	"net/http"
	"strings"

	"github.com/fencelock/fencelock/internal/listeners"
)

// hosts decides which host names a request without a credential may use for the gateway. The owner of a domain can
// point its name to the gateway (DNS rebinding). A page of that domain then has the same origin as the gateway, and
// only the host name reveals the attack. Addresses and localhost are safe from it.
type hosts struct {
	certificate func() *x509.Certificate // the gateway's own; nil without TLS
	named       x509.Certificate         // Options.Hosts, matched as names of certificates
}

// permits reports whether r may use its host name.
func (h *hosts) permits(r *http.Request) bool {
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), ".")
	switch {
	case host == "": // HTTP/1.0: browsers always name a host
	case scopeOf(r) != "":
	case r.URL.Path == livePath || r.URL.Path == readyPath:
	case net.ParseIP(host) != nil, strings.EqualFold(host, "localhost"):
	case h.named.VerifyHostname(host) == nil:
	case h.certificate != nil && h.certificate() != nil && h.certificate().VerifyHostname(host) == nil:
	default:
		return false
	}
	return true
}

// crossSite reports whether a browser sent r for a page of another origin, or for a link on that page. Without this
// check such a page could cause load and changes, although it could not read an answer. Links may lead to the
// documents, and to the web page without its data.
func crossSite(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "cross-site", "same-site":
		return r.URL.Path != docsPath && r.URL.Path != specificationPath && r.URL.Path != pagePath
	}
	return false
}

// The paths of calls that are not about locks.
const (
	livePath          = listeners.LivePath
	readyPath         = listeners.ReadyPath
	docsPath          = "/docs"
	specificationPath = "/openapi.json"
)
