package redlock

import (
	"context"
	"errors"
	"net"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/internal/redisconn"
)

const connectTime = 3 * time.Second // of which the library's DialTimeout for the connection alone

// connect makes a connection to the server, and has the client library greet it: TLS, credentials, database, and the
// look at the server that decides whether it votes. Whatever fails, no step was sent.
func (n *node) connect() (*wire, *redisconn.Failure) {
	opt := *n.client.Options()
	ctx, cancel := context.WithTimeout(context.Background(), connectTime)
	defer cancel()
	raw, err := opt.Dialer(ctx, opt.Network, opt.Addr)
	if err == nil {
		if err = greet(ctx, opt, raw); err == nil {
			return newWire(raw), nil
		}
		_ = raw.Close() // the reason is err
	}
	f := *redisconn.FailureOf(err)
	f.Sent = false
	return nil, &f
}

// greet lends c to a client of the library until that has made a connection out of it.
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
	opt.PoolSize = 1
	opt.PushNotificationProcessor = nil
	client := goredis.NewClient(&opt)
	if err := errors.Join(client.Ping(ctx).Err(), client.Close()); err != nil {
		return err
	}
	return c.SetDeadline(time.Time{})
}

// lent is a connection that whoever borrows it does not close.
type lent struct{ net.Conn }

func (lent) Close() error { return nil }
