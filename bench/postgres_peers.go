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
	pool, err := dialPostgres(o, postgresConns)
	return rawPostgres{pool}, err
}

type rawPostgres struct{ pool *pgxpool.Pool }

func (c rawPostgres) close() { c.pool.Close() }

func (c rawPostgres) lock(ctx context.Context, name string) (hold, error) {
	return c.tryLock(ctx, name)
}

func (c rawPostgres) tryLock(ctx context.Context, name string) (hold, error) {
	h := rawPostgresRow{c.pool, name}
	return h, h.unlock(ctx)
}

type rawPostgresRow struct {
	pool *pgxpool.Pool
	name string
}

func (h rawPostgresRow) unlock(ctx context.Context) error {
	_, err := h.pool.Exec(ctx, `update bench_rows set n = n + 1 where name = $1`, h.name)
	return err
}

func (h rawPostgresRow) lost() <-chan struct{} { return nil }

// openAdvisory takes advisory locks, each on a connection of its own while it waits and holds. They cost no commit,
// have no token, and nobody is told of a loss.
func openAdvisory(o clientOptions) (client, error) {
	pool, err := dialPostgres(o, postgresConns)
	return advisory{pool}, err
}

type advisory struct{ pool *pgxpool.Pool }

func (c advisory) close() { c.pool.Close() }

func (c advisory) tryLock(ctx context.Context, name string) (hold, error) { return c.lock(ctx, name) }

func (c advisory) lock(ctx context.Context, name string) (hold, error) {
	conn, err := c.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, `select pg_advisory_lock(hashtextextended($1, 0))`, name); err != nil {
		conn.Release()
		return nil, err
	}
	return advisoryHold{conn, name}, nil
}

type advisoryHold struct {
	conn *pgxpool.Conn
	name string
}

func (h advisoryHold) unlock(ctx context.Context) error {
	defer h.conn.Release()
	_, err := h.conn.Exec(ctx, `select pg_advisory_unlock(hashtextextended($1, 0))`, h.name)
	return err
}

func (h advisoryHold) lost() <-chan struct{} { return nil }

// polledEvery is how long a waiter for a polled lease sleeps. Libraries sleep longer: a whole lease, 20 s.
const polledEvery = time.Second

// openPolledLease takes a row with an end, as libraries do that nothing wakes.
func openPolledLease(o clientOptions) (client, error) {
	pool, err := dialPostgres(o, postgresConns)
	return polledLease{pool, o.ttl}, err
}

type polledLease struct {
	pool *pgxpool.Pool
	ttl  time.Duration
}

func (c polledLease) close() { c.pool.Close() }

func (c polledLease) lock(ctx context.Context, name string) (hold, error) {
	for {
		h, err := c.tryLock(ctx, name)
		if !errors.Is(err, backend.ErrHeld) {
			return h, err
		}
		if sleep(ctx, polledEvery); ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

func (c polledLease) tryLock(ctx context.Context, name string) (hold, error) {
	h := polledHold{c.pool, name, backend.NewRequestID()}
	row := c.pool.QueryRow(ctx, `insert into bench_leases values ($1, $2, clock_timestamp() + $3::bigint * interval '1 ms')
		on conflict (name) do update set owner = excluded.owner, expires_at = excluded.expires_at
		where bench_leases.expires_at <= clock_timestamp() returning owner`, name, h.owner, c.ttl.Milliseconds())
	err := row.Scan(new(string))
	if errors.Is(err, pgx.ErrNoRows) {
		err = backend.ErrHeld
	}
	return h, err
}

type polledHold struct {
	pool        *pgxpool.Pool
	name, owner string
}

func (h polledHold) unlock(ctx context.Context) error {
	_, err := h.pool.Exec(ctx, `delete from bench_leases where name = $1 and owner = $2`, h.name, h.owner)
	return err
}

func (h polledHold) lost() <-chan struct{} { return nil }
