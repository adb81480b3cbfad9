package redlock

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
)

func init() {
	open := func(ctx context.Context, rawURL string) (backend.Driver, error) {
		d, err := Open(ctx, rawURL)
		if err != nil {
			return nil, err // and not a nil *Driver in an interface
		}
		return d, nil
	}
	backend.Register("redlock", open)
	backend.Register("redlocks", open)
}

// Open connects to the servers that rawURL names, looks at them, and returns a driver whose Close closes the
// connections.
//
//	redlock://user:password@host1:6379,host2:6379,host3:6379/0?max_ttl=30s
//
// With redlocks instead of redlock the connections use TLS. Credentials and database are the same on all servers; New
// takes what differs. key_prefix, node_timeout, max_ttl and trust_fresh (true or false) set the Options of these names;
// other parameters are those of go-redis' ParseURL, except max_retries: nothing is retried silently.
//
// Errors wrap backend.ErrInvalidOption, ErrUnavailable or ErrMisconfigured. Passwords are not in their text.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	clients, o, err := dial(rawURL)
	if err != nil {
		return nil, redisconn.URLError(driverName, rawURL, err)
	}
	d := New(clients, o)
	for _, c := range clients {
		_ = c.Close() // only its options were of use, and it has not connected
	}
	if err := d.Ping(ctx); err != nil {
		_ = d.Close(ctx) // the reason is err
		return nil, err
	}
	return d, nil
}

// dial makes the clients for a URL. It does no I/O.
func dial(rawURL string) ([]goredis.UniversalClient, *Options, error) {
	urls := redisconn.SplitURL(rawURL)
	single := "redis"
	if urls.Scheme == "redlocks" {
		single = "rediss"
	}
	var clients []goredis.UniversalClient
	o := &Options{}
	for _, addr := range urls.Addrs {
		u, err := urls.One(single, addr)
		if err != nil {
			return nil, nil, err
		}
		if addr == "" {
			return nil, nil, errors.New("an address is empty")
		}
		query := u.Query()
		if err := o.read(query); err != nil {
			return nil, nil, err
		}
		u.RawQuery = query.Encode()
		opt, err := goredis.ParseURL(u.String())
		if err != nil {
			return nil, nil, err
		}
		clients = append(clients, goredis.NewClient(opt))
	}
	return clients, o, nil
}

// read takes the driver's own parameters out of a query.
func (o *Options) read(query url.Values) (err error) {
	o.KeyPrefix = query.Get("key_prefix")
	for name, d := range map[string]*time.Duration{"node_timeout": &o.NodeTimeout, "max_ttl": &o.MaxTTL} {
		if text := query.Get(name); text != "" {
			if *d, err = time.ParseDuration(text); err != nil {
				return fmt.Errorf("%s: %q is no duration such as 30s", name, text)
			}
		}
	}
	if text := query.Get("trust_fresh"); text != "" {
		if o.TrustFresh, err = strconv.ParseBool(text); err != nil {
			return fmt.Errorf("trust_fresh: %q is neither true nor false", text)
		}
	}
	for _, name := range []string{"key_prefix", "node_timeout", "max_ttl", "trust_fresh", "max_retries"} {
		query.Del(name)
	}
	return nil
}
