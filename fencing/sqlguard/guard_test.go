package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

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
	mariaDB = database{
		driver: "mysql", dialect: sqlguard.MySQL, value: `REPLACE INTO written (resource, value) VALUES (?, ?)`,
	}
	sqLite = database{
		driver: "sqlite", dialect: sqlguard.SQLite, value: `REPLACE INTO written (resource, value) VALUES (?, ?)`,
	}
)

func TestMain(m *testing.M) {
	guardtest.RunChild(map[string]guardtest.Open{
		"postgres": postgres.open, "mariadb": mariaDB.open, "sqlite": sqLite.open,
	})
	goleak.VerifyTestMain(m)
}

func TestPostgreSQL(t *testing.T) {
	t.Parallel()
	server := containers.Postgres(t, containers.Args("-c", "max_prepared_transactions=8")) // one is inside a section
	dsn := server.URL()
	postgres.run(t, "postgres", dsn, containers.Within(server.Server.Restart))
	atOnce(t, map[string]func(*testing.T){
		"levels":        func(t *testing.T) { postgres.levels(t, dsn) },
		"enforced":      func(t *testing.T) { postgres.enforced(t, dsn, "'enforced/' || row.id") },
		"covered":       func(t *testing.T) { postgres.coveredPostgreSQL(t, dsn) },
		"second-memory": func(t *testing.T) { secondMemory(t, dsn) },
		"races":         func(t *testing.T) { postgres.races(t, "postgres", dsn) },
	})
}

func TestMariaDB(t *testing.T) {
	t.Parallel()
	server := containers.MariaDB(t, containers.Args("--innodb-rollback-on-timeout")) // one more way to end a section
	dsn := server.DSN()
	mariaDB.run(t, "mariadb", dsn, containers.Within(server.Server.Restart))
	atOnce(t, map[string]func(*testing.T){
		"levels": func(t *testing.T) { mariaDB.levels(t, dsn) },
		"triggers": func(t *testing.T) { // installing them replaces a procedure that all of them call
			t.Run("enforced", func(t *testing.T) { mariaDB.enforced(t, dsn, "CONCAT('enforced/', row.id)") })
			t.Run("covered", func(t *testing.T) { mariaDB.coveredMySQL(t, dsn) })
		},
		"races":           func(t *testing.T) { mariaDB.races(t, "mariadb", dsn) },
		"pool":            func(t *testing.T) { poolIsLeftAsItWas(t, dsn) },
		"client-settings": func(t *testing.T) { clientSettings(t, dsn+"?interpolateParams=true&clientFoundRows=true") },
	})
}

// atOnce runs the tests side by side.
func atOnce(t *testing.T, tests map[string]func(*testing.T)) {
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
}

// Settings of the client that change how values travel, and what is answered to a statement.
func clientSettings(t *testing.T, dsn string) {
	db := mariaDB.connect(t, dsn)
	guard := must(t, db, sqlguard.MySQL, nil)
	for _, step := range []struct {
		token fencing.Token
		want  error
	}{
		{fencing.MaxToken - 1, nil}, {fencing.MaxToken - 1, nil}, {fencing.MaxToken, nil},
		{fencing.MaxToken - 1, fencing.ErrStale}, {fencing.MaxToken, nil},
	} {
		err := in(t, db, func(tx *sql.Tx) error {
			return guard.In(tx).
				Check(t.Context(), fencing.Claim{Resource: "client-settings", Token: step.token, Space: space})
		})
		if !errors.Is(err, step.want) {
			t.Errorf("check of %v: %v, want %v", step.token, err, step.want)
		}
	}
}

func TestSQLite(t *testing.T) {
	t.Parallel()
	for _, journal := range []string{"wal", "delete"} {
		t.Run(journal, func(t *testing.T) {
			t.Parallel()
			// It does not wait for the disk, which a kill of a process is no reason for.
			dsn := "file:" + filepath.Join(t.TempDir(), "guarded.db") +
				"?_txlock=immediate&_pragma=journal_mode(" + journal +
				")&_pragma=busy_timeout(30000)&_pragma=synchronous(off)"
			// The file lives in its clients' processes, and clauses close those.
			sqLite.run(t, "sqlite", dsn, func(testing.TB) {})
			t.Run("enforced", func(t *testing.T) { sqLite.enforced(t, dsn, "'enforced/' || row.id") })
			t.Run("covered", func(t *testing.T) { sqLite.coveredSQLite(t, dsn) })
			t.Run("implicit", func(t *testing.T) { sqLiteImplicit(t, dsn) })
		})
	}
}

// database is one dialect, and a table beside the guard's that is written to.
type database struct {
	driver      string
	dialect     sqlguard.Dialect
	value, read string
	options     *sqlguard.Options
}

