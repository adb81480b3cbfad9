// Package pgxguard guards what is kept in PostgreSQL, reached through pgx. It is package sqlguard for a pgx.Tx: the
// same table and the same statements, so that services with different clients guard the same resources. What its
// comment says of transactions holds here as well.
//
//	guard, err := pgxguard.New(pool, nil) // its table: guard.Schema()
//
//	err = guard.Tx(ctx, lease.Claim("accounts/42"), func(ctx context.Context, tx pgx.Tx) error {
//		_, err := tx.Exec(ctx, `UPDATE accounts SET …`)
//		return err
//	}) // errors.Is(err, fencing.ErrStale): somebody else holds the lock by now, and nothing was written
package pgxguard

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// Options of a guard. Nil is the same as the zero value.
type Options struct {
	// Table is where tokens are remembered, with or without a schema: letters, digits and _. Default fencing_tokens.
	Table string

	// Isolation is the level of the transactions that Tx begins. Default read committed. Every level keeps the promise;
	// at repeatable read and above the database gives up more often, and Tx tries again.
	Isolation pgx.TxIsoLevel
}

// DB begins transactions: a *pgxpool.Pool, a *pgx.Conn, or what wraps one.
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
// a *fencing.InvalidError that names what cannot be used.
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
	if g.level == "" {
		g.level = pgx.ReadCommitted
	}
	return g, nil
}

// Schema returns the statement that creates the table unless it exists, for a migration.
func (g *Guard) Schema() string { return g.sql.Schema }

// Create executes Schema, for programs without migrations. It refuses to make a second table of that name in another
// schema, where search_path would decide which one remembers.
func (g *Guard) Create(ctx context.Context) error {
	return g.keep(ctx, "create the table", func(c conn) error {
		if err := statement.Elsewhere(ctx, c, g.sql.Table); err != nil {
			return err
		}
		_, err := c.Exec(ctx, g.sql.Schema)
		return err
	})
}

// Check shows the claims in a transaction of its own: from then on lower tokens are refused. A write that follows is
// another step, which others may overtake; see Tx.
func (g *Guard) Check(ctx context.Context, claims fencing.Claims) error {
	return g.section(ctx, "check", claims, nil)
}

// Terms returns what the guard remembers as a whole; see fencing.Keeper.
func (g *Guard) Terms(ctx context.Context) (t fencing.Terms, err error) {
	err = g.keep(ctx, "terms", func(c conn) (err error) { t, err = g.sql.ReadTerms(ctx, c); return err })
	return t, err
}

// Seen returns what the guard remembers of a resource; see fencing.Keeper.
func (g *Guard) Seen(ctx context.Context, resource string) (s fencing.Seen, err error) {
	err = g.keep(ctx, "seen", func(c conn) (err error) { s, err = g.sql.ReadSeen(ctx, c, resource); return err })
	return s, err
}

// Accept makes the guard begin anew; see fencing.Keeper.
func (g *Guard) Accept(ctx context.Context, space string, floor fencing.Token) error {
	return g.keep(ctx, "accept", func(c conn) error {
		return g.sql.Change(ctx, c, func(t fencing.Terms) (fencing.Terms, error) { return t.Accept(space, floor) })
	})
}

// Raise raises the floor; see fencing.Keeper.
func (g *Guard) Raise(ctx context.Context, floor fencing.Token) error {
	return g.keep(ctx, "raise", func(c conn) error {
		return g.sql.Change(ctx, c, func(t fencing.Terms) (fencing.Terms, error) { return t.Raise(floor) })
	})
}

// Clean forgets what the floor and the epoch make needless; see fencing.Keeper.
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
