// Package pgxguard guards data in PostgreSQL, reached through pgx. It is package sqlguard for a pgx.Tx: the same table
// and the same statements, so that services with different clients guard the same resources. The rules for transactions
// in that package's comment apply here, too.
//
//	guard, err := pgxguard.New(pool, nil) // its table: guard.Create
//
//	err = guard.Tx(ctx, lease.Claim("accounts/42"), func(ctx context.Context, tx pgx.Tx) error {
//		_, err := tx.Exec(ctx, `UPDATE accounts SET …`)
//		return err
//	}) // errors.Is(err, fencing.ErrStale): another client holds the lock, and the write did not happen
package pgxguard

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/memory"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

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

	// Isolation is the level of the transactions that Tx begins. Default read committed. Every level keeps the promise;
	// at repeatable read and above the database aborts more often, and Tx retries.
	Isolation pgx.TxIsoLevel
}

// DB begins transactions: a *pgxpool.Pool, a *pgx.Conn, or a wrapper of one.
type DB interface {
	BeginTx(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error)
}

// Guard guards the resources of one database. It is safe for concurrent use if the DB is: a pool is, a connection is
// not.
type Guard struct {
	db    DB
	level pgx.TxIsoLevel
	sql   statement.Set
}

var (
	_ fencing.Guard  = (*Guard)(nil)
	_ fencing.Keeper = (*Guard)(nil)
)

// New returns a guard. It does no I/O: the table must exist before the first check; see Schema and Create. The error is
// a *fencing.InvalidError that names the invalid argument.
func New(db DB, o *Options) (*Guard, error) {
	if o == nil {
		o = &Options{}
	}
	if db == nil {
		return nil, fmt.Errorf("pgxguard: new: %w", &fencing.InvalidError{What: "database", Why: "it is nil"})
	}
	table, err := statement.Table(o.Table)
	if err != nil {
		return nil, fmt.Errorf("pgxguard: new: %w", err)
	}
	g := &Guard{db: db, level: o.Isolation, sql: statement.PostgreSQL(table)}
	g.sql.Memory = memory.NewPin(o.ID)
	if g.level == "" {
		g.level = pgx.ReadCommitted
	}
	return g, nil
}

// Schema returns the statements that create the table unless it exists, and the guard's terms, with a random ID, if it
// has no row: for a migration that runs once. They have no effect on a table that has lost its terms.
func (g *Guard) Schema() []string { return g.sql.Schema }

// Create executes Schema, before the first check, for programs without migrations. An existing table stays as it is:
// without its terms it is fencing.ErrTermsLost, and in another format fencing.ErrGuardVersion; see Migrate.
func (g *Guard) Create(ctx context.Context) error {
	return g.keep(ctx, "create the table", func(c conn) error { return g.sql.Create(ctx, c) })
}

// Migrate converts a table from format 1 to the current format, with a new ID; earlier versions of this package fail
// on it from then on. It has no effect on a table of the current format. Afterwards execute the statements of
// sqlguard.Enforce once more.
func (g *Guard) Migrate(ctx context.Context) error {
	err := g.sql.Migrate(ctx, func(f func(statement.Conn) error) error {
		return g.tx(ctx, func(tx pgx.Tx) error { return f(conn{tx}) })
	})
	if err != nil {
		return fmt.Errorf("pgxguard: migrate: %w", err)
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
	err = g.keep(ctx, "terms", func(c conn) (err error) { t, err = g.sql.ReadTerms(ctx, c); return err })
	return t, err
}

// Seen returns the guard's memory of a resource; see fencing.Keeper.
func (g *Guard) Seen(ctx context.Context, resource string) (s fencing.Seen, err error) {
	err = g.keep(ctx, "seen", func(c conn) (err error) { s, err = g.sql.ReadSeen(ctx, c, resource); return err })
	return s, err
}

// Accept restarts the guard; see fencing.Keeper.
func (g *Guard) Accept(ctx context.Context, space string, floor fencing.Token) error {
	return g.keep(ctx, "accept", func(c conn) error { return g.sql.Accept(ctx, c, space, floor) })
}

// Raise raises the floor; see fencing.Keeper.
func (g *Guard) Raise(ctx context.Context, floor fencing.Token) error {
	return g.keep(ctx, "raise", func(c conn) error { return g.sql.Raise(ctx, c, floor) })
}

// Clean removes entries that the floor and the epoch make needless; see fencing.Keeper.
func (g *Guard) Clean(ctx context.Context) (n int64, err error) {
	err = g.keep(ctx, "clean", func(c conn) (err error) { n, err = g.sql.Sweep(ctx, c); return err })
	return n, err
}

func (g *Guard) keep(ctx context.Context, call string, f func(conn) error) error {
	if err := g.tx(ctx, func(tx pgx.Tx) error { return f(conn{tx}) }); err != nil {
		return fmt.Errorf("pgxguard: %s: %w", call, err)
	}
	return nil
}
