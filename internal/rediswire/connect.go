package rediswire

// This file makes the connections that lines use. What a connection needs before its first command (TLS, HELLO, AUTH,
// SELECT, CLIENT SETNAME, the user's OnConnect) is left to go-redis, so that every option of a client means the same
// here and there. go-redis has no call for that alone, so it is given a connection to greet and made to let go of it.

import (
	"context"
	"errors"
	"net"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// ConnectTime bounds how long a connection takes until it can be used; the options' DialTimeout bounds the dial alone.
const ConnectTime = 3 * time.Second

// Connect makes a connection as a client with opt would, and has the client library greet the server: TLS, credentials,
// database, the client's name, and OnConnect. Whatever fails, no step was sent.
func Connect(opt goredis.Options) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), ConnectTime)
	defer cancel()
	raw, err := opt.Dialer(ctx, opt.Network, opt.Addr)
	if err != nil {
		return nil, err
	}
	// The library closes a connection that it cannot greet, but lent keeps the connection from that.
	if err := greet(ctx, opt, raw); err != nil {
		_ = raw.Close() // the reason is err
		return nil, err
	}
	return raw, nil
}

// greet lends c to a client of the library until that has made a connection out of it. The client has a pool of one,
// dials once, pings, and is closed; its further features are turned off: retries, idle connections, and RESP3,
// with which a server may speak unasked.
func greet(ctx context.Context, opt goredis.Options, c net.Conn) error {
	used := false
	opt.Dialer = func(context.Context, string, string) (net.Conn, error) {
		if used {
			return nil, errors.New("the connection broke while it was set up")
		}
		used = true
		return lent{c}, nil
	}
	opt.Protocol = 2 // nothing comes unasked
	opt.PoolSize, opt.MinIdleConns, opt.MaxIdleConns, opt.MaxActiveConns = 1, 0, 1, 1
	opt.MaxRetries, opt.DialerRetries, opt.ContextTimeoutEnabled = -1, 1, true
	opt.PushNotificationProcessor = nil // another client's takes no second registration
	client := goredis.NewClient(&opt)
	if err := errors.Join(client.Ping(ctx).Err(), client.Close()); err != nil {
		return err
	}
	// The library has left its own deadlines on the connection.
	return c.SetDeadline(time.Time{})
}

// lent is a connection whose borrower cannot close it.
type lent struct{ net.Conn }

// Close does nothing.
func (lent) Close() error { return nil }
