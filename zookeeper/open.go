package zookeeper

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
	for _, scheme := range schemes {
		backend.Register(scheme, openDriver)
	}
}

var schemes = []string{"zk", "zookeeper", "zks"}

func openDriver(ctx context.Context, rawURL string) (backend.Driver, error) {
	d, err := Open(ctx, rawURL)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// Open connects to ZooKeeper and checks that the ensemble has a leader. Close closes the connections.
//
//	zk://[user:password@]host[:port][,host[:port]…][/chroot][?option=value&…]
//
// The scheme zookeeper is the same. The scheme zks, or any of the options ca, cert, key and server-name, selects TLS.
// Port 2181 is the default; TLS has no port of its own. User and password authenticate with the digest scheme. Options:
//
//	ca, cert, key   files in PEM form: the authorities to trust, and the client's certificate with its key
//	server-name     the name to expect in the servers' certificate
//	prefix          Options.KeyPrefix, /fencelock by default
//	tick            Options.Tick, the servers' tickTime: 2s by default
//	timeout         how long to wait for the first connection, 5s by default
//
// A bad URL is an error that wraps backend.ErrInvalidOption; an ensemble that does not answer, backend.ErrUnavailable.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	addrs, o, timeout, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	d := New(addrs, o)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := d.Ping(ctx); err != nil {
		_ = d.Close(context.WithoutCancel(ctx))
		return nil, err
	}
	return d, nil
}

const defaultPort = "2181"

func parseURL(rawURL string) (addrs []string, o *Options, timeout time.Duration, err error) {
	bad := func(why string) ([]string, *Options, time.Duration, error) {
		return nil, nil, 0, &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "backend URL", Value: backend.RedactURL(rawURL), Why: why,
		}
	}
	scheme, rest, ok := strings.Cut(rawURL, "://")
	if !ok || scheme != "zk" && scheme != "zookeeper" && scheme != "zks" {
		return bad("its scheme is none of zk, zookeeper and zks")
	}
	rest, query, _ := strings.Cut(rest, "?")
	options, err := url.ParseQuery(query)
	if err != nil {
		return bad("its options cannot be read")
	}
	o, timeout = &Options{}, 5*time.Second
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, password, _ := strings.Cut(rest[:at], ":")
		if o.User, err = url.PathUnescape(user); err != nil || o.User == "" || strings.Contains(o.User, ":") {
			return bad("its user cannot be read")
		}
		if o.Password, err = url.PathUnescape(password); err != nil {
			return bad("its password cannot be read")
		}
		rest = rest[at+1:]
	}
	hosts, chroot, _ := strings.Cut(rest, "/")
	if chroot = strings.TrimSuffix(chroot, "/"); chroot != "" {
		if o.Chroot, err = url.PathUnescape("/" + chroot); err != nil {
			return bad("its path cannot be read")
		}
	}
	for host := range strings.SplitSeq(hosts, ",") {
		address, why := addressOf(host)
		if why != "" {
			return bad(why)
		}
		addrs = append(addrs, address)
	}
	for name, values := range options {
		if len(values) != 1 {
			return bad(fmt.Sprintf("option %s is given %d times", name, len(values)))
		}
		switch name {
		case "ca", "cert", "key", "server-name":
			scheme = "zks"
		case "prefix":
			o.KeyPrefix = values[0]
		case "tick", "timeout":
			t, err := time.ParseDuration(values[0])
			if err != nil || t <= 0 {
				return bad(name + " is no positive duration")
			}
			if name == "tick" {
				o.Tick = t
			} else {
				timeout = t
			}
		default:
			return bad("it has the unknown option " + strconv.Quote(name))
		}
	}
	if scheme == "zks" {
		if o.TLS, err = driverurl.TLS(options); err != nil {
			return bad(err.Error())
		}
	}
	return addrs, o, timeout, nil
}

// addressOf returns host:port, or why it cannot.
func addressOf(host string) (address, why string) {
	if host == "" {
		return "", "it has an empty address"
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = strings.Trim(host, "[]"), defaultPort
		if strings.Contains(name, ":") && !strings.HasPrefix(host, "[") {
			return "", "an IPv6 address stands in brackets"
		}
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || name == "" || strings.Contains(name, " ") {
		return "", "it has the bad address " + strconv.Quote(host)
	}
	return net.JoinHostPort(name, port), ""
}
