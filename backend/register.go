package backend

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
)

// Opener dials a lock service from a URL, probes it, and returns the driver. The URL reaches it as text, because
// several addresses in one URL (etcd://a:2379,b:2379) are not what net/url accepts. Closing the driver closes what it
// dialled.
type Opener func(ctx context.Context, rawURL string) (Driver, error)

var openers struct {
	mu sync.RWMutex // protects the following field
	by map[string]Opener
}

// Register makes a driver known to fencelock.OpenURL under a URL scheme. Drivers call it from init, so that importing
// a driver is what registers it. It panics on an empty or a repeated scheme: that is a mistake in the program.
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

// Schemes returns the registered schemes, sorted.
func Schemes() []string {
	openers.mu.RLock()
	defer openers.mu.RUnlock()
	return slices.Sorted(maps.Keys(openers.by))
}

// Open finds the opener for the URL's scheme and calls it. An unknown scheme is an *InvalidError that lists the known
// ones; the usual cause is a driver package that the program does not import.
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

// RedactURL returns the URL, quoted, without its password, for messages and logs. It hides too much rather than too
// little where the URL is malformed.
func RedactURL(raw string) string {
	scheme, rest, found := strings.Cut(raw, "://")
	if !found {
		scheme, rest = "", raw
	} else {
		scheme += "://"
	}
	rest, query, hasQuery := strings.Cut(rest, "?")
	if strings.Contains(query, "@") { // a password with a question mark in it, perhaps
		return quoteShort(scheme + "redacted")
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, _, hasPassword := strings.Cut(rest[:at], ":")
		if hasPassword {
			user += ":redacted"
		}
		rest = user + rest[at:]
	}
	if hasQuery {
		values, err := url.ParseQuery(query)
		switch {
		case err != nil:
			query = "redacted"
		default:
			for name := range values {
				if strings.HasSuffix(name, "password") { // also sentinel-password, say
					values.Set(name, "redacted")
					query = values.Encode()
				}
			}
		}
		rest += "?" + query
	}
	return quoteShort(scheme + rest)
}
