// This file opens drivers by URL. It passes libpq's URLs on to pgx, except for the options that all drivers of this
// module share: it removes schema, no-listen, ignore-standbys and timeout, and renames ca, cert and key to libpq's
// options. kit.Syntax, which reads the URLs of other drivers, would refuse libpq's own options.

package postgres

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

func init() { kit.Register(Open, "postgres", "postgresql") }

// Open connects to the database that a URL names, and probes it. Close disconnects.
//
//	postgres://[user[:password]@]host[:port][,host[:port]…]/database[?option=value&…]
//
// Several hosts are tried in turn; target_session_attrs=read-write selects the primary. Options:
//
//	schema             Options.Schema
//	no-listen          true or false: Options.NoListen
//	ignore-standbys    names, with commas between them: Options.IgnoreStandbys
//	timeout            bounds the wait for a connection, 5s by default
//	ca, cert, key      files in PEM form: the authorities to trust, and the client's certificate with its key
//	server-name        the name to expect in the servers' certificates
//
// All other options belong to libpq and pgxpool (sslmode, target_session_attrs, pool_max_conns, …).
//
// It returns when the server has answered, or with an error when the timeout or ctx ends; no connection stays open
// then. Errors wrap backend.ErrInvalidOption for an invalid URL, backend.ErrUnavailable if the server does not
// answer, and backend.ErrMisconfigured if it is unfit, refuses the user or has not been migrated.
func Open(ctx context.Context, rawURL string) (*Driver, error) {
	config, o, timeout, err := parseURL(rawURL)
	if err != nil {
		return nil, err
	}
	// It applies to the connections that Ping makes now and to all later ones, up to callTime.
	config.ConnConfig.ConnectTimeout = timeout
	d := newDriver(config, nil, o)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := d.Ping(ctx); err != nil {
		_ = d.Close(context.WithoutCancel(ctx))
		return nil, err
	}
	return d, nil
}

// renamed are options with the names that all drivers of fencelock share, and libpq's for them.
var renamed = map[string]string{"ca": "sslrootcert", "cert": "sslcert", "key": "sslkey"}

// expect sets the name that the certificates of all hosts must have.
func expect(config *pgx.ConnConfig, name string) {
	if config.TLSConfig != nil {
		config.TLSConfig.ServerName = name
	}
	for _, other := range config.Fallbacks {
		if other.TLSConfig != nil {
			other.TLSConfig.ServerName = name
		}
	}
}

// parseURL turns a URL into pgx's settings and ours. ca, cert, key or server-name without an sslmode mean
// verify-full: libpq's default, prefer, continues without TLS where the server does not offer it. The files are read
// again for each connection. Errors never show the password.
func parseURL(rawURL string) (*pgxpool.Config, *Options, time.Duration, error) {
	bad := func(why string) (*pgxpool.Config, *Options, time.Duration, error) {
		return nil, nil, 0, &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "backend URL", Value: backend.RedactURL(rawURL), Why: why,
		}
	}
	base, query, _ := strings.Cut(rawURL, "?")
	scheme, rest, ok := strings.Cut(base, "://")
	if !ok || scheme != "postgres" && scheme != "postgresql" {
		return bad("its scheme is neither postgres nor postgresql")
	}
	// For an empty host pgx would use PGHOST, or a socket of this machine.
	host := rest[strings.LastIndexByte(rest, '@')+1:]
	if host == "" || strings.HasPrefix(host, "/") {
		return bad("it has an empty address; write postgres://user@host:5432/database")
	}
	options, err := url.ParseQuery(query)
	if err != nil {
		return bad("its options cannot be read")
	}
	// kit.URL reads the options that all drivers have in common.
	o, timeout, serverName := &Options{}, 5*time.Second, ""
	u := kit.URL{Options: options}
	if o.NoListen, err = u.Bool("no-listen"); err != nil {
		return bad(err.Error())
	}
	if options.Has("timeout") {
		if timeout, err = u.Duration("timeout"); err != nil {
			return bad(err.Error())
		}
	}
	for name, values := range options {
		// url.Values.Get would silently use the first.
		if len(values) != 1 {
			return bad(fmt.Sprintf("option %s is given %d times", name, len(values)))
		}
		value := values[0]
		switch name {
		case "schema":
			if !schemaName.MatchString(value) {
				return bad("schema: " + schemaSyntax)
			}
			o.Schema = value
		case "no-listen", "timeout":
		case "ignore-standbys":
			o.IgnoreStandbys = strings.Split(value, ",")
		case "ca", "cert", "key", "server-name":
			if name == "server-name" {
				serverName = value
			} else {
				options.Set(renamed[name], value)
			}
			if !options.Has("sslmode") {
				options.Set("sslmode", "verify-full")
			}
		// An option of libpq or pgxpool stays in the URL.
		default:
			continue
		}
		options.Del(name)
	}
	// pgx's errors may show the whole URL, with the password.
	read := func() (*pgxpool.Config, error) {
		config, err := pgxpool.ParseConfig(base + "?" + options.Encode())
		if err == nil && serverName != "" {
			expect(config.ConnConfig, serverName)
		}
		return config, err
	}
	config, err := read()
	if err != nil {
		return bad("pgx says: " + strings.ReplaceAll(err.Error(), rawURL, "…"))
	}
	config.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		if now, err := read(); err == nil { // else the earlier settings stay in use
			c.TLSConfig, c.Fallbacks, c.Password = now.ConnConfig.TLSConfig, now.ConnConfig.Fallbacks, now.ConnConfig.Password
		}
		return nil
	}
	return config, o, timeout, nil
}
