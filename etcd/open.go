package etcd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/driverurl"
)

func init() {
	backend.Register("etcd", openDriver)
	backend.Register("etcds", openDriver)
}

func openDriver(ctx context.Context, rawURL string) (backend.Driver, error) {
	d, err := Open(ctx, rawURL)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// Open dials etcd and checks that a majority answers. Close closes the connections. A connection is closed also when its
// server owes an answer for 2 s and says nothing; the client goes on with another server. Proxies that the environment names
// are not used.
//
//	etcd://[user:password@]host[:port][,host[:port]…][?option=value&…]
//
// The scheme etcds, or any of the options ca, cert, key and server-name, selects TLS. Port 2379 is the default. Options:
//
//	ca, cert, key   files in PEM form: the authorities to trust, and the client's certificate with its key
//	server-name     the name to expect in the servers' certificate
//	prefix          Options.KeyPrefix
//	timeout         how long Open may take, 5s by default
//
// A bad URL is an error that wraps backend.ErrInvalidOption; a cluster that does not answer, backend.ErrUnavailable with
// what the last attempt to connect met; one that refuses the user, backend.ErrMisconfigured.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	config, o, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	conns := newConnections()
	config.DialOptions = append(config.DialOptions, conns.options()...)
	client, err := clientv3.New(config)
	if err != nil {
		why := backend.ErrUnavailable
		if forbidden(err) {
			why = backend.ErrMisconfigured
		}
		return nil, &backend.CallError{Driver: driverName, Call: "open", Err: fmt.Errorf("%w: %w", why, err)}
	}
	d := New(client, o)
	d.own, d.conns = true, conns
	ctx, cancel := context.WithTimeout(ctx, config.DialTimeout)
	defer cancel()
	if err := d.Ping(ctx); err != nil {
		_ = d.Close(context.WithoutCancel(ctx))
		if why := conns.failure(); why != nil && errors.Is(err, backend.ErrUnavailable) {
			err = &backend.CallError{Driver: driverName, Call: "open", Err: fmt.Errorf("%w: %w", why, errors.Unwrap(err))}
		}
		return nil, err
	}
	return d, nil
}

const defaultPort = "2379"

func parseURL(rawURL string) (clientv3.Config, *Options, error) {
	bad := func(why string) (clientv3.Config, *Options, error) {
		return clientv3.Config{}, nil, &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "backend URL", Value: backend.RedactURL(rawURL), Why: why,
		}
	}
	scheme, rest, ok := strings.Cut(rawURL, "://")
	if !ok || scheme != "etcd" && scheme != "etcds" {
		return bad("its scheme is neither etcd nor etcds")
	}
	rest, query, _ := strings.Cut(rest, "?")
	options, err := url.ParseQuery(query)
	if err != nil {
		return bad("its options cannot be read")
	}
	config := clientv3.Config{
		DialTimeout:          5 * time.Second,
		DialKeepAliveTime:    10 * time.Second, // gRPC allows no less
		DialKeepAliveTimeout: 3 * time.Second,
		Logger:               quiet,
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, password, _ := strings.Cut(rest[:at], ":")
		if config.Username, err = url.PathUnescape(user); err != nil {
			return bad("its user cannot be read")
		}
		if config.Password, err = url.PathUnescape(password); err != nil {
			return bad("its password cannot be read")
		}
		rest = rest[at+1:]
	}
	rest = strings.TrimSuffix(rest, "/")
	secure := scheme == "etcds" || options.Has("ca") || options.Has("cert") || options.Has("key") || options.Has("server-name")
	if secure {
		if config.TLS, err = driverurl.TLS(options); err != nil {
			return bad(err.Error())
		}
		if name := config.TLS.ServerName; name != "" {
			expect := expectName{credentials.NewTLS(config.TLS), name}
			config.DialOptions = append(config.DialOptions, grpc.WithTransportCredentials(expect))
		}
	}
	for host := range strings.SplitSeq(rest, ",") {
		address, why := addressOf(host)
		if why != "" {
			return bad(why)
		}
		if secure {
			address = "https://" + address
		}
		config.Endpoints = append(config.Endpoints, address)
	}
	o := &Options{}
	for name, values := range options {
		if len(values) != 1 {
			return bad(fmt.Sprintf("option %s is given %d times", name, len(values)))
		}
		switch name {
		case "ca", "cert", "key", "server-name":
		case "prefix":
			if why := badPrefix(values[0]); why != "" {
				return bad("prefix: " + why)
			}
			o.KeyPrefix = values[0]
		case "timeout":
			d, err := time.ParseDuration(values[0])
			if err != nil || d <= 0 {
				return bad("timeout is no positive duration, such as 5s")
			}
			config.DialTimeout = d
		default:
			return bad("it has the unknown option " + strconv.Quote(name))
		}
	}
	return config, o, nil
}

// expectName expects a name of its own in the server's certificate, where gRPC expects the one that was dialled, whatever
// the TLS settings say.
type expectName struct {
	credentials.TransportCredentials
	name string
}

func (e expectName) ClientHandshake(ctx context.Context, _ string, c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return e.TransportCredentials.ClientHandshake(ctx, e.name, c)
}

func (e expectName) Clone() credentials.TransportCredentials {
	return expectName{e.TransportCredentials.Clone(), e.name}
}

// addressOf returns host:port, or why it cannot.
func addressOf(host string) (address, why string) {
	if host == "" {
		return "", "it has an empty address"
	}
	if strings.ContainsAny(host, "/ ") {
		return "", "it has a path; etcd's URLs have none"
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
