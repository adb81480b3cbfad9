package lockers_test

import (
	"context"
	"database/sql"
	"errors"
	"io/fs"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/golang-migrate/migrate/v4"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/examples/lockers"
	"github.com/fencelock/fencelock/postgres"
)

// replicas are programs that start at the same moment: each has its own client.
func replicas(t *testing.T, url string) (all []*fencelock.Client, db *sql.DB) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := postgres.Migrate(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		c, err := fencelock.ForCorrectness(postgres.New(pool, nil), nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_ = c.Close(ctx)
		})
		all = append(all, c)
	}
	if db, err = sql.Open("pgx", url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return all, db
}

// slow is a migration that a process which does not wait would run as well: it is no error to run it twice, and takes a
// while.
func slow(table string) string {
	return "create table if not exists " + table + " (n int); select pg_sleep(0.3); insert into " + table + " values (1);"
}

func together(n int, f func(i int) error) error {
	var all sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		all.Go(func() { errs[i] = f(i) })
	}
	all.Wait()
	return errors.Join(errs...)
}

func rows(t *testing.T, db *sql.DB, table string) (n int) {
	t.Helper()
	if err := db.QueryRow("select count(*) from " + table).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestLockers(t *testing.T) {
	server := containers.Postgres(t, containers.Args("-c", "fsync=on", "-c", "max_connections=200"))
	clients, db := replicas(t, server.URL())

	t.Run("goose", func(t *testing.T) {
		files := fstest.MapFS{
			"1_slow.sql": {Data: []byte("-- +goose NO TRANSACTION\n-- +goose Up\n" + slow("by_goose"))},
		}
		var applied atomic.Int32
		err := together(len(clients), func(i int) error {
			p, err := goose.NewProvider(goose.DialectPostgres, db, fs.FS(files),
				goose.WithLocker(lockers.NewGoose(clients[i], "schema/goose")))
			if err != nil {
				return err
			}
			done, err := p.Up(t.Context())
			applied.Add(int32(len(done)))
			return err
		})
		if n := rows(t, db, "by_goose"); err != nil || n != 1 || applied.Load() != 1 {
			t.Errorf("the migration ran %d times, %d by goose's account: %v", n, applied.Load(), err)
		}
	})

	t.Run("golang-migrate", func(t *testing.T) {
		files := fstest.MapFS{"1_slow.up.sql": {Data: []byte(slow("by_migrate"))}}
		var applied atomic.Int32
		err := together(len(clients), func(i int) error {
			source, err := iofs.New(files, ".")
			if err != nil {
				return err
			}
			inner, err := migratepgx.WithInstance(db, &migratepgx.Config{})
			if err != nil {
				return err
			}
			m, err := migrate.NewWithInstance("iofs", source, "pgx5",
				lockers.NewMigrate(t.Context(), inner, clients[i], "schema/migrate"))
			if err != nil {
				return err
			}
			if err = m.Up(); err == nil {
				applied.Add(1)
			} else if errors.Is(err, migrate.ErrNoChange) {
				err = nil
			}
			return err
		})
		if n := rows(t, db, "by_migrate"); err != nil || n != 1 || applied.Load() != 1 {
			t.Errorf("the migration ran %d times, %d by migrate's account: %v", n, applied.Load(), err)
		}
	})

	t.Run("gocron", func(t *testing.T) {
		var runs, turns atomic.Int32
		every := make(chan struct{}, 100)
		err := together(len(clients), func(i int) error {
			s, err := gocron.NewScheduler(gocron.WithDistributedLocker(lockers.NewGocron(clients[i], time.Minute)))
			if err != nil {
				return err
			}
			t.Cleanup(func() { _ = s.Shutdown() })
			at := gocron.OneTimeJob(gocron.OneTimeJobStartImmediately())
			_, err = s.NewJob(at, gocron.NewTask(func() { runs.Add(1) }), gocron.WithName("nightly"),
				gocron.WithEventListeners(
					gocron.AfterJobRuns(func(uuid.UUID, string) { turns.Add(1); every <- struct{}{} }),
					gocron.AfterLockError(func(_ uuid.UUID, _ string, err error) {
						if !errors.Is(err, fencelock.ErrHeld) {
							t.Errorf("the lock of a scheduler that comes second: %v", err)
						}
						turns.Add(1)
						every <- struct{}{}
					})))
			s.Start()
			return err
		})
		for turns.Load() < int32(len(clients)) && err == nil {
			select {
			case <-every:
			case <-time.After(time.Minute):
				t.Fatalf("%d of %d schedulers had their turn", turns.Load(), len(clients))
			}
		}
		if err != nil || runs.Load() != 1 {
			t.Errorf("the job ran %d times: %v", runs.Load(), err)
		}
	})
}
