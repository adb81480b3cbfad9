package redisconn

import (
	"errors"
	"net/url"
	"strings"

	"github.com/fencelock/fencelock/backend"
)

// URL is a URL that may name several servers.
type URL struct {
	Scheme string
	Addrs  []string

	user, tail string
}

// SplitURL takes a URL apart at its addresses, which net/url refuses when they are several.
func SplitURL(rawURL string) URL {
	scheme, rest, _ := strings.Cut(rawURL, "://")
	u := URL{Scheme: scheme}
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		rest, u.tail = rest[:i], rest[i:]
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		u.user, rest = rest[:at+1], rest[at+1:]
	}
	u.Addrs = strings.Split(rest, ",")
	return u
}

// One returns the URL of one server, with everything but the addresses as it was.
func (u URL) One(scheme, addr string) (*url.URL, error) {
	return url.Parse(scheme + "://" + u.user + addr + u.tail)
}

// URLError says that driver cannot open rawURL because of err. It shows no password.
func URLError(driver, rawURL string, err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err // without the URL
	}
	return &backend.CallError{Driver: driver, Call: "open", Err: &backend.InvalidError{
		Kind: backend.ErrInvalidOption, What: "backend URL", Value: backend.RedactURL(rawURL), Why: err.Error(),
	}}
}
