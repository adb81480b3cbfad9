package redis

// This file makes a driver from a URL (Open), and a client with fitting settings from New's client (fit). One server,
// Sentinels and a cluster differ here, in lines.go, and in whether AcquireAll is offered; the rest of the driver treats
// them alike.
//
// Errors of a URL name the fault and its correction, and come as early as possible: from reading the URL, or else from
// the first look at the server (redisconn.URL.Look).

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisconn"
)

var (
	// Each topology is a scheme, so that a URL of the wrong one is refused before anything is dialled.
	plain  = []string{"redis", "redis+sentinel", "redis+cluster"}
	secure = []string{"rediss", "rediss+sentinel", "rediss+cluster"}
)

// init registers the schemes for fencelock.Open.
func init() { kit.Register(Open, slices.Concat(plain, secure)...) }

// Open connects to the server, Sentinels or cluster that rawURL names, probes it, and returns a driver. Its Close
// closes the connections.
//
//	redis://user:password@host:6379/0
//	redis+sentinel://user:password@host1:26379,host2:26379/mymaster?db=0
//	redis+cluster://user:password@host1:6379,host2:6379
//
// The path is the number of the database, or the name of the Sentinels' master. User and password are those of the
// Redis servers. Ports may be left out where they are these. The scheme rediss in place of redis, or any of the options
// ca, cert, key and server-name, selects TLS. Options:
//
//	prefix             Options.KeyPrefix
//	timeout            for connecting and for the probe, 3s by default
//	ca, cert, key      files in PEM form: the authorities to trust, and the client's certificate with its key
//	server-name        the name to expect in the servers' certificate
//	password-file      a file with the password of the Redis servers, in place of the URL's; reread for connections
//	pool-size          connections to each server at most, by default ten a processor
//	protocol           2 or 3: the version of the Redis protocol, 3 by default where the server has it
//	db                 with Sentinels: the number of the database
//	sentinel-username with Sentinels that need separate credentials
//	sentinel-password
//	sentinel-password-file  a file with that password; read once, since the client of the Sentinels keeps it
//	allow-volatile-eviction=true  Options.AllowVolatileEviction
//	replicas           Options.Replicas
//	replica-timeout    Options.ReplicaTimeout
//	replica-disk=true  Options.ReplicaDisk
//	assume-version     Options.Assume: the server's version, such as 7.0; INFO is then not asked
//	assume-cluster=true  Options.Assume: names are on different servers, behind a proxy; with assume-version
//
// Errors wrap backend.ErrInvalidOption, ErrUnavailable or ErrMisconfigured. Passwords are not in their text.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	u, client, err := dial(rawURL)
	if err != nil {
		return nil, err
	}
	o, err := optionsOf(u)
	if err != nil {
		_ = client.Close() // the reason is err
		return nil, u.Invalid(err)
	}
	d := newDriver(client, true, nil, o)
	// The URL's timeout is for the first look, too: without it a URL that leads nowhere would take the default.
	d.service.patience = u.Timeout
	if err := u.Look(ctx, d); err != nil {
		return nil, err
	}
	return d, nil
}

// optionsOf reads the options of a URL that are the driver's.
func optionsOf(u *redisconn.URL) (o *Options, err error) {
	o = &Options{KeyPrefix: u.Options.Get("prefix")}
	cluster := false
	for name, on := range map[string]*bool{
		"allow-volatile-eviction": &o.AllowVolatileEviction, "replica-disk": &o.ReplicaDisk, "assume-cluster": &cluster,
	} {
		if *on, err = u.Bool(name); err != nil {
			return nil, err
		}
	}
	if o.Replicas, err = u.Int("replicas", 1, maxReplicas); err != nil {
		return nil, err
	}
	if u.Options.Has("replica-timeout") {
		if o.ReplicaTimeout, err = u.Duration("replica-timeout"); err != nil {
			return nil, err
		}
	}
	switch {
	case u.Options.Has("assume-version"):
		o.Assume = &Server{Version: u.Options.Get("assume-version"), Cluster: cluster}
	case cluster:
		return nil, errors.New("option assume-cluster needs assume-version")
	}
	return o, nil
}

// dial makes the client for a URL. It does no I/O. A part that the topology does not use, such as a path with a
// cluster, is an error: it is a sign that the URL leads elsewhere than its author thinks.
func dial(rawURL string) (*redisconn.URL, goredis.UniversalClient, error) {
	syntax := kit.Syntax{Driver: driverName, Schemes: plain, Secure: secure, Port: "6379"}
	scheme, _, _ := strings.Cut(rawURL, "://")
	_, variant, _ := strings.Cut(scheme, "+")
	syntax.Options = []string{
		"allow-volatile-eviction", "assume-version", "assume-cluster", "replicas", "replica-timeout", "replica-disk",
	}
	if variant == "sentinel" {
		syntax.Port, syntax.Options = "26379", append(syntax.Options, "db", "sentinel-username", "sentinel-password",
			"sentinel-password-file")
	}
	u, err := redisconn.ParseURL(syntax, rawURL)
	if err != nil {
		return nil, nil, err
	}
	opt, err := u.Server(u.Timeout)
	if err != nil {
		return nil, nil, u.Invalid(err)
	}
	var client goredis.UniversalClient
	switch variant {
	case "sentinel":
		client, err = dialSentinels(u, opt)
	case "cluster":
		client, err = dialCluster(u, opt)
	default:
		client, err = dialServer(u, opt)
	}
	if err != nil {
		return nil, nil, u.Invalid(err)
	}
	return u, client, nil
}

