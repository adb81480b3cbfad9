package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

const space = "cluster-1"

// The guards under test, with the name of their database/sql driver.
var (
	postgres = database{driver: "pgx", dialect: sqlguard.PostgreSQL, value: `INSERT INTO written (resource, value) VALUES ($1, $2)
		ON CONFLICT (resource) DO UPDATE SET value = excluded.value`, read: `SELECT value FROM written WHERE resource = $1`}
	mariaDB = database{driver: "mysql", dialect: sqlguard.MySQL, value: `REPLACE INTO written (resource, value) VALUES (?, ?)`}
	sqLite  = database{driver: "sqlite", dialect: sqlguard.SQLite, value: `REPLACE INTO written (resource, value) VALUES (?, ?)`}
)

func TestMain(m *testing.M) {
	guardtest.RunChild(map[string]guardtest.Open{
		"postgres": postgres.open, "mariadb": mariaDB.open, "sqlite": sqLite.open,
	})
	goleak.VerifyTestMain(m)
}

func TestPostgreSQL(t *testing.T) {
	server := containers.Postgres(t)
	postgres.run(t, "postgres", server.URL(), restart(server.Server))
	postgres.levels(t, server.URL())
}

func TestMariaDB(t *testing.T) {
	server := containers.MariaDB(t)
	mariaDB.run(t, "mariadb", server.DSN(), restart(server.Server))
	mariaDB.levels(t, server.DSN())

	// Settings of the client that change how values travel, and what is answered to a statement.
	t.Run("client-settings", func(t *testing.T) {
		db := mariaDB.connect(t, server.DSN()+"?interpolateParams=true&clientFoundRows=true")
		guard := must(t, sqlguard.MySQL, nil)
		for _, step := range []struct {
			token fencing.Token
			want  error
		}{{1<<63 - 2, nil}, {1<<63 - 2, nil}, {1<<63 - 1, nil}, {1<<63 - 2, fencing.ErrStale}, {1<<63 - 1, nil}} {
			err := in(t, db, func(tx *sql.Tx) error { return guard.In(tx).Check(t.Context(), "client-settings", step.token) })
			if !errors.Is(err, step.want) {
				t.Errorf("check of %v: %v, want %v", step.token, err, step.want)
			}
		}
	})
}

func TestSQLite(t *testing.T) {
	for _, journal := range []string{"wal", "delete"} {
		t.Run(journal, func(t *testing.T) {
			// It does not wait for the disk, which a kill of a process is no reason for.
			dsn := "file:" + filepath.Join(t.TempDir(), "guarded.db") + "?_txlock=immediate&_pragma=journal_mode(" + journal +
				")&_pragma=busy_timeout(30000)&_pragma=synchronous(off)"
			// The file lives in its clients' processes, and clauses close those.
			sqLite.run(t, "sqlite", dsn, func(testing.TB) {})
		})
	}
}

