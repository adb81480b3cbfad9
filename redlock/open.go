package redlock

// This file makes a driver from a URL. The URL's clients are never connected: New takes their options and makes its
// own. All servers of a URL have the same credentials, database and certificates, and New is for servers that differ.

import (
	"context"
	"errors"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/doctor"
	"github.com/fencelock/fencelock/internal/redisconn"
)

func init() {
	kit.Register(Open, "redlock", "redlocks")
	doctor.Register(examine, "redlock", "redlocks")
}

// syntax lists the parts of a URL of this driver.
var syntax = kit.Syntax{
	Driver: driverName, Schemes: []string{"redlock"}, Secure: []string{"redlocks"}, Port: "6379",
	Options: []string{
		"node-timeout", "max-ttl", "trust-fresh", "wait-for-all", "allow-volatile-eviction", "assume-version",
	},
}

// Open connects to the servers that rawURL names, checks them, and returns a driver. Its Close closes the
// connections.
//
//	redlock://user:password@host1:6379,host2:6379,host3:6379/0?max-ttl=30s
//
// The path is the number of the database. Credentials and database are the same on all servers; New takes servers that
// differ. Port 6379 is the default. The scheme redlocks, or any of the options ca, cert, key and server-name, selects
// TLS. Options:
//
//	prefix         Options.KeyPrefix
//	timeout        for connecting and for the first look at the servers, 3s by default
//	ca, cert, key  files in PEM form: the authorities to trust, and the client's certificate with its key
//	server-name    the name to expect in the servers' certificate
//	password-file  a file with the password, in place of the URL's; reread for new connections
//	node-timeout   Options.NodeTimeout
//	max-ttl        Options.MaxTTL
//	trust-fresh    Options.TrustFresh, true or false
//	wait-for-all   Options.WaitForAll, true or false
//	allow-volatile-eviction=true  Options.AllowVolatileEviction
//	assume-version  Options.AssumeVersion: INFO is not asked then
//	pool-size      connections to each server at most
//	protocol       2 or 3: the version of the Redis protocol on connections for pushes
//
// Errors wrap backend.ErrInvalidOption, ErrUnavailable or ErrMisconfigured. Passwords are not in their text.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	u, clients, o, err := dial(rawURL)
	if err != nil {
		return nil, err
	}
	// New copies the options and does not keep these clients.
	d := New(clients, o)
	for _, c := range clients {
		_ = c.Close() // only its options were used, and it has not connected
	}
	d.service.patience = u.Timeout
	if err := u.Look(ctx, d); err != nil {
		return nil, err
	}
	return d, nil
}

// dial makes the clients for a URL. It does no I/O.
func dial(rawURL string) (*redisconn.URL, []goredis.UniversalClient, *Options, error) {
	u, err := redisconn.ParseURL(syntax, rawURL)
	if err != nil {
		return nil, nil, nil, err
	}
	clients, o, err := clientsOf(u)
	if err != nil {
		return nil, nil, nil, u.Invalid(err)
	}
	return u, clients, o, nil
}

// clientsOf reads the rest of the URL beside its addresses: the driver's options, and the same credentials and database
// for all servers.
func clientsOf(u *redisconn.URL) (clients []goredis.UniversalClient, o *Options, err error) {
	o = &Options{KeyPrefix: u.Options.Get("prefix")}
	for name, d := range map[string]*time.Duration{"node-timeout": &o.NodeTimeout, "max-ttl": &o.MaxTTL} {
		if u.Options.Has(name) {
			if *d, err = u.Duration(name); err != nil {
				return nil, nil, err
			}
		}
	}
	for name, on := range map[string]*bool{
		"trust-fresh": &o.TrustFresh, "wait-for-all": &o.WaitForAll,
		"allow-volatile-eviction": &o.AllowVolatileEviction,
	} {
		if *on, err = u.Bool(name); err != nil {
			return nil, nil, err
		}
	}
	if o.AssumeVersion = u.Options.Get("assume-version"); o.AssumeVersion == "" && u.Options.Has("assume-version") {
		return nil, nil, errors.New("option assume-version is empty")
	}
	db := 0
	if u.Path != "" {
		if db, err = redisconn.Database(u.Path); err != nil {
			return nil, nil, err
		}
	}
	for _, addr := range u.Addresses {
		opt, err := u.Server(dialTime)
		if err != nil {
			return nil, nil, err
		}
		opt.Addr, opt.DB = addr, db
		clients = append(clients, goredis.NewClient(opt))
	}
	return clients, o, nil
}

// examine asks every server of a URL. They are independent: two addresses of one server, or of a primary and its
// replica, would count one vote twice.
func examine(ctx context.Context, rawURL string) (*doctor.Report, error) {
	u, clients, o, err := dial(rawURL)
	if err != nil {
		return nil, err
	}
	for _, c := range clients {
		_ = c.Close() // it has not connected
	}
	r := &doctor.Report{Independent: true, NoTokens: true}
	r.Members = doctor.Ask(ctx, u.Addresses, func(ctx context.Context, i int) (doctor.Member, error) {
		m, err := u.Examine(ctx, u.Addresses[i], o.AllowVolatileEviction)
		if m.Role == doctor.Follower {
			m.Problems = append(m.Problems, "is a replica: each server of Redlock is a primary without replication")
		}
		return m, err
	})
	return r, nil
}