// dialServer makes the client of one server; the path is the number of its database.
func dialServer(u *redisconn.URL, opt *goredis.Options) (_ goredis.UniversalClient, err error) {
	if len(u.Addresses) > 1 {
		return nil, fmt.Errorf("it has several addresses: use %s+sentinel or %s+cluster", u.Scheme, u.Scheme)
	}
	if u.Path != "" {
		if opt.DB, err = redisconn.Database(u.Path); err != nil {
			return nil, err
		}
	}
	opt.Addr = u.Addresses[0]
	return goredis.NewClient(opt), nil
}

// dialSentinels makes a client that asks the Sentinels for the master of the path's name.
func dialSentinels(u *redisconn.URL, opt *goredis.Options) (_ goredis.UniversalClient, err error) {
	if u.Path == "" || strings.Contains(u.Path, "/") {
		return nil, errors.New("its path must be the name of the Sentinels' master, such as mymaster")
	}
	if text := u.Options.Get("db"); text != "" {
		if opt.DB, err = redisconn.Database(text); err != nil {
			return nil, err
		}
	}
	user, password, err := sentinelCredentials(u)
	if err != nil {
		return nil, err
	}
	return goredis.NewFailoverClient(&goredis.FailoverOptions{
		MasterName: u.Path, SentinelAddrs: u.Addresses,
		SentinelUsername: user, SentinelPassword: password,
		Username: opt.Username, Password: opt.Password, CredentialsProviderContext: opt.CredentialsProviderContext,
		DB: opt.DB, Protocol: opt.Protocol, PoolSize: opt.PoolSize,
		Dialer: opt.Dialer, DialTimeout: opt.DialTimeout,
		MaxRetries: opt.MaxRetries, ContextTimeoutEnabled: true, DialerRetries: opt.DialerRetries,
	}), nil
}

// dialCluster makes the client of a cluster, which has one database.
// sentinelCredentials returns the user and password that a URL gives for the Sentinels.
func sentinelCredentials(u *redisconn.URL) (user, password string, err error) {
	const inFile = "sentinel-password-file"
	user, password = u.Options.Get("sentinel-username"), u.Options.Get("sentinel-password")
	switch {
	case !u.Options.Has(inFile):
		return user, password, nil
	case password != "":
		return "", "", fmt.Errorf("it has a sentinel-password and a %s: give one of them", inFile)
	}
	password, err = kit.ReadPassword(inFile, u.Options.Get(inFile))
	return user, password, err
}

func dialCluster(u *redisconn.URL, opt *goredis.Options) (goredis.UniversalClient, error) {
	if u.Path != "" {
		return nil, errors.New("it has a path, but a cluster has only one database")
	}
	return goredis.NewClusterClient(&goredis.ClusterOptions{
		Addrs: u.Addresses, Username: opt.Username, Password: opt.Password,
		CredentialsProviderContext: opt.CredentialsProviderContext,
		Protocol:                   opt.Protocol, PoolSize: opt.PoolSize,
		Dialer: opt.Dialer, DialTimeout: opt.DialTimeout,
		MaxRetries: opt.MaxRetries, ContextTimeoutEnabled: true, DialerRetries: opt.DialerRetries,
	}), nil
}

// fit returns a client with settings that locks can rest on: client itself, or one made from its options, which the
// driver then owns and closes. go-redis 9 repeats a command up to three times by default, and waits up to 3 s for an
// answer regardless of the context; either would turn one question into several or hold a call beyond its context.
// Refusing such clients would not help: they are the default, and every user's first try would fail.
func fit(client goredis.UniversalClient) (fitting goredis.UniversalClient, own bool, err error) {
	if err := redisconn.CheckClient(client); err != nil {
		return nil, false, err
	}
	switch c := client.(type) {
	case *goredis.Client:
		opt := *c.Options()
		if opt.MaxRetries <= 0 && opt.ContextTimeoutEnabled { // the client has made 0 of -1, and 3 of 0
			return c, false, nil
		}
		// Of a client of Sentinel the copy has the dialer, which asks the Sentinels for the master each time.
		opt.MaxRetries, opt.ContextTimeoutEnabled, opt.DialerRetries, opt.MinIdleConns = -1, true, 1, 0
		opt.PushNotificationProcessor = nil // client's own one takes no second registration
		return goredis.NewClient(&opt), true, nil
	case *goredis.ClusterClient:
		opt := *c.Options()
		if opt.MaxRetries <= 0 && opt.ContextTimeoutEnabled {
			return c, false, nil
		}
		opt.MaxRetries, opt.ContextTimeoutEnabled, opt.DialerRetries, opt.MinIdleConns = -1, true, 1, 0
		opt.PushNotificationProcessor = nil
		return goredis.NewClusterClient(&opt), true, nil
	case *goredis.Ring:
		return c, false, &backend.ConfigError{
			Setting: "client", Value: "*redis.Ring", Want: "a *redis.Client or *redis.ClusterClient",
			Why: "a ring moves keys between servers as they come and go, and pushes do not follow them",
		}
	case interface{ Options() *goredis.Options }: // a type that embeds a client
		return client, false, nil
	}
	return client, false, &backend.ConfigError{
		Setting: "client", Value: fmt.Sprintf("%T", client), Want: "a *redis.Client or *redis.ClusterClient",
		Why: "the driver opens separate connections for locks, made from the client's options, and this one shows none",
	}
}
