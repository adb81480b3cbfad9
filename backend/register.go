package backend

// Drivers by URL scheme. A driver registers its opener from init, and fencelock.Open finds it here, so that the root
// package imports no driver, and a program contains the drivers that it imports and no others. The table is the only
// global state of the package. Usually it is filled while the program initializes; the mutex is there because Register
// may be called later.

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
)

// Opener dials a lock service from a URL, probes it, and returns the driver. ctx bounds the dialling and not the
// driver. The URL reaches it as text, because several addresses in one URL (etcd://a:2379,b:2379) are not what net/url
// accepts. Closing the driver closes its connections. Errors do not show the password: see RedactURL.
type Opener func(ctx context.Context, rawURL string) (Driver, error)

// openers is the table of Register.
var openers struct {
	mu sync.RWMutex // protects the following field
	by map[string]Opener
}

// Register makes a driver known to fencelock.Open under a URL scheme. Drivers call it from init, so that importing
// a driver registers it. It panics on an empty or a repeated scheme: that is a mistake in the program.
//
//	func init() {
//		backend.Register("myservice", func(ctx context.Context, rawURL string) (backend.Driver, error) {
//			return dial(ctx, rawURL)
//		})
//	}
//
// Drivers of this module call kit.Register, which takes several schemes and never returns a nil pointer as a driver.
func Register(scheme string, open Opener) {
	openers.mu.Lock()
	defer openers.mu.Unlock()
	if scheme == "" || open == nil {
		panic("fencelock/backend: Register without a scheme or an opener")
	}
	if _, dup := openers.by[scheme]; dup {
		panic("fencelock/backend: Register called twice for scheme " + scheme)
	}
	if openers.by == nil {
		openers.by = map[string]Opener{}
	}
	openers.by[scheme] = open
}

// Schemes returns the registered schemes, sorted: for messages, and for programs that take the URL from their users.
func Schemes() []string {
	openers.mu.RLock()
	defer openers.mu.RUnlock()
	return slices.Sorted(maps.Keys(openers.by))
}

// Open finds the opener for the URL's scheme and calls it. An unknown scheme is an *InvalidError that lists the known
// ones; the usual cause is a driver package that the program does not import. So is text without a scheme: an address
// alone does not identify the service that listens there. It returns the opener's results unchanged.
func Open(ctx context.Context, rawURL string) (Driver, error) {
	scheme, _, found := strings.Cut(rawURL, "://")
	if !found {
		why := "it has no scheme; write redis://host:port for example"
		if scheme, rest, colon := strings.Cut(rawURL, ":/"); colon && scheme != "" && rest != "" {
			why = fmt.Sprintf("two slashes and an address belong behind %s:; write %s://host:port", scheme, scheme)
		}
		return nil, &InvalidError{
			Kind: ErrInvalidOption, What: "backend URL", Value: RedactURL(rawURL),
			Why: why,
		}
	}
	openers.mu.RLock()
	open := openers.by[scheme]
	openers.mu.RUnlock()
	if open == nil {
		return nil, &InvalidError{
			Kind: ErrInvalidOption, What: "backend URL", Value: RedactURL(rawURL),
			Why: fmt.Sprintf("no driver is registered for scheme %q (registered: %s); import the driver's package",
				scheme, strings.Join(Schemes(), ", ")),
		}
	}
	return open(ctx, rawURL)
}

// RedactURL returns the URL, quoted, without its password, for messages and logs. It removes the password of
// user:password@, a user without a password, which may be a token, every option with a name that ends with
// "password", and text in the place of a port without a number.
//
// It hides too much rather than too little where the URL is malformed. A password may hold unescaped characters that
// end another part of the URL early: with an @ behind the question mark only the scheme is shown, and an invalid
// query is not shown at all. It does not use net/url, which refuses such URLs, and quotes them in its error.
//
//	postgres://ann:secret@db/locks        "postgres://ann:redacted@db/locks"
//	redis://:s?cret@host:6379             "redis://redacted"
//	redis://h?sentinel-password=secret    "redis://h?sentinel-password=redacted"
func RedactURL(raw string) string {
	shown, _ := redact(raw)
	return shown
}

// URLHasPassword reports whether RedactURL hides a part of raw other than a user's bare name: a password, or text that
// may be one.
func URLHasPassword(raw string) bool {
	_, password := redact(raw)
	return password
}

func redact(raw string) (shown string, password bool) {
	scheme, rest, found := strings.Cut(raw, "://")
	if !found {
		scheme, rest = "", raw
	} else {
		scheme += "://"
	}
	rest, query, hasQuery := strings.Cut(rest, "?")
	if strings.Contains(query, "@") { // a password with a question mark in it, perhaps
		return quoteShort(scheme + "redacted"), true
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, _, hasPassword := strings.Cut(rest[:at], ":")
		password = hasPassword || strings.Contains(user, "/")
		if hasPassword {
			user += ":redacted"
		} else if user != "" {
			user = "redacted"
		}
		rest = user + rest[at:]
	} else {
		rest, password = redactPorts(rest)
	}
	if hasQuery {
		values, err := url.ParseQuery(query)
		switch {
		case err != nil:
			query, password = "redacted", true
		default:
			for name := range values {
				if strings.HasSuffix(name, "password") { // for example, also sentinel-password
					values.Set(name, "redacted")
					query, password = values.Encode(), true
				}
			}
		}
		rest += "?" + query
	}
	return quoteShort(scheme + rest), password
}

// redactPorts replaces the ports of host:port,host:port/path that are no numbers: of user:password without a host, the
// password.
func redactPorts(rest string) (shown string, password bool) {
	hosts, path, hasPath := strings.Cut(rest, "/")
	all := strings.Split(hosts, ",")
	for i, host := range all {
		at := strings.LastIndexByte(host, ':')
		if port := host[at+1:]; at >= 0 && strings.Trim(port, "0123456789") != "" && !strings.HasSuffix(host, "]") {
			first, _, _ := strings.Cut(host, ":")
			return strings.Join(append(all[:i], first+":redacted"), ","), true // the rest may be a part of it
		}
	}
	if hasPath {
		hosts += "/" + path
	}
	return hosts, false
}
