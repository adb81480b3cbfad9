package etcd

import (
	"context"
	"errors"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// Open makes the client too, and so decides what New has to leave to its caller: how long a server may be silent
// (silent.go), when a member is left that answers others but not us (unheard.go), how often a password is checked
// (token.go), and what an error says when no connection stood.

// quiet keeps the client that Open makes from writing to standard error; its errors reach the callers.
var quiet = zap.NewNop()

// The schemes of fencelock.OpenURL.
func init() { kit.Register(Open, "etcd", "etcds") }

// Open dials etcd and checks that a majority answers, within the option timeout and ctx. Close closes the connections.
// A connection is closed also when its server owes an answer for 2 s and says nothing, or for 1 s when another server
// has answered a later request; up to eight times that after one was too slow to check the password. The client goes on
// with another server. Proxies that the environment names are not used.
//
//	etcd://[user:password@]host[:port][,host[:port]…][?option=value&…]
//
// The scheme etcds, or any of the options ca, cert, key and server-name, selects TLS. Port 2379 is the default.
// Options:
//
//	ca, cert, key   files in PEM form: the authorities to trust, and the client's certificate with its key
//	server-name     the name to expect in the servers' certificate
//	prefix          Options.KeyPrefix
//	timeout         how long Open may take, 5s by default
//
// A bad URL is an error that wraps backend.ErrInvalidOption; a cluster that does not answer, backend.ErrUnavailable
// with what the last attempt to connect met; one that refuses the user, backend.ErrMisconfigured. The password stands
// in no error.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	config, o, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	conns := newConnections(config.Username)
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
	d.conns = conns
	ctx, cancel := context.WithTimeout(ctx, config.DialTimeout)
	defer cancel()
	// The library says "context deadline exceeded" where no connection stood. What the last attempt to connect met is
	// worth more to the reader, such as a closed port or a certificate that is not trusted.
	if err := d.Ping(ctx); err != nil {
		_ = d.Close(context.WithoutCancel(ctx))
		if why := conns.failure(); why != nil && errors.Is(err, backend.ErrUnavailable) {
			err = &backend.CallError{
				Driver: driverName, Call: "open", Err: fmt.Errorf("%w: %w", why, errors.Unwrap(err)),
			}
		}
		return nil, err
	}
	return d, nil
}

// syntax is what Open reads beside the options that all drivers have.
var syntax = kit.Syntax{
	Driver: driverName, Schemes: []string{"etcd"}, Secure: []string{"etcds"}, Port: "2379", User: true,
	Options: []string{"prefix"}, Timeout: 5 * time.Second,
}

// parseURL reads a URL into the settings of the client and of the driver. gRPC's own keepalive is switched on as the
// last resort: it also notices a server to which only a watch is open.
func parseURL(rawURL string) (clientv3.Config, *Options, error) {
	u, err := syntax.ParseURL(rawURL)
	if err != nil {
		return clientv3.Config{}, nil, err
	}
	o := &Options{KeyPrefix: u.Options.Get("prefix")}
	if why := badPrefix(o.KeyPrefix); why != "" && u.Options.Has("prefix") {
		return clientv3.Config{}, nil, u.Invalid(errors.New("prefix: " + why))
	}
	config := clientv3.Config{
		Endpoints: u.Addresses, Username: u.User, Password: u.Password, TLS: u.TLS,
		DialTimeout:          u.Timeout,
		DialKeepAliveTime:    10 * time.Second, // gRPC allows no less
		DialKeepAliveTimeout: 3 * time.Second,
		Logger:               quiet,
	}
	if u.TLS == nil {
		return config, o, nil
	}
	for i, address := range config.Endpoints {
		config.Endpoints[i] = "https://" + address
	}
	// gRPC would expect the name that was dialled, whatever the TLS settings say.
	if name := u.TLS.ServerName; name != "" {
		config.DialOptions = append(config.DialOptions, grpc.WithAuthority(name))
	}
	return config, o, nil
}
