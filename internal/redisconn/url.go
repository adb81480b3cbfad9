package redisconn

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/driverurl"
)

// URL is what the URL of a Redis driver says: scheme://user:password@host:port,host:port/path?option=value.
type URL struct {
	Scheme   string
	Addrs    []string // host:port, at least one
	Path     string   // without the slashes around it
	User     string
	Password string
	TLS      bool
	Prefix   string        // the option prefix
	Timeout  time.Duration // the option timeout, for connecting and for the first look at the servers
	Options  url.Values    // what the driver named, at most once each

	driver, raw string
	tls         *tls.Config
	failed      atomic.Pointer[error] // why the last attempt to connect failed
}

// common are the options of every URL.
var common = []string{"prefix", "timeout", "ca", "cert", "key", "server-name", "pool-size", "protocol"}

// ConnectTime is how long connecting and the first look at the servers may take by default.
const ConnectTime = 3 * time.Second

// ParseURL reads the URL of a driver. TLS is what the scheme asks for, or one of the options that are of no use without
// it. Errors are *backend.InvalidError, and show no password.
func ParseURL(driver, rawURL string, secure bool, defaultPort string, own ...string) (*URL, error) {
	u := &URL{driver: driver, raw: rawURL, TLS: secure, Timeout: ConnectTime}
	if err := u.parse(defaultPort, own); err != nil {
		return nil, u.Invalid(err.Error())
	}
	return u, nil
}

// Invalid says that the driver cannot open the URL, and why. It shows no password.
func (u *URL) Invalid(why string) error {
	return &backend.CallError{Driver: u.driver, Call: "open", Err: &backend.InvalidError{
		Kind: backend.ErrInvalidOption, What: "backend URL", Value: backend.RedactURL(u.raw), Why: why,
	}}
}

func (u *URL) parse(defaultPort string, own []string) error {
	scheme, rest, _ := strings.Cut(u.raw, "://")
	u.Scheme = scheme
	if strings.Contains(rest, "#") {
		return errors.New("it has a #: in a password write %23")
	}
	rest, query, _ := strings.Cut(rest, "?")
	hosts, path, _ := strings.Cut(rest, "/")
	if strings.Contains(path, "@") || strings.Contains(query, "@") && !strings.Contains(hosts, "@") {
		return errors.New("it has a / or a ? before the @: in a password write %2F and %3F") // and do not show it
	}
	var err error
	if at := strings.LastIndexByte(hosts, '@'); at >= 0 {
		user, password, _ := strings.Cut(hosts[:at], ":")
		hosts = hosts[at+1:]
		if u.User, err = url.PathUnescape(user); err == nil {
			u.Password, err = url.PathUnescape(password)
		}
		if err != nil {
			return errors.New("its user or password cannot be read: write %25 for %")
		}
	}
	if u.Path, err = url.PathUnescape(strings.Trim(path, "/")); err != nil {
		return errors.New("its path cannot be read")
	}
	for host := range strings.SplitSeq(hosts, ",") {
		addr, err := addressOf(host, defaultPort)
		if err != nil {
			return fmt.Errorf("%w: write %s://localhost:%s for a server on this machine", err, scheme, defaultPort)
		}
		u.Addrs = append(u.Addrs, addr)
	}
	return u.readOptions(query, own)
}

// addressOf returns host:port.
func addressOf(host, defaultPort string) (string, error) {
	if host == "" {
		return "", errors.New("it has no host")
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = host, defaultPort
		if strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]") {
			name = host[1 : len(host)-1]
		}
	}
	switch n, err := strconv.ParseUint(port, 10, 16); {
	case name == "":
		return "", errors.New("it has no host before the port")
	case strings.ContainsAny(name, " %[]\\\"") || strings.Contains(name, ":") && net.ParseIP(name) == nil:
		return "", errors.New("its host is none")
	case err != nil || n == 0:
		return "", errors.New("its port is no number from 1 to 65535")
	}
	return net.JoinHostPort(name, port), nil
}

func (u *URL) readOptions(query string, own []string) (err error) {
	if u.Options, err = url.ParseQuery(query); err != nil {
		return errors.New("its options cannot be read: write option=value, with & between them")
	}
	known := slices.Concat(common, own)
	for name, values := range u.Options {
		if !slices.Contains(known, name) {
			return fmt.Errorf("it has the unknown option %q: there are %s", name, strings.Join(known, ", "))
		}
		if len(values) != 1 {
			return fmt.Errorf("option %s is given %d times", name, len(values))
		}
	}
	u.Prefix = u.Options.Get("prefix")
	for _, name := range []string{"ca", "cert", "key", "server-name"} {
		u.TLS = u.TLS || u.Options.Has(name)
	}
	if u.Options.Has("timeout") {
		if u.Timeout, err = u.Duration("timeout"); err != nil {
			return err
		}
	}
	if u.TLS {
		u.tls, err = driverurl.TLS(u.Options)
	}
	return err
}

// Duration reads an option that was given.
func (u *URL) Duration(name string) (time.Duration, error) {
	d, err := time.ParseDuration(u.Options.Get(name))
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("option %s is %q, no positive duration such as 5s", name, u.Options.Get(name))
	}
	return d, nil
}

// number reads an option that is a whole number between two bounds; 0 if it is not given.
func (u *URL) number(name string, least, most int) (int, error) {
	text := u.Options.Get(name)
	if !u.Options.Has(name) {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("option %s is %q, no number from %d to %d", name, text, least, most)
	}
	return n, nil
}

// Database reads the number of a database, of which there are 16 unless a server is set up for more.
func Database(text string) (int, error) {
	n, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil || n < 0 {
		return 0, fmt.Errorf("its database is %q, no number such as 0", text)
	}
	return n, nil
}

// Server returns options for a client of one server of the URL, without its address, that neither retries by itself nor
// outlives contexts. Its attempts to connect take most of the timeout or most of a given time, so that their errors are
// here before the caller has given up.
func (u *URL) Server(most time.Duration) (*goredis.Options, error) {
	connect := min(most, u.Timeout*3/4)
	poolSize, err := u.number("pool-size", 1, 1<<20)
	if err != nil {
		return nil, err
	}
	protocol, err := u.number("protocol", 2, 3)
	if err != nil {
		return nil, err
	}
	return &goredis.Options{
		Username: u.User, Password: u.Password, DialTimeout: connect,
		Dialer:   (&dialer{timeout: connect, tls: u.tls, failed: &u.failed}).dial,
		PoolSize: poolSize, Protocol: protocol,
		MaxRetries: -1, ContextTimeoutEnabled: true, DialerRetries: 1,
	}, nil
}

// Explain adds to the error of a first look at the servers what it does not say by itself: why nothing was connected when
// the time was over, and what the URL's author may have overlooked.
func (u *URL) Explain(err error) error {
	last := u.failed.Load()
	if last != nil && !errors.Is(err, *last) && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)) {
		return fmt.Errorf("%w (the last attempt to connect failed: %w)", err, *last)
	}
	if u.TLS || !errors.Is(err, io.EOF) {
		return err
	}
	plain, secure := u.Scheme, "rediss"+strings.TrimPrefix(u.Scheme, "redis")
	if u.driver == "redlock" {
		secure = "redlocks"
	}
	return fmt.Errorf("%w (the server closed the connection at once: if it expects TLS, write %s:// and not %s://)",
		err, secure, plain)
}
