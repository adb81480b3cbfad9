package sqlguard

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// Dialect is the database's.
type Dialect uint8

// The databases that have statements for the check.
const (
	PostgreSQL Dialect = iota + 1
	MySQL              // and MariaDB
	SQLite
)

// String returns the database's name.
func (d Dialect) String() string {
	switch d {
	case PostgreSQL:
		return "PostgreSQL"
	case MySQL:
		return "MySQL"
	case SQLite:
		return "SQLite"
	}
	return fmt.Sprintf("Dialect(%d)", uint8(d))
}

// Options of a guard. Nil is the same as the zero value.
type Options struct {
	// Table is where tokens are remembered, with or without a schema: letters, digits and _. Default fencing_tokens.
	Table string

	// Isolation is the level of the transactions that Tx begins. Default read committed, and in SQLite the only one
	// there is. Every level keeps the promise; at repeatable read and above the database gives up more often, and Tx
	// tries again.
	Isolation sql.IsolationLevel

	// Again reports whether the database gave up for reasons of its own, so that Tx tries again. Nil: what the errors
	// of pgx, lib/pq, go-sql-driver/mysql, modernc.org/sqlite and mattn/go-sqlite3 say.
	Again func(error) bool
}

// DB begins transactions: a *sql.DB, a *sql.Conn, or what wraps one.
type DB interface {
	BeginTx(ctx context.Context, o *sql.TxOptions) (*sql.Tx, error)
}

// Guard guards the resources of one database. It is safe for concurrent use if the DB is.
type Guard struct {
	db      DB
	dialect Dialect
	level   sql.IsolationLevel
	again   func(error) bool
	sql     statement.Set
}

var (
	_ fencing.Guard  = (*Guard)(nil)
	_ fencing.Keeper = (*Guard)(nil)
)

// New returns a guard. It does no I/O: the table must exist before the first check; see Schema and Create. The error is
// a *fencing.InvalidError that names what cannot be used.
func New(db DB, d Dialect, o *Options) (*Guard, error) {
	if o == nil {
		o = &Options{}
	}
	fail := func(what, value, why string) (*Guard, error) {
		return nil, fmt.Errorf("sqlguard: new: %w", &fencing.InvalidError{What: what, Value: value, Why: why})
	}
	if db == nil {
		return fail("database", "", "it is nil")
	}
	table, err := statement.Table(o.Table)
	if err != nil {
		return nil, fmt.Errorf("sqlguard: new: %w", err)
	}
	g := &Guard{db: db, dialect: d, level: o.Isolation, again: o.Again}
	switch d {
	case PostgreSQL:
		g.sql = statement.PostgreSQL(table)
	case MySQL:
		g.sql = statement.MySQL(table)
	case SQLite:
		g.sql = statement.SQLite(table)
	default:
		return fail("dialect", d.String(), "want PostgreSQL, MySQL or SQLite")
	}
	if g.level == sql.LevelDefault && d != SQLite {
		g.level = sql.LevelReadCommitted
	}
	if g.again == nil {
		g.again = statement.Again
	}
	return g, nil
}

// Schema returns the statement that creates the table unless it exists, for a migration.
func (g *Guard) Schema() string { return g.sql.Schema }

// Create executes Schema, for programs without migrations. In PostgreSQL it refuses to make a second table of that name
// in another schema, where search_path would decide which one remembers.
func (g *Guard) Create(ctx context.Context) error {
	err := g.tx(ctx, func(tx *sql.Tx) error {
		if g.dialect == PostgreSQL {
			if err := statement.Elsewhere(ctx, conn{tx}, g.sql.Table); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, g.sql.Schema)
		return err
	})
	if err != nil {
		return fmt.Errorf("sqlguard: create the table: %w", err)
	}
	return nil
}

// Check shows the claims in a transaction of its own: from then on lower tokens are refused. A write that follows is
// another step, which others may overtake; see Tx.
func (g *Guard) Check(ctx context.Context, claims fencing.Claims) error {
	return g.section(ctx, "check", claims, nil)
}

// Terms returns what the guard remembers as a whole; see fencing.Keeper.
func (g *Guard) Terms(ctx context.Context) (t fencing.Terms, err error) {
	err = g.keep(ctx, "terms",
		func(ctx context.Context, c conn) (err error) { t, err = g.sql.ReadTerms(ctx, c); return err })
	return t, err
}

// Seen returns what the guard remembers of a resource; see fencing.Keeper.
func (g *Guard) Seen(ctx context.Context, resource string) (s fencing.Seen, err error) {
	err = g.keep(ctx, "seen",
		func(ctx context.Context, c conn) (err error) { s, err = g.sql.ReadSeen(ctx, c, resource); return err })
	return s, err
}

// Accept makes the guard begin anew; see fencing.Keeper.
func (g *Guard) Accept(ctx context.Context, space string, floor fencing.Token) error {
	return g.keep(ctx, "accept", func(ctx context.Context, c conn) error {
		return g.sql.Change(ctx, c, func(t fencing.Terms) (fencing.Terms, error) { return t.Accept(space, floor) })
	})
}

// Raise raises the floor; see fencing.Keeper.
func (g *Guard) Raise(ctx context.Context, floor fencing.Token) error {
	return g.keep(ctx, "raise", func(ctx context.Context, c conn) error {
		return g.sql.Change(ctx, c, func(t fencing.Terms) (fencing.Terms, error) { return t.Raise(floor) })
	})
}

// Clean forgets what the floor and the epoch make needless; see fencing.Keeper.
func (g *Guard) Clean(ctx context.Context) (n int64, err error) {
	err = g.keep(ctx, "clean",
		func(ctx context.Context, c conn) (err error) { n, err = g.sql.Sweep(ctx, c); return err })
	return n, err
}

func (g *Guard) keep(ctx context.Context, call string, f func(context.Context, conn) error) error {
	if err := g.tx(ctx, func(tx *sql.Tx) error { return f(ctx, conn{tx}) }); err != nil {
		return fmt.Errorf("sqlguard: %s: %w", call, err)
	}
	return nil
}
