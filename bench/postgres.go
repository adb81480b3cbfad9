package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	fencepostgres "github.com/fencelock/fencelock/postgres"
)

// postgresSystem is one PostgreSQL server, started here, which waits for the disk at every commit. It counts neither
// what the peers send nor what they commit.
type postgresSystem struct {
	address string
	admin   *pgxpool.Pool
	server  *process
	info    string
}

// startPostgres starts the server of Debian's package with its own settings but for the number of connections. It
// refuses to be run by root, for whom it is the user postgres.
func startPostgres(ctx context.Context, _ string) (system, error) {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if len(found) == 0 {
		return nil, errors.New("install PostgreSQL (Debian: postgresql)")
	}
	addrs, err := freeAddrs(1)
	if err != nil {
		return nil, err
	}
	s := &postgresSystem{address: addrs[0]}
	_, port, err := net.SplitHostPort(s.address)
	if err != nil {
		return nil, err
	}
	as := ""
	if os.Geteuid() == 0 {
		as = "setpriv --reuid=postgres --regid=postgres --clear-groups "
	}
	s.server, err = startProcess("sh", func(dir string) []string {
		bin, data := filepath.Dir(found[len(found)-1]), filepath.Join(dir, "data")
		script := fmt.Sprintf("%[1]s%[2]s/initdb -D %[3]s --auth=trust -U postgres && exec %[1]s%[2]s/postgres -D %[3]s -p %[4]s "+
			"-c listen_addresses=127.0.0.1 -c unix_socket_directories= -c max_connections=600 -c logging_collector=off",
			as, bin, data, port)
		if as != "" {
			script = "chown postgres . && " + script
		}
		return []string{"-c", script}
	})
	if err != nil {
		return nil, err
	}
	if s.admin, err = dialPostgres(clientOptions{addr: s.address}, 2); err != nil {
		return nil, errors.Join(err, s.close())
	}
	err = s.server.answers(ctx, func(ctx context.Context) error {
		return s.admin.QueryRow(ctx, `select 'PostgreSQL ' || current_setting('server_version')`).Scan(&s.info)
	})
	if err == nil {
		_, err = fencepostgres.Migrate(ctx, s.admin, nil)
	}
	if err == nil {
		_, err = s.admin.Exec(ctx, `create table bench_rows (name text primary key, n bigint not null default 0) with (fillfactor = 50);
			create table bench_leases (name text primary key, owner text not null, expires_at timestamptz not null)`)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("PostgreSQL at %s: %w", s.address, err), s.close())
	}
	return s, nil
}

// dialPostgres returns a pool of so many connections at most.
func dialPostgres(o clientOptions, connections int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig("postgres://postgres@" + o.addr + "/postgres?sslmode=disable")
	if err != nil {
		return nil, err
	}
	config.MaxConns = connections
	if o.dial != nil {
		config.ConnConfig.DialFunc = o.dial
	}
	return pgxpool.NewWithConfig(context.Background(), config)
}

func (s *postgresSystem) name() string    { return "postgres" }
func (s *postgresSystem) version() string { return s.info }
func (s *postgresSystem) addr() string    { return s.address }

// counters sums the time of the server and of its processes, those that have ended included.
func (s *postgresSystem) counters(context.Context) (counters, error) {
	c := counters{commands: math.NaN(), trips: math.NaN()}
	server := strconv.Itoa(s.server.child.Pid())
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range stats {
		text, _ := os.ReadFile(file) // it may have ended
		_, rest, _ := strings.Cut(string(text), ") ")
		fields := strings.Fields(rest)
		if len(fields) < 15 || fields[1] != server && filepath.Base(filepath.Dir(file)) != server {
			continue
		}
		last := 13
		if fields[1] != server {
			last = 15 // with the time of those that have ended
		}
		for _, f := range fields[11:last] {
			ticks, err := strconv.ParseInt(f, 10, 64)
			if err != nil {
				return c, err
			}
			c.cpu += time.Duration(ticks) * 10 * time.Millisecond
		}
	}
	return c, nil
}

func (s *postgresSystem) reset(ctx context.Context) error {
	_, err := s.admin.Exec(ctx, `truncate bench_rows, bench_leases`) // names stay, and fresh ones are used
	return err
}

func (s *postgresSystem) erase(ctx context.Context, key string) error {
	_, err := s.admin.Exec(ctx, `delete from fencelock.holds where name = $1`, key)
	return err
}

func (s *postgresSystem) missing(ctx context.Context, keys []string) (n int, err error) {
	err = s.admin.QueryRow(ctx, `select count(*) from unnest($1::text[]) k(name)
		where not exists (select 1 from fencelock.held h where h.name = k.name)`, keys).Scan(&n)
	return n, err
}

func (s *postgresSystem) pause() bool { return false } // its processes go on
func (s *postgresSystem) resume()     {}

func (s *postgresSystem) close() error {
	if s.admin != nil {
		s.admin.Close()
	}
	return s.server.close()
}
