package etcd

import (
	"context"
	"errors"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/grpctls"
)

// Open makes the client too, and so decides the settings that New leaves to its caller: the time for which a server
// may not answer (silent.go), the interval of password checks (token.go), and the error without a connection.

// quiet keeps Open's client from writing to standard error; callers get its errors.
var quiet = zap.NewNop()

// The schemes of fencelock.Open.
func init() { kit.Register(Open, "etcd", "etcds") }

// Open dials etcd and checks that a majority answers, within the option timeout and ctx. Close closes the connections.
// Open's client also closes a connection when its server owes an answer for 2 s and sends nothing; up to eight times
// that after a server was too slow to check the password. The client continues with another server. Proxies that the
// environment names are not used.
//
// Members that join the cluster later are used too, if the URL has an address as a member advertises it
// (--advertise-client-urls).
//
//	etcd://[user:password@]host[:port][,host[:port]…][?option=value&…]
//
// The scheme etcds, or any of the options ca, cert, key and server-name, selects TLS. Port 2379 is the default.
// Options:
//
//	ca, cert, key   files in PEM form: the authorities to trust, and the client's certificate with its key
//	server-name     the name to expect in the servers' certificate
//	password-file   a file with the password, in place of the URL's; reread for each token
//	prefix          Options.KeyPrefix
//	timeout         how long Open may take, 5s by default
//
// A bad URL is an error that wraps backend.ErrInvalidOption; a cluster that does not answer, backend.ErrUnavailable
// with the error of the last attempt to connect; a cluster that refuses the user, backend.ErrMisconfigured. No error
// contains the password.
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
		if classOf(err) == engine.Never {
			why = backend.ErrMisconfigured
		}
		return nil, &backend.CallError{Driver: driverName, Call: "open", Err: fmt.Errorf("%w: %w", why, err)}
	}
	d := driverOn(client, o, conns)
	ctx, cancel := context.WithTimeout(ctx, config.DialTimeout)
	defer cancel()
	if err := d.Ping(ctx); err != nil {
		_ = d.Close(context.WithoutCancel(ctx))
		silent := kit.IsContext(err)
		if !silent && !errors.Is(err, backend.ErrUnavailable) {
			return nil, err
		}
		// The library reports "context deadline exceeded" where no connection stood. The error of the last attempt to
		// connect is worth more to the reader, such as a closed port or an untrusted certificate.
		cause := errors.Unwrap(err)
		if silent {
			cause = fmt.Errorf("%w: %w", backend.ErrUnavailable, cause)
		}
		if why := conns.failure(); why != nil {
			cause = fmt.Errorf("%w: %w", why, cause)
		}
		return nil, &backend.CallError{Driver: driverName, Call: "open", Err: cause}
	}
	return d, nil
}

// syntax is the URL syntax of Open.
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
	if u.Options.Has("password-file") {
		config.DialOptions = append(config.DialOptions, grpc.WithChainUnaryInterceptor(withPassword(u.CurrentPassword)))
	}
	if u.TLS == nil {
		return config, o, nil
	}
	for i, address := range config.Endpoints {
		config.Endpoints[i] = "https://" + address
	}
	// These replace the credentials that the client makes of config.TLS.
	config.DialOptions = append(config.DialOptions, grpc.WithTransportCredentials(grpctls.Credentials(u.TLS)))
	// gRPC would expect the dialled name, regardless of the TLS settings.
	if name := u.TLS.ServerName; name != "" {
		config.DialOptions = append(config.DialOptions, grpc.WithAuthority(name))
	}
	return config, o, nil
}

// withPassword puts the current password into requests for a token. The client library keeps the first password.
func withPassword(current func() string) grpc.UnaryClientInterceptor {
	return func(
		ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
		call grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		if r, ok := request.(*pb.AuthenticateRequest); ok {
			request = &pb.AuthenticateRequest{Name: r.Name, Password: current()}
		}
		return call(ctx, method, request, reply, conn, opts...)
	}
}