func restart(server *containers.Server) func(testing.TB) {
	return func(t testing.TB) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := server.Restart(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// database is one dialect, and a table beside the guard's that is written to.
type database struct {
	driver      string
	dialect     sqlguard.Dialect
	value, read string
}

func (d database) run(t *testing.T, name, dsn string, restart func(testing.TB)) {
	db := d.connect(t, dsn)
	if err := d.guard(t).Create(t.Context(), db); err != nil {
		t.Fatal(err)
	}
	if err := d.guard(t).Create(t.Context(), db); err != nil {
		t.Errorf("to create the table again: %v", err)
	}
	if _, err := db.ExecContext(t.Context(), `CREATE TABLE written (resource varchar(500) PRIMARY KEY, value varchar(100))`); err != nil {
		t.Fatal(err)
	}
	guardtest.Run(t, guardtest.Harness{
		Name: name, Open: d.open, Address: dsn, Space: space, Restart: restart, Again: again,
	})
	t.Run("spaces", func(t *testing.T) { d.spaces(t, d.connect(t, dsn)) })
	t.Run("rollback", func(t *testing.T) { d.rollback(t, d.connect(t, dsn)) })
}

func (d database) connect(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(d.driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func (d database) guard(t testing.TB) *sqlguard.Guard {
	t.Helper()
	return must(t, d.dialect, &sqlguard.Options{Space: space})
}

func must(t testing.TB, d sqlguard.Dialect, o *sqlguard.Options) *sqlguard.Guard {
	t.Helper()
	g, err := sqlguard.New(d, o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// open returns a client with one connection.
func (d database) open(_ context.Context, dsn string) (*guardtest.Client, error) {
	guard, err := sqlguard.New(d.dialect, &sqlguard.Options{Space: space})
	if err != nil {
		return nil, err
	}
	db, err := sql.Open(d.driver, dsn)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	write := func(ctx context.Context, c fencing.Claim, rest func(*sql.Tx) error) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := fencing.Check(ctx, guard.In(tx), c); err != nil {
			return err
		}
		if err := rest(tx); err != nil {
			return err
		}
		return tx.Commit()
	}
	read := d.read
	if read == "" {
		read = `SELECT value FROM written WHERE resource = ?`
	}
	return &guardtest.Client{
		Check: func(ctx context.Context, c fencing.Claim) error {
			return write(ctx, c, func(*sql.Tx) error { return nil })
		},
		Write: func(ctx context.Context, c fencing.Claim, value string, between func()) error {
			return write(ctx, c, func(tx *sql.Tx) error {
				between()
				_, err := tx.ExecContext(ctx, d.value, c.Resource, value)
				return err
			})
		},
		Read: func(ctx context.Context, resource string) (value string, err error) {
			err = db.QueryRowContext(ctx, read, resource).Scan(&value)
			if errors.Is(err, sql.ErrNoRows) {
				return "", nil
			}
			return value, err
		},
		Close: db.Close,
	}, nil
}

// again reports whether the database gave up for reasons of its own.
func again(err error) bool {
	var my *mysql.MySQLError
	if errors.As(err, &my) {
		return my.Number == 1213 || my.Number == 1205 // deadlock, and too long a wait for a lock
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code == "40001" || pg.Code == "40P01"
	}
	var lite *sqlite.Error
	return errors.As(err, &lite) && lite.Code()&0xff == sqlite3.SQLITE_BUSY
}

// in calls f inside a transaction that commits.
func in(t testing.TB, db *sql.DB, f func(*sql.Tx) error) error {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}

func (d database) spaces(t *testing.T, db *sql.DB) {
	old, replaced := d.guard(t), must(t, d.dialect, &sqlguard.Options{Space: "cluster-2"})
	check := func(g *sqlguard.Guard, space, resource string, token fencing.Token) error {
		return in(t, db, func(tx *sql.Tx) error { return g.In(tx).CheckFrom(t.Context(), space, resource, token) })
	}
	accept := func(g *sqlguard.Guard, from, to string) (rows int64) {
		if err := in(t, db, func(tx *sql.Tx) (err error) {
			rows, err = g.AcceptSpace(t.Context(), tx, from, to)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return rows
	}
	if err := check(old, space, "spaces", 40); err != nil {
		t.Fatal(err)
	}
	var other *fencing.SpaceError
	err := check(replaced, "cluster-2", "spaces", 50)
	if !errors.As(err, &other) || *other != (fencing.SpaceError{Resource: "spaces", Token: 50, Highest: 40, Space: "cluster-2", Want: space}) {
		t.Errorf("a guard of another space than the row's: %v", err)
	}
	if rows := accept(old, space, "cluster-2"); rows == 0 {
		t.Error("no row was of the old space")
	}
	if err := check(old, space, "spaces", 60); !errors.Is(err, fencing.ErrSpace) {
		t.Errorf("the old space after the new one was accepted: %v", err)
	}
	if err := check(replaced, "cluster-2", "spaces", 3); err != nil {
		t.Errorf("the new space's tokens begin anew: %v", err)
	}

	any := must(t, d.dialect, nil)
	if err := check(any, "", "unnamed", 7); err != nil {
		t.Fatal(err)
	}
	if err := check(replaced, "cluster-2", "unnamed", 8); !errors.Is(err, fencing.ErrSpace) {
		t.Errorf("a row without a space, and a guard with one: %v", err)
	}
	accept(replaced, "", "cluster-2")
	if err := check(replaced, "cluster-2", "unnamed", 6); !errors.Is(err, fencing.ErrStale) {
		t.Errorf("a row that got its first space forgot its token: %v", err)
	}
	if err := check(any, "", "unnamed", 9); !errors.Is(err, fencing.ErrSpace) {
		t.Errorf("a guard without a space, and a row with one: %v", err)
	}
	for _, to := range []string{"", "cluster-2", strings.Repeat("x", 256)} {
		err := in(t, db, func(tx *sql.Tx) error { _, err := old.AcceptSpace(t.Context(), tx, "cluster-2", to); return err })
		if !errors.Is(err, fencing.ErrInvalid) {
			t.Errorf("to accept the space %q: %v, want ErrInvalid", to, err)
		}
	}
}

// At every level of isolation, a transaction whose picture of the data is older than a rival's commit is not admitted.
func (d database) levels(t *testing.T, dsn string) {
	db, guard := d.connect(t, dsn), must(t, d.dialect, nil)
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(strings.ReplaceAll(level.String(), " ", "-"), func(t *testing.T) {
			resource := "levels/" + level.String()
			slow, err := db.BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
			if err != nil {
				t.Fatal(err)
			}
			defer slow.Rollback()
			var n int
			if err := slow.QueryRowContext(t.Context(), `SELECT count(*) FROM written`).Scan(&n); err != nil { // the picture
				t.Fatal(err)
			}
			if err := in(t, db, func(tx *sql.Tx) error { return guard.In(tx).Check(t.Context(), resource, 9) }); err != nil {
				t.Fatal(err)
			}
			if err := guard.In(slow).Check(t.Context(), resource, 8); !errors.Is(err, fencing.ErrStale) && !again(err) {
				t.Errorf("a stale token: %v, want ErrStale or that the database gave up", err)
			}
			if err := slow.Rollback(); err != nil {
				t.Fatal(err)
			}
			if err := in(t, db, func(tx *sql.Tx) error { return guard.In(tx).Check(t.Context(), resource, 9) }); err != nil {
				t.Errorf("the rival afterwards: %v", err)
			}
		})
	}
}

// What a transaction admitted counts only if it commits.
func (d database) rollback(t *testing.T, db *sql.DB) {
	guard := must(t, d.dialect, nil)
	undone := errors.New("undone")
	err := in(t, db, func(tx *sql.Tx) error {
		if err := guard.In(tx).Check(t.Context(), "rollback", 9); err != nil {
			return err
		}
		return undone
	})
	if !errors.Is(err, undone) {
		t.Fatal(err)
	}
	if err := in(t, db, func(tx *sql.Tx) error { return guard.In(tx).Check(t.Context(), "rollback", 5) }); err != nil {
		t.Errorf("a token that was never committed is remembered: %v", err)
	}
	for _, bad := range []string{"", "a\x00b", "a\xffb", strings.Repeat("x", 513)} {
		err := in(t, db, func(tx *sql.Tx) error { return guard.In(tx).Check(t.Context(), bad, 5) })
		if !errors.Is(err, fencing.ErrInvalid) {
			t.Errorf("check of the resource %.10q: %v, want ErrInvalid", bad, err)
		}
	}
	if err := in(t, db, func(tx *sql.Tx) error {
		return guard.In(tx).Check(t.Context(), strings.Repeat("x", 512), 1<<63-1)
	}); err != nil {
		t.Errorf("the longest name and the highest token: %v", err)
	}
}

func TestNewRefuses(t *testing.T) {
	for what, c := range map[string]struct {
		dialect sqlguard.Dialect
		options sqlguard.Options
	}{
		"dialect": {0, sqlguard.Options{}},
		"table":   {sqlguard.SQLite, sqlguard.Options{Table: "tokens; DROP TABLE accounts"}},
		"space":   {sqlguard.SQLite, sqlguard.Options{Space: "a\nb"}},
	} {
		_, err := sqlguard.New(c.dialect, &c.options)
		var invalid *fencing.InvalidError
		if !errors.As(err, &invalid) || invalid.What != what {
			t.Errorf("New(%v, %+v) = %v, want an error about the %s", c.dialect, c.options, err, what)
		}
	}
	if schema := must(t, sqlguard.PostgreSQL, &sqlguard.Options{Table: "locks.tokens"}).Schema(); !strings.Contains(schema, " locks.tokens ") {
		t.Errorf("the table's name is not in %q", schema)
	}
}