func (d database) run(t *testing.T, name, dsn string, restart func(testing.TB)) {
	db := d.connect(t, dsn)
	if err := d.guard(t, db).Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.guard(t, db).Create(t.Context()); err != nil {
		t.Errorf("to create the table again: %v", err)
	}
	for _, query := range []string{
		`CREATE TABLE written (resource varchar(500) PRIMARY KEY, value varchar(100))`,
		`CREATE TABLE balances (id int PRIMARY KEY, value int)`,
		`CREATE TABLE scratch (id int PRIMARY KEY, value int)`, `CREATE TABLE scratch2 (id int)`,
		`CREATE TABLE busy (id int PRIMARY KEY)`, `INSERT INTO busy VALUES (1)`, `INSERT INTO scratch VALUES (1, 0)`,
		`INSERT INTO scratch SELECT id + 1, 0 FROM scratch`, `INSERT INTO scratch SELECT id + 2, 0 FROM scratch`,
		`INSERT INTO scratch SELECT id + 4, 0 FROM scratch`, `INSERT INTO scratch SELECT id + 8, 0 FROM scratch`,
		`INSERT INTO scratch SELECT id + 16, 0 FROM scratch`, `INSERT INTO scratch SELECT id + 32, 0 FROM scratch`,
	} {
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	guardtest.Run(t, guardtest.Harness{
		Name: name, Open: d.open, Address: dsn, Space: space, Restart: restart, Again: again, Ordered: true,
	})
	t.Run("rollback", func(t *testing.T) { d.rollback(t, d.connect(t, dsn)) })
	t.Run("balance", func(t *testing.T) { d.balance(t, dsn) })
	t.Run("sections", func(t *testing.T) { d.sections(t, dsn) })
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

func (d database) guard(t testing.TB, db *sql.DB) *sqlguard.Guard {
	t.Helper()
	return must(t, db, d.dialect, nil)
}

func must(t testing.TB, db sqlguard.DB, d sqlguard.Dialect, o *sqlguard.Options) *sqlguard.Guard {
	t.Helper()
	g, err := sqlguard.New(db, d, o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// races runs the clauses about racing writers at every level, and wants no deadlock: claims are shown in one order.
func (d database) races(t *testing.T, name, dsn string) {
	for _, level := range levels {
		t.Run(strings.ReplaceAll(level.String(), " ", "-"), func(t *testing.T) {
			var deadlocks atomic.Int64
			d := d
			d.options = &sqlguard.Options{Isolation: level, Again: func(err error) bool {
				var pg *pgconn.PgError
				if errors.As(err, &pg) && pg.Code == "40P01" {
					deadlocks.Add(1)
				}
				return again(err)
			}}
			h := guardtest.Harness{Name: name, Open: d.open, Address: dsn, Space: space, Again: again}
			for _, r := range guardtest.Check(t, h, "U1", "U2", "S1", "S2", "Q1") {
				t.Log(r.Clause, r.Notes)
				if r.Outcome != guardtest.Passed {
					t.Errorf("%v: %v %q", r.Clause, r.Outcome, r.Messages)
				}
			}
			if n := deadlocks.Load(); n > 0 {
				t.Errorf("%d deadlocks", n)
			}
		})
	}
}

// open returns a client with one connection.
func (d database) open(_ context.Context, dsn string) (*guardtest.Client, error) {
	db, err := sql.Open(d.driver, dsn)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	guard, err := sqlguard.New(db, d.dialect, d.options)
	if err != nil {
		return nil, err
	}
	read := d.reading()
	value := func(ctx context.Context, q interface {
		QueryRowContext(context.Context, string, ...any) *sql.Row
	}, resource string) (value string, err error) {
		err = q.QueryRowContext(ctx, read, resource).Scan(&value)
		if errors.Is(err, sql.ErrNoRows) {
			return "", nil
		}
		return value, err
	}
	param := map[bool]string{true: "$1", false: "?"}[d.dialect == sqlguard.PostgreSQL]
	return &guardtest.Client{
		Keeper: guard,
		SetTerms: func(ctx context.Context, text string) (err error) {
			if text == "" {
				_, err = db.ExecContext(ctx, `DELETE FROM fencing_tokens WHERE resource = ''`)
			} else {
				_, err = db.ExecContext(ctx, `UPDATE fencing_tokens SET state = `+param+` WHERE resource = ''`, text)
			}
			return err
		},
		Wipe: func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, `DROP TABLE fencing_tokens`)
			return err
		},
		Pinned: func(ctx context.Context, id fencing.Nonce, c fencing.Claim) error {
			pinned, err := sqlguard.New(db, d.dialect, &sqlguard.Options{ID: id})
			if err != nil {
				return err
			}
			return pinned.Check(ctx, c)
		},
		Ends: d.ends(dsn, guard, func(ctx context.Context, tx *sql.Tx, resource string) (string, error) {
			return value(ctx, tx, resource)
		}),
		Update: func(ctx context.Context, claims fencing.Claims, resource string, f guardtest.Change) error {
			return guard.Tx(ctx, claims, func(ctx context.Context, tx *sql.Tx) error {
				old, err := value(ctx, tx, resource)
				if err != nil {
					return err
				}
				text, err := f(ctx, old)
				if err != nil {
					return err
				}
				_, err = tx.ExecContext(ctx, d.value, resource, text)
				return err
			})
		},
		Hand: func(ctx context.Context, c fencing.Claim, h guardtest.Hand) error {
			// In SQLite a transaction that begins with the lock on writing, or reads where there is no write-ahead log,
			// keeps everybody else from writing, and its view is never old.
			hand, err := sql.Open(d.driver, strings.ReplaceAll(dsn, "_txlock=immediate&", ""))
			if err != nil {
				return err
			}
			defer hand.Close()
			tx, err := hand.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if !strings.Contains(dsn, "journal_mode(delete)") {
				if _, err := value(ctx, tx, "something else"); err != nil {
					return err
				}
			}
			h.Early()
			in := guard.In(tx)
			if err := in.Check(ctx, c); err != nil && !h.Careless {
				return err
			}
			old, err := value(ctx, tx, c.Resource)
			if err != nil && !h.Careless {
				return err
			}
			if _, err := tx.ExecContext(ctx, d.value, c.Resource, h.Change(old)); err != nil && !h.Careless {
				return err
			}
			if err := in.Verify(ctx); err != nil && !h.Careless {
				return err
			}
			return tx.Commit()
		},
		Check: func(ctx context.Context, c fencing.Claim) error { return guard.Check(ctx, c) },
		Write: func(ctx context.Context, c fencing.Claim, value string, between func()) error {
			return guard.Tx(ctx, c, func(ctx context.Context, tx *sql.Tx) error {
				between()
				_, err := tx.ExecContext(ctx, d.value, c.Resource, value)
				return err
			})
		},
		Read:  func(ctx context.Context, resource string) (string, error) { return value(ctx, db, resource) },
		Close: db.Close,
	}, nil
}

func (d database) reading() string {
	if d.read == "" {
		return `SELECT value FROM written WHERE resource = ?`
	}
	return d.read
}

// again reports whether the database aborted for its own reasons.
func again(err error) bool {
	var my *mysql.MySQLError
	if errors.As(err, &my) {
		// Deadlock, too long a wait for a lock, and a snapshot that is too old.
		return my.Number == 1213 || my.Number == 1205 || my.Number == 1020
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

// At every level of isolation, a transaction that has read something before it shows its claim, and whose view of the
// data is older than a rival's commit, is either not admitted or reads what the rival has written.
func (d database) levels(t *testing.T, dsn string) {
	db := d.connect(t, dsn)
	guard := must(t, db, d.dialect, nil)
	for _, level := range levels {
		for _, token := range []fencing.Token{8, 9, 10} { // lower than the rival's, the same, higher
			t.Run(fmt.Sprintf("%s/%v", strings.ReplaceAll(level.String(), " ", "-"), token), func(t *testing.T) {
				resource := fmt.Sprintf("levels/%v/%v", level, token)
				claim := func(token fencing.Token) fencing.Claim {
					return fencing.Claim{Resource: resource, Token: token, Space: space}
				}
				write := func(tx *sql.Tx, value string) error {
					_, err := tx.ExecContext(t.Context(), d.value, resource, value)
					return err
				}
				if err := guard.Tx(
					t.Context(), claim(7), func(_ context.Context, tx *sql.Tx) error { return write(tx, "old") },
				); err != nil {
					t.Fatal(err)
				}
				slow, err := db.BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
				if err != nil {
					t.Fatal(err)
				}
				defer slow.Rollback()
				var text string
				if err := slow.QueryRowContext(
					t.Context(), `SELECT max(value) FROM written WHERE resource = 'none'`,
				).Scan(new(any)); err != nil {
					t.Fatal(err) // the view
				}
				if err := guard.Tx(
					t.Context(), claim(9), func(_ context.Context, tx *sql.Tx) error { return write(tx, "new") },
				); err != nil {
					t.Fatal(err)
				}
				err = guard.In(slow).Check(t.Context(), claim(token))
				if err == nil {
					err = slow.QueryRowContext(t.Context(), d.reading(), resource).Scan(&text)
				}
				switch {
				case token < 9 && err == nil:
					t.Error("a stale token was admitted")
				case err == nil && text != "new":
					t.Errorf("it was admitted, and reads %q: its write would be lost, or the rival's", text)
				case err != nil && !errors.Is(err, fencing.ErrStale) && !errors.Is(err, sqlguard.ErrOldView) &&
					!again(err):
					t.Errorf("it was not admitted: %v", err)
				case err != nil && slow.Commit() == nil:
					t.Errorf("after %v it commits", err)
				}
			})
		}
	}
}

var levels = []sql.IsolationLevel{
	sql.LevelReadUncommitted, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable,
}

// What a transaction admitted counts only if it commits.
func (d database) rollback(t *testing.T, db *sql.DB) {
	guard := must(t, db, d.dialect, nil)
	undone := errors.New("undone")
	err := in(t, db, func(tx *sql.Tx) error {
		if err := guard.In(tx).Check(
			t.Context(), fencing.Claim{Resource: "rollback", Token: 9, Space: space},
		); err != nil {
			return err
		}
		return undone
	})
	if !errors.Is(err, undone) {
		t.Fatal(err)
	}
	if err := in(t, db, func(tx *sql.Tx) error {
		return guard.In(tx).Check(t.Context(), fencing.Claim{Resource: "rollback", Token: 5, Space: space})
	}); err != nil {
		t.Errorf("a token that was never committed is remembered: %v", err)
	}
	for _, bad := range []string{"", "a\x00b", "a\xffb", strings.Repeat("x", 513)} {
		err := in(t, db, func(tx *sql.Tx) error {
			return guard.In(tx).Check(t.Context(), fencing.Claim{Resource: bad, Token: 5, Space: space})
		})
		if !errors.Is(err, fencing.ErrInvalid) {
			t.Errorf("check of the resource %.10q: %v, want ErrInvalid", bad, err)
		}
	}
	if err := in(t, db, func(tx *sql.Tx) error {
		return guard.In(tx).
			Check(t.Context(), fencing.Claim{Resource: strings.Repeat("x", 512), Token: fencing.MaxToken, Space: space})
	}); err != nil {
		t.Errorf("the longest name and the highest token: %v", err)
	}
}

// Where search_path finds a table in another schema, a second one would be a second memory.
func secondMemory(t *testing.T, url string) {
	ctx, db := t.Context(), postgres.connect(t, url)
	if _, err := db.ExecContext(ctx, `CREATE SCHEMA tenant`); err != nil {
		t.Fatal(err)
	}
	tenant := postgres.connect(t, url+"&search_path=tenant")
	claim := fencing.Claim{Resource: "second-memory", Token: 34, Space: space}
	if err := must(t, db, sqlguard.PostgreSQL, nil).Check(ctx, claim); err != nil {
		t.Fatal(err)
	}
	one := must(t, tenant, sqlguard.PostgreSQL, nil)
	if err := one.Create(ctx); err != nil {
		t.Errorf("Create where search_path does not find the table: %v", err)
	}
	if claim.Token = 33; !errors.Is(one.Check(ctx, claim), fencing.ErrStale) {
		t.Error("where search_path does not find the table the guard has another one")
	}
	named := &sqlguard.Options{Table: "tenant.tokens"}
	if err := must(t, tenant, sqlguard.PostgreSQL, named).Create(ctx); err != nil {
		t.Errorf("Create of a table by its schema: %v", err)
	}
	other := must(t, db, sqlguard.PostgreSQL, &sqlguard.Options{Table: "public.tokens"})
	if err := other.Create(ctx); err != nil {
		t.Errorf("Create of a second table by its schema: %v", err)
	}
	for _, c := range []*sqlguard.Options{named, {Table: "public.tokens"}} {
		if err := must(t, db, sqlguard.PostgreSQL, c).Check(ctx, claim); err != nil {
			t.Errorf("with two tables, %s: %v", c.Table, err)
		}
	}
	unnamed := must(t, db, sqlguard.PostgreSQL, &sqlguard.Options{Table: "tokens"})
	if err := errors.Join(unnamed.Create(ctx), unnamed.Check(ctx, claim)); !errors.Is(err, fencing.ErrInvalid) {
		t.Errorf("with two tables, one without its schema: %v, want ErrInvalid", err)
	}
}

func TestNewRefuses(t *testing.T) {
	for what, c := range map[string]struct {
		dialect sqlguard.Dialect
		options sqlguard.Options
	}{
		"dialect": {0, sqlguard.Options{}},
		"table":   {sqlguard.SQLite, sqlguard.Options{Table: "tokens; DROP TABLE accounts"}},
	} {
		_, err := sqlguard.New(new(sql.DB), c.dialect, &c.options)
		var invalid *fencing.InvalidError
		if !errors.As(err, &invalid) || invalid.What != what {
			t.Errorf("New(%v, %+v) = %v, want an error about the %s", c.dialect, c.options, err, what)
		}
	}
	if schema := strings.Join(must(
		t, new(sql.DB), sqlguard.PostgreSQL, &sqlguard.Options{Table: "locks.tokens"},
	).Schema(), ""); strings.Count(schema, " locks.tokens") != 3 {
		t.Errorf("the table's name is not in %q", schema)
	}
}
