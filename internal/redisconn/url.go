package redisconn

// This file reads the URLs of both drivers, and adds the necessary change of the URL to errors of a first connection.
// The syntax that all drivers share is kit.Syntax; here are Redis' own parts: the options prefix, pool-size and
// protocol, and settings without which go-redis would repeat commands.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend/kit"
)

// ConnectTime is the default timeout for connecting and the first look at the servers.
const ConnectTime = 3 * time.Second

// URL is the parsed URL of a Redis driver.
type URL struct {
	*kit.URL
	driver string
	// Why the last attempt to connect failed.
	failed atomic.Pointer[error]
}

// ParseURL reads the URL of a driver, with its own options beside those that every Redis driver has.
func ParseURL(s kit.Syntax, rawURL string) (*URL, error) {
	s.User, s.Path, s.Timeout = true, true, ConnectTime
	s.Options = append([]string{"prefix", "pool-size", "protocol"}, s.Options...)
	u, err := s.ParseURL(rawURL)
	if err != nil {
		return nil, err
	}
	return &URL{URL: u, driver: s.Driver}, nil
}

// Database reads the number of a database, of which there are 16 unless a server is set up for more.
func Database(text string) (int, error) {
	n, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil || n < 0 {
		return 0, fmt.Errorf("its database is %q; want a number such as 0", text)
	}
	return n, nil
}

// Server returns options for a client of one server of the URL, without its address, that neither retries nor outlives
// contexts. Its attempts to connect take most of the timeout or most of a given time, so that their errors are here
// before the context of the caller ends. Its errors are those of options that cannot be meant.
func (u *URL) Server(most time.Duration) (*goredis.Options, error) {
	// A quarter of the timeout is left for the waiting call to return the error.
	connect := min(most, u.Timeout*3/4)
	poolSize, err := u.Int("pool-size", 1, 1<<20)
	if err != nil {
		return nil, err
	}
	protocol, err := u.Int("protocol", 2, 3)
	if err != nil {
		return nil, err
	}
	// One attempt, bounded by the context: what redis.fit asks of a client that is handed in.
	opt := &goredis.Options{
		Username: u.User, Password: u.Password, DialTimeout: connect,
		Dialer:   (&dialer{timeout: connect, tls: u.TLS, failed: &u.failed}).dial,
		PoolSize: poolSize, Protocol: protocol,
		MaxRetries: -1, ContextTimeoutEnabled: true, DialerRetries: 1,
	}
	if u.Options.Has("password-file") {
		opt.CredentialsProviderContext = func(context.Context) (user, password string, err error) {
			return u.User, u.CurrentPassword(), nil
		}
	}
	return opt, nil
}

// Look pings the driver that was made for the URL, and closes it if that fails. Its error names the necessary change.
func (u *URL) Look(ctx context.Context, d interface {
	Ping(context.Context) error
	Close(context.Context) error
}) error {
	err := d.Ping(ctx)
	if err == nil {
		return nil
	}
	_ = d.Close(context.WithoutCancel(ctx)) // the reason is err
	return u.explain(err)
}

// explain adds to the error of a first look at the servers the missing facts: why there was no connection
// when the time was over, and which setting the URL's author may have overlooked. A server that closes the connection
// at the first byte is taken for one that expects TLS.
func (u *URL) explain(err error) error {
	last := u.failed.Load()
	timeOver := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
	if last != nil && timeOver && !errors.Is(err, *last) {
		return fmt.Errorf("%w (the last attempt to connect failed: %w)", err, *last)
	}
	if u.TLS != nil || !errors.Is(err, io.EOF) {
		return err
	}
	// The scheme to write instead is named, in the driver's own vocabulary.
	plain, secure := u.Scheme, "rediss"+strings.TrimPrefix(u.Scheme, "redis")
	if u.driver == "redlock" {
		secure = "redlocks"
	}
	return fmt.Errorf("%w (the server closed the connection immediately: if it expects TLS, write %s://, not %s://)",
		err, secure, plain)
}
