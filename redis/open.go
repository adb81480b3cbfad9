package redis

import (
	"context"
	"errors"
	"fmt"
	"strings"

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
	for _, scheme := range []string{
		"redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster",
	} {
		backend.Register(scheme, open)
	}
}

// Open connects to the server, Sentinels or cluster that rawURL names, probes it, and returns a driver whose Close
// closes the connections.
//
//	redis://user:password@host:6379/0
//	redis+sentinel://user:password@host1:26379,host2:26379/mymaster?db=0
//	redis+cluster://user:password@host1:6379,host2:6379
//
// With rediss instead of redis the connections use TLS. The credentials are those of the Redis servers; Sentinels that
// ask for their own take sentinel_username and sentinel_password from the query. The name of the Sentinels' master is
// the path, or master_name in the query. key_prefix sets Options.KeyPrefix; other parameters are those of go-redis'
// ParseURL, ParseFailoverURL and ParseClusterURL, except max_retries: nothing is retried silently.
//
// Errors wrap backend.ErrInvalidOption, ErrUnavailable or ErrMisconfigured. Passwords are not in their text.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	client, o, err := dial(rawURL)
	if err != nil {
		return nil, redisconn.URLError(driverName, rawURL, err)
	}
	d := newDriver(client, true, nil, o)
	if err := d.Ping(ctx); err != nil {
		_ = d.Close(ctx) // the reason is err
		return nil, err
	}
	return d, nil
}

// dial makes the client for a URL. It does no I/O.
func dial(rawURL string) (goredis.UniversalClient, *Options, error) {
	urls := redisconn.SplitURL(rawURL)
	base, variant, _ := strings.Cut(urls.Scheme, "+")
	addrs := urls.Addrs
	if variant == "" && len(addrs) > 1 {
		return nil, nil, fmt.Errorf("several addresses need %s+sentinel or %s+cluster", base, base)
	}

	// The rest is a URL with one host, as go-redis reads it.
	u, err := urls.One(base, addrs[0])
	if err != nil {
		return nil, nil, err
	}
	query := u.Query()
	o := &Options{KeyPrefix: query.Get("key_prefix")}
	query.Del("key_prefix")
	query.Del("max_retries")
	switch variant {
	case "":
		u.RawQuery = query.Encode()
		opt, err := goredis.ParseURL(u.String())
		if err != nil {
			return nil, nil, err
		}
		opt.MaxRetries, opt.ContextTimeoutEnabled, opt.DialerRetries = -1, true, 1
		return goredis.NewClient(opt), o, nil

	case "sentinel":
		if name := strings.Trim(u.Path, "/"); name != "" {
			query.Set("master_name", name)
		}
		username, password := query.Get("sentinel_username"), query.Get("sentinel_password")
		query.Del("sentinel_username")
		query.Del("sentinel_password")
		if query.Get("master_name") == "" {
			return nil, nil, errors.New("the name of the Sentinels' master is missing: put it in the path")
		}
		for _, a := range addrs[1:] {
			query.Add("addr", a)
		}
		u.Path, u.RawQuery = "", query.Encode()
		opt, err := goredis.ParseFailoverURL(u.String())
		if err != nil {
			return nil, nil, err
		}
		opt.Username, opt.Password = opt.SentinelUsername, opt.SentinelPassword
		opt.SentinelUsername, opt.SentinelPassword = username, password
		opt.MaxRetries, opt.ContextTimeoutEnabled, opt.DialerRetries = -1, true, 1
		return goredis.NewFailoverClient(opt), o, nil

	case "cluster":
		for _, a := range addrs[1:] {
			query.Add("addr", a)
		}
		u.RawQuery = query.Encode()
		opt, err := goredis.ParseClusterURL(u.String())
		if err != nil {
			return nil, nil, err
		}
		opt.MaxRetries, opt.ContextTimeoutEnabled, opt.DialerRetries = -1, true, 1
		return goredis.NewClusterClient(opt), o, nil
	}
	return nil, nil, fmt.Errorf("unknown variant %q of scheme %s", variant, base)
}

// fit returns a client with settings that locks can rest on: client itself, or one made from its options.
func fit(client goredis.UniversalClient) (fitting goredis.UniversalClient, own bool, err error) {
	switch c := client.(type) {
	case nil:
		return nil, false, &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "client", Value: "nil", Why: "New needs a go-redis client",
		}
	case *goredis.Client:
		opt := *c.Options()
		if opt.MaxRetries <= 0 && opt.ContextTimeoutEnabled { // the client has made 0 of -1, and 3 of 0
			return c, false, nil
		}
		if opt.Addr == "FailoverClient" { // what go-redis writes for a client of Sentinel
			return c, false, settingsError("FailoverOptions", max(0, opt.MaxRetries), opt.ContextTimeoutEnabled)
		}
		opt.MaxRetries, opt.ContextTimeoutEnabled, opt.DialerRetries = -1, true, 1
		opt.PushNotificationProcessor = nil // client's own one takes no second registration
		return goredis.NewClient(&opt), true, nil
	case *goredis.ClusterClient:
		opt := *c.Options()
		if opt.MaxRetries <= 0 && opt.ContextTimeoutEnabled {
			return c, false, nil
		}
		opt.MaxRetries, opt.ContextTimeoutEnabled, opt.DialerRetries = -1, true, 1
		opt.PushNotificationProcessor = nil
		return goredis.NewClusterClient(&opt), true, nil
	case *goredis.Ring:
		return c, false, &backend.ConfigError{
			Setting: "client", Value: "*redis.Ring", Want: "a *redis.Client or *redis.ClusterClient",
			Why: "a ring moves keys between servers as they come and go, and pushes do not follow them",
		}
	}
	return client, false, nil
}

func settingsError(where string, retries int, honours bool) error {
	return &backend.ConfigError{
		Setting: where, Value: fmt.Sprintf("MaxRetries: %d, ContextTimeoutEnabled: %v", retries, honours),
		Want: "MaxRetries: -1, ContextTimeoutEnabled: true",
		Why:  "a silent retry of a lock that was granted is told that it is held, and calls outlive their contexts",
	}
}
