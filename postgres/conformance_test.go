package postgres_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/postgres"
)

func urlOf(addr string) string {
	return "postgres://postgres@" + addr + "/postgres?sslmode=disable"
}

func newPool(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 3 // each is a process of the server
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// migrated starts a server with the schema.
func migrated(t testing.TB) *containers.PostgresServer {
	t.Helper()
	server := containers.Postgres(t, containers.Args("-c", "fsync=on", "-c", "max_connections=800"))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := postgres.Migrate(ctx, newPool(t, server.URL()), nil); err != nil {
		t.Fatal(err)
	}
	return server
}

// ways are all ways to make a driver.
var ways = map[string]func(t testing.TB, addr string) backend.FencingDriver{
	"New": func(t testing.TB, addr string) backend.FencingDriver {
		return postgres.New(newPool(t, urlOf(addr)), nil)
	},
	"Open": func(t testing.TB, addr string) backend.FencingDriver {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		d, err := postgres.Open(ctx, urlOf(addr)+"&timeout=20s&pool_max_conns=3")
		if err != nil {
			t.Fatal(err)
		}
		return d
	},
}

// TestConformance runs the suite over every way to make a driver, each on a separate server, one after the other. It
// does not run in parallel with other tests of the package: each connection is a process of the server, and if two
// processors run more than the suite, its first attempts fail.
func TestConformance(t *testing.T) {
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			if name != "New" {
				testtier.Only(t)
			}
			conformance.Run(t, harness(migrated(t), way).RefusesLong(name == "New"))
		})
	}
}

// TestConformanceAsPermits runs the suite with two of three permits as a mutex: two such holds do not fit. Like
// TestConformance, it does not run in parallel with other tests.
func TestConformanceAsPermits(t *testing.T) {
	testtier.Only(t)
	conformance.Run(t, conformance.AsPermits(harness(migrated(t), ways["New"]), 2, 3))
}

// service is a server as the suite needs it.
type service interface {
	Addr() string // for clients: that of a pooler, if there is one
	URL() string  // that of the server itself
	NewLink(t testing.TB) (addr string, link fault.Link)
	Restart(context.Context) error
	Stop(context.Context) error
	Start(context.Context) error
	Pause(context.Context) error
	Resume(context.Context) error
}

func harness(s service, way func(testing.TB, string) backend.FencingDriver) conformance.Harness {
	return conformance.Harness{
		New: func(t testing.TB) backend.Driver { return way(t, s.Addr()) },
		Linked: func(t testing.TB) (backend.Driver, fault.Link) {
			addr, link := s.NewLink(t)
			return way(t, addr), link
		},
		Server: conformance.Server{
			Restart: containers.Within(s.Restart),
			Stop:    containers.Within(s.Stop),
			Start:   containers.Within(s.Start),
			Pause:   containers.Within(s.Pause),
			Resume:  containers.Within(s.Resume),
			Evict: func(t testing.TB, name string) {
				execute(t, s, `delete from fencelock.holds where name = $1`, name)
			},
			EvictWaiter: func(t testing.TB, name string) int {
				return execute(t, s, `delete from fencelock.waits where name = $1`, name)
			},
			Wipe: func(t testing.TB) {
				execute(t, s, `truncate fencelock.names, fencelock.holds, fencelock.waits, fencelock.sessions,
					fencelock.revoked, fencelock.changes, fencelock.cluster;
					select fencelock.begin_history()`)
			},
			RefuseRelease: func(t testing.TB, name string) func() {
				execute(t, s, fmt.Sprintf(`create function fencelock.refuse() returns trigger language plpgsql as
					$$ begin raise insufficient_privilege; end $$;
					create trigger refuse before delete on fencelock.holds for each row when (old.name = '%[1]s')
						execute function fencelock.refuse();
					create trigger refuse before delete on fencelock.waits for each row when (old.name = '%[1]s')
						execute function fencelock.refuse()`, name))
				return func() { execute(t, s, `drop function fencelock.refuse cascade`) }
			},
			RefuseWrites: func(t testing.TB, _ string) func() {
				readOnly(t, s, "on")
				return func() { readOnly(t, s, "off") }
			},
			Compact: func(t testing.TB, name string) {
				execute(t, s, `delete from fencelock.changes where name = $1`, name)
				execute(t, s, `update fencelock.names set recorded_from = revision where name = $1`, name)
			},
		},
		Leftovers: func() ([]string, error) { return leftovers(s) },
		Intrude: func(t testing.TB, name string) {
			execute(t, s, `create table if not exists fencelock.foreign_table (name text)`)
			execute(t, s, `insert into fencelock.foreign_table values ($1)`, name)
			execute(t, s,
				`insert into fencelock.names (name, token) values ($1, 7) on conflict do nothing`, name+" of others")
			execute(t, s, `insert into fencelock.holds values ($1, 'foreign', '', 'foreign', '', 0, 0, 0, 7, now(), null, false, null, null)
				on conflict do nothing`,
				name+" of others")
		},
		TTL: 2 * time.Second, // a new connection is a new process of the server
	}
}

func execute(t testing.TB, s interface{ URL() string }, sql string, args ...any) (rows int) {
	t.Helper()
	containers.Within(func(ctx context.Context) error {
		conn, err := pgx.Connect(ctx, s.URL())
		if err != nil {
			return err
		}
		defer conn.Close(ctx)
		tag, err := conn.Exec(ctx, sql, args...)
		rows = int(tag.RowsAffected())
		return err
	})(t)
	return rows
}

// readOnly makes the server read-only for all clients, or ends that, and returns when an existing connection has
// noticed.
func readOnly(t testing.TB, s interface{ URL() string }, value string) {
	t.Helper()
	containers.Within(func(ctx context.Context) error {
		conn, err := pgx.Connect(ctx, s.URL())
		if err != nil {
			return err
		}
		defer conn.Close(ctx)
		if _, err := conn.Exec(ctx, `alter system set default_transaction_read_only = `+value); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, `select pg_reload_conf()`); err != nil {
			return err
		}
		for now := ""; now != value; {
			if err := conn.QueryRow(ctx, `show default_transaction_read_only`).Scan(&now); err != nil {
				return err
			}
		}
		return nil
	})(t)
}

// leftovers lists the leftovers of clients. Names and their greatest tokens are meant to stay, and so are the sessions
// of live clients, see TestCloseEndsItsSessions.
func leftovers(s service) ([]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.URL())
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	rows, err := conn.Query(ctx, `select 'hold of ' || name from fencelock.holds where request_id <> 'foreign'
		union all select 'wait for ' || name from fencelock.waits union all select 'session ' || id from fencelock.sessions
			where expires_at < clock_timestamp()`)
	if err != nil {
		return nil, fmt.Errorf("leftovers: %w", err)
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
