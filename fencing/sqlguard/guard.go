package sqlguard

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
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
	// Without a schema in PostgreSQL it is the only table of that name in the database, for any search_path, such
	// as that of postgres.Migrate. Where there are two, or one with a schema beside that of postgres.Migrate, each call
	// is an error that wraps fencing.ErrInvalid.
	Table string

	// ID is the expected ID of the guard's memory (fencing.Terms.ID): another ID is fencing.ErrGuardID. Zero: the ID
	// that this Guard sees first, so that an earlier re-creation of the table is not detected.
	ID fencing.Nonce

	// Isolation is the level of the transactions that Tx begins. Default read committed, and in SQLite the only one
	// there is. Every level keeps the promise; at repeatable read and above the database aborts more often, and Tx
	// retries.
	Isolation sql.IsolationLevel

	// Again reports whether the database aborted the transaction, such as by a deadlock, so that Tx retries. Nil: by
	// the errors of pgx, lib/pq, go-sql-driver/mysql, modernc.org/sqlite and mattn/go-sqlite3.
	Again func(error) bool
}

// DB begins transactions: a *sql.DB, a *sql.Conn, or a wrapper of one. For MySQL and MariaDB it has to be a *sql.Conn,
// or to have the method Conn of a *sql.DB: sections change a setting of their connection, and close the connection
// where they cannot change it back.
type DB interface {
	BeginTx(ctx context.Context, o *sql.TxOptions) (*sql.Tx, error)
}

type pool interface {
	Conn(ctx context.Context) (*sql.Conn, error)
}

// Guard guards the resources of one database. It is safe for concurrent use if the DB is.
type Guard struct {
	db      DB
	pool    pool // db, for MySQL and unless it is a *sql.Conn
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
// a *fencing.InvalidError that names the invalid argument.
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
		if _, ok := db.(*sql.Conn); !ok {
			if g.pool, ok = db.(pool); !ok {
				return fail("database", fmt.Sprintf("%T", db), "want a *sql.DB or a *sql.Conn: it has no method Conn")
			}
		}
	case SQLite:
		g.sql = statement.SQLite(table)
	default:
		return fail("dialect", d.String(), "want PostgreSQL, MySQL or SQLite")
	}
	g.sql.Memory = memory.NewPin(o.ID)
	if g.level == sql.LevelDefault && d != SQLite {
		g.level = sql.LevelReadCommitted
	}
	if g.again == nil {
		g.again = statement.Again
	}
	return g, nil
}

// Schema returns the statements that create the table unless it exists, and the guard's terms, with a random ID, if it
// has no row: for a migration that runs once. They have no effect on a table that has lost its terms.
func (g *Guard) Schema() []string { return g.sql.Schema }

// Create executes Schema, before the first check, for programs without migrations. An existing table stays as it is:
// without its terms it is fencing.ErrTermsLost, and in another format fencing.ErrGuardVersion; see Migrate.
func (g *Guard) Create(ctx context.Context) error {
	return g.keep(ctx, "create the table", func(ctx context.Context, c conn) error { return g.sql.Create(ctx, c) })
}

// Migrate converts a table from format 1 to the current format, with a new ID; earlier versions of this package fail
// on it from then on. It has no effect on a table of the current format. Afterwards execute the statements of Enforce
// once more. It takes SQLite 3.35.
func (g *Guard) Migrate(ctx context.Context) error {
	err := g.sql.Migrate(ctx, func(f func(statement.Conn) error) error {
		return g.tx(ctx, func(tx *sql.Tx) error { return f(conn{tx}) })
	})
	if err != nil {
		return fmt.Errorf("sqlguard: migrate: %w", err)
	}
	return nil
}

// Check shows the claims in a separate transaction: from then on lower tokens are refused. A later write is another
// step, which other writers may overtake; see Tx.
func (g *Guard) Check(ctx context.Context, claims fencing.Claims) error {
	return g.section(ctx, "check", claims, nil)
}

// Terms returns the guard's terms; see fencing.Keeper.
func (g *Guard) Terms(ctx context.Context) (t fencing.Terms, err error) {
	err = g.keep(ctx, "terms",
		func(ctx context.Context, c conn) (err error) { t, err = g.sql.ReadTerms(ctx, c); return err })
	return t, err
}

// Seen returns the guard's memory of a resource; see fencing.Keeper.
func (g *Guard) Seen(ctx context.Context, resource string) (s fencing.Seen, err error) {
	err = g.keep(ctx, "seen",
		func(ctx context.Context, c conn) (err error) { s, err = g.sql.ReadSeen(ctx, c, resource); return err })
	return s, err
}

// Accept restarts the guard; see fencing.Keeper.
func (g *Guard) Accept(ctx context.Context, space string, floor fencing.Token) error {
	return g.keep(ctx, "accept",
		func(ctx context.Context, c conn) error { return g.sql.Accept(ctx, c, space, floor) })
}

// Raise raises the floor; see fencing.Keeper.
func (g *Guard) Raise(ctx context.Context, floor fencing.Token) error {
	return g.keep(ctx, "raise", func(ctx context.Context, c conn) error { return g.sql.Raise(ctx, c, floor) })
}

// Clean removes entries that the floor and the epoch make needless; see fencing.Keeper.
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
