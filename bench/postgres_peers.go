package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	fencepostgres "github.com/fencelock/fencelock/postgres"
)

// postgresConns is how many connections each client may have: as many as callers at most.
const postgresConns = 32

func (s *postgresSystem) peers() []peer {
	return []peer{
		{name: "raw UPDATE", role: roleFloor, open: openRawPostgres, seed: func(ctx context.Context, name string) error {
			_, err := s.admin.Exec(ctx, `insert into bench_rows (name) values ($1) on conflict do nothing`, name)
			return err
		}},
		{name: ours, role: roleOurs, waits: true, renewEvery: ourRenewal, key: func(name string) string { return name },
			open: func(o clientOptions) (client, error) {
				pool, err := dialPostgres(o, postgresConns)
				if err != nil {
					return nil, err
				}
				return newOurs(fencepostgres.New(pool, nil), o.ttl, pool.Close)
			}},
		{name: "advisory lock", role: rolePeer, waits: true, open: openAdvisory},
		{name: "polled lease", role: rolePeer, waits: true, open: openPolledLease},
	}
}

// openRawPostgres is the floor: a row is updated and committed, and so it is again.
func openRawPostgres(o clientOptions) (client, error) {
	return onPool(o, func(ctx context.Context, pool *pgxpool.Pool, name string) (hold, error) {
		update := untold(func(ctx context.Context) error {
			_, err := pool.Exec(ctx, `update bench_rows set n = n + 1 where name = $1`, name)
			return err
		})
		return update, update(ctx)
	})
}

// onPool is a client with a pool of connections.
func onPool(o clientOptions, take func(ctx context.Context, pool *pgxpool.Pool, name string) (hold, error)) (client, error) {
	pool, err := dialPostgres(o, postgresConns)
	if err != nil {
		return nil, err
	}
	return library{end: pool.Close, take: func(ctx context.Context, name string) (hold, error) {
		return take(ctx, pool, name)
	}}, nil
}

// openAdvisory takes advisory locks, each on a connection of its own while it waits and holds. They cost no commit,
// have no token, and nobody is told of a loss.
func openAdvisory(o clientOptions) (client, error) {
	return onPool(o, func(ctx context.Context, pool *pgxpool.Pool, name string) (hold, error) {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return nil, err
		}
		if _, err := conn.Exec(ctx, `select pg_advisory_lock(hashtextextended($1, 0))`, name); err != nil {
			conn.Release()
			return nil, err
		}
		return untold(func(ctx context.Context) error {
			defer conn.Release()
			_, err := conn.Exec(ctx, `select pg_advisory_unlock(hashtextextended($1, 0))`, name)
			return err
		}), nil
	})
}

// polledEvery is how long a waiter for a polled lease sleeps. Libraries sleep longer: a whole lease, 20 s.
const polledEvery = time.Second

// openPolledLease takes a row with an end, as libraries do that nothing wakes.
func openPolledLease(o clientOptions) (client, error) {
	return onPool(o, func(ctx context.Context, pool *pgxpool.Pool, name string) (hold, error) {
		owner := backend.NewRequestID()
		for {
			row := pool.QueryRow(ctx, `insert into bench_leases values ($1, $2, clock_timestamp() + $3::bigint * interval '1 ms')
				on conflict (name) do update set owner = excluded.owner, expires_at = excluded.expires_at
				where bench_leases.expires_at <= clock_timestamp() returning owner`, name, owner, o.ttl.Milliseconds())
			if err := row.Scan(new(string)); !errors.Is(err, pgx.ErrNoRows) {
				return untold(func(ctx context.Context) error {
					_, err := pool.Exec(ctx, `delete from bench_leases where name = $1 and owner = $2`, name, owner)
					return err
				}), err
			}
			if sleep(ctx, polledEvery); ctx.Err() != nil {
				return nil, ctx.Err()
			}
		}
	})
}
