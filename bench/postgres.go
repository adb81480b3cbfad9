package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	fencepostgres "github.com/fencelock/fencelock/postgres"
)

// startPostgres starts the server of Debian's package with its own settings but for the number of connections: it
// waits for the disk at every commit, and does not count the peers' statements or commits. The server refuses to run
// as root; for root, startPostgres runs it as the user postgres.
func startPostgres(life *scope) *system {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if len(found) == 0 {
		life.must(errors.New("install PostgreSQL (Debian: postgresql)"))
	}
	s := &system{name: "postgres", addresses: life.addrs(1)}
	as, owned := "", "true"
	if os.Geteuid() == 0 {
		as, owned = "setpriv --reuid=postgres --regid=postgres --clear-groups ", "chown postgres ."
	}
	server := life.process("sh", func(dir string) []string {
		bin, data := filepath.Dir(found[len(found)-1]), filepath.Join(dir, "data")
		return []string{"-c", fmt.Sprintf("%[1]s && %[2]s%[3]s/initdb -D %[4]s --auth=trust -U postgres && "+
			"exec %[2]s%[3]s/postgres -D %[4]s -p %[5]s -c listen_addresses=127.0.0.1 -c unix_socket_directories= "+
			"-c max_connections=600 -c logging_collector=off", owned, as, bin, data, portOf(s.addr()))}
	})
	server.forks, s.servers = true, []*process{server}
	admin := dialPostgres(life, clientOptions{addr: s.addr()}, 2)
	life.must(server.answers(life.ctx, func(ctx context.Context) error {
		return admin.QueryRow(ctx, `select 'PostgreSQL ' || current_setting('server_version')`).Scan(&s.version)
	}))
	_, err := fencepostgres.Migrate(life.ctx, admin, nil)
	life.must(err)
	exec := func(by *scope, sql string, args ...any) {
		_, err := admin.Exec(by.ctx, sql, args...)
		by.must(err)
	}
	exec(life, `
		create table bench_rows (name text primary key, n bigint not null default 0) with (fillfactor = 50);
		create table bench_leases (name text primary key, owner text not null, expires_at timestamptz not null)`)
	s.reset = func(by *scope) { exec(by, `truncate bench_rows, bench_leases`) } // names stay, and fresh ones are used
	s.erase = func(by *scope, key string) { exec(by, `delete from fencelock.holds where name = $1`, key) }
	s.missing = func(by *scope, keys []string) (n int) {
		by.must(admin.QueryRow(by.ctx, `select count(*) from unnest($1::text[]) k(name)
			where not exists (select 1 from fencelock.held h where h.name = k.name)`, keys).Scan(&n))
		return n
	}
	s.prepare = func(ctx context.Context, name string) error {
		_, err := admin.Exec(ctx, `insert into bench_rows (name) values ($1) on conflict do nothing`, name)
		return err
	}
	return s
}

// dialPostgres returns a pool of at most the given number of connections.
func dialPostgres(c *scope, o clientOptions, connections int32) *pgxpool.Pool {
	config, err := pgxpool.ParseConfig("postgres://postgres@" + o.addr + "/postgres?sslmode=disable")
	c.must(err)
	config.MaxConns = connections
	if o.dial != nil {
		config.ConnConfig.DialFunc = o.dial
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	c.must(err)
	c.later(pool.Close)
	return pool
}

// postgresConns bounds the connections of each client: at most as many as callers.
const postgresConns = 32

func postgresPeers(s *system) []peer {
	return []peer{
		{name: "raw UPDATE", role: roleFloor, open: openRawPostgres, seed: s.prepare},
		ourPeer(func(c *client, o clientOptions) backend.Driver {
			return fencepostgres.New(dialPostgres(&c.scope, o, postgresConns), nil)
		}, same),
		{name: "advisory lock", role: rolePeer, waits: true, open: openAdvisory},
		{name: "polled lease", role: rolePeer, waits: true, open: openPolledLease},
	}
}

// openRawPostgres is the floor: two updates of a row, each committed.
func openRawPostgres(c *client, o clientOptions) lock {
	pool := dialPostgres(&c.scope, o, postgresConns)
	return func(ctx context.Context, name string) (hold, error) {
		update := func(ctx context.Context) error {
			_, err := pool.Exec(ctx, `update bench_rows set n = n + 1 where name = $1`, name)
			return err
		}
		return theirs{free: update}, update(ctx)
	}
}

// openAdvisory takes advisory locks, each on a separate connection while it waits and holds. They cost no commit,
// have no token, and do not report a loss.
func openAdvisory(c *client, o clientOptions) lock {
	pool := dialPostgres(&c.scope, o, postgresConns)
	return func(ctx context.Context, name string) (hold, error) {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return nil, err
		}
		if _, err := conn.Exec(ctx, `select pg_advisory_lock(hashtextextended($1, 0))`, name); err != nil {
			conn.Release()
			return nil, err
		}
		return theirs{free: func(ctx context.Context) error {
			defer conn.Release()
			_, err := conn.Exec(ctx, `select pg_advisory_unlock(hashtextextended($1, 0))`, name)
			return err
		}}, nil
	}
}

// polledEvery is the sleep of a waiter for a polled lease. Libraries sleep longer: a whole lease, 20 s.
const polledEvery = time.Second

// openPolledLease takes a row with an end, as libraries without notifications do.
func openPolledLease(c *client, o clientOptions) lock {
	pool := dialPostgres(&c.scope, o, postgresConns)
	return func(ctx context.Context, name string) (hold, error) {
		owner := backend.NewRequestID()
		for ; ctx.Err() == nil; sleep(ctx, polledEvery) {
			row := pool.QueryRow(ctx, `
				insert into bench_leases values ($1, $2, clock_timestamp() + $3::bigint * interval '1 ms')
				on conflict (name) do update set owner = excluded.owner, expires_at = excluded.expires_at
				where bench_leases.expires_at <= clock_timestamp() returning owner`, name, owner, o.ttl.Milliseconds())
			if err := row.Scan(new(string)); !errors.Is(err, pgx.ErrNoRows) {
				return theirs{free: func(ctx context.Context) error {
					_, err := pool.Exec(ctx, `delete from bench_leases where name = $1 and owner = $2`, name, owner)
					return err
				}}, err
			}
		}
		return nil, ctx.Err()
	}
}
