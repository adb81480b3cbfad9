package builtin

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/driverurl"
)

func init() {
	backend.Register("fencelock", openDriver)
	backend.Register("fencelocks", openDriver)
}

func openDriver(ctx context.Context, rawURL string) (backend.Driver, error) {
	d, err := Open(ctx, rawURL)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// Open connects to a cluster and checks that it has a leader which most members follow. Close disconnects.
//
//	fencelock://host[:port][,host[:port]…][?option=value&…]
//
// The scheme fencelocks, or any of the options ca, cert, key and server-name, selects TLS. Port 7480 is the default. Options:
//
//	ca, cert, key   files in PEM form: the authorities to trust, and the client's certificate with its key
//	server-name     the name to expect in the servers' certificates
//	timeout         how long to wait for the first answer, 5s by default
//
// A bad URL is an error that wraps backend.ErrInvalidOption; a cluster that does not answer, backend.ErrUnavailable; one
// of another protocol, backend.ErrMisconfigured. A server that is not durable is no error: Describe tells, and
// fencelock.ForCorrectness refuses it.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	u, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	d := New(u.addresses, &u.options)
	ctx, cancel := context.WithTimeout(ctx, u.dialTimeout)
	defer cancel()
	if err := d.Ping(ctx); err != nil {
		_ = d.Close(context.WithoutCancel(ctx))
		return nil, err
	}
	return d, nil
}

const defaultPort = "7480"

// target is what a URL says.
type target struct {
	addresses   []string
	options     Options
	dialTimeout time.Duration
}

func parseURL(rawURL string) (*target, error) {
	bad := func(why string) (*target, error) {
		return nil, &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "backend URL", Value: backend.RedactURL(rawURL), Why: why,
		}
	}
	scheme, rest, ok := strings.Cut(rawURL, "://")
	if !ok || scheme != "fencelock" && scheme != "fencelocks" {
		return bad("its scheme is neither fencelock nor fencelocks")
	}
	rest, query, _ := strings.Cut(rest, "?")
	options, err := url.ParseQuery(query)
	if err != nil {
		return bad("its options cannot be read")
	}
	u := &target{dialTimeout: 5 * time.Second}
	for host := range strings.SplitSeq(strings.TrimSuffix(rest, "/"), ",") {
		address, why := addressOf(host)
		if why != "" {
			return bad(why)
		}
		u.addresses = append(u.addresses, address)
	}
	secure := scheme == "fencelocks"
	for name, values := range options {
		if len(values) != 1 {
			return bad(fmt.Sprintf("option %s is given %d times", name, len(values)))
		}
		switch name {
		case "ca", "cert", "key", "server-name":
			secure = true
		case "timeout":
			u.dialTimeout, err = time.ParseDuration(values[0])
			if err != nil || u.dialTimeout <= 0 {
				return bad("timeout is no positive duration")
			}
		default:
			return bad("it has the unknown option " + strconv.Quote(name))
		}
	}
	if secure {
		if u.options.TLS, err = driverurl.TLS(options); err != nil {
			return bad(err.Error())
		}
	}
	return u, nil
}

// addressOf returns host:port, or why it cannot.
func addressOf(host string) (address, why string) {
	switch {
	case host == "":
		return "", "it has an empty address"
	case strings.ContainsRune(host, '@'):
		return "", "it has a user; the bundled server knows certificates only"
	case strings.ContainsAny(host, "/ "):
		return "", "it has a path; the URLs of the bundled server have none"
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = strings.Trim(host, "[]"), defaultPort
		if strings.Contains(name, ":") && !strings.HasPrefix(host, "[") {
			return "", "an IPv6 address stands in brackets"
		}
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || name == "" {
		return "", "it has the bad address " + strconv.Quote(host)
	}
	return net.JoinHostPort(name, port), ""
}
