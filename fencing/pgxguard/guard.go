// Package pgxguard guards what is kept in PostgreSQL, reached through pgx. It is package sqlguard for a pgx.Tx: the same
// table and the same statement, so that services with different clients guard the same resources. What its comment says
// of transactions holds here as well.
//
//	guard, err := pgxguard.New(nil) // its table: guard.Schema()
//
//	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
//		if err := guard.In(tx).Check(ctx, "accounts/42", lease.Token()); err != nil {
//			return err // rolls back
//		}
//		_, err := tx.Exec(ctx, `UPDATE accounts SET …`)
//		return err
//	})
package pgxguard

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// Options of a guard. Nil is the same as the zero value.
type Options struct {
	// Table is where tokens are remembered, with or without a schema: letters, digits and _. Default fencing_tokens.
	Table string
	// Space is the only one whose tokens are accepted (Lease.TokenSpace); it is remembered beside every token. Empty: any.
	Space string
}

// Guard guards the resources of one database. It holds no connection, and is safe for concurrent use.
type Guard struct {
	space string
	sql   statement.Set
}

// New returns a guard. It does no I/O: the table must exist before the first check; see Schema and Create. The error is a
// *fencing.InvalidError that names what cannot be used.
func New(o *Options) (*Guard, error) {
	if o == nil {
		o = &Options{}
	}
	table, err := statement.Table(o.Table)
	if err != nil {
		return nil, fmt.Errorf("pgxguard: new: %w", err)
	}
	if err := fencing.ValidateSpace(o.Space); err != nil {
		return nil, fmt.Errorf("pgxguard: new: %w", err)
	}
	return &Guard{space: o.Space, sql: statement.PostgreSQL(table)}, nil
}

// Schema returns the statement that creates the table unless it exists, for a migration.
func (g *Guard) Schema() string { return g.sql.Schema }

// Create executes Schema, for programs without migrations. A pool, a connection or a transaction can be given.
func (g *Guard) Create(ctx context.Context, db interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}) error {
	if _, err := db.Exec(ctx, g.sql.Schema); err != nil {
		return fmt.Errorf("pgxguard: create the table: %w", err)
	}
	return nil
}

// In returns the guard inside tx. What it admits is remembered when tx commits. Like tx it is for one goroutine at a time.
func (g *Guard) In(tx pgx.Tx) fencing.SpaceGuard { return inside{g, tx} }

type inside struct {
	*Guard
	tx pgx.Tx
}

func (g inside) Check(ctx context.Context, resource string, token fencing.Token) error {
	return g.CheckFrom(ctx, "", resource, token)
}

func (g inside) CheckFrom(ctx context.Context, space, resource string, token fencing.Token) error {
	c := fencing.Claim{Resource: resource, Token: token, Space: space}
	if err := c.Validate(); err != nil {
		return fmt.Errorf("pgxguard: check: %w", err)
	}
	if fencing.Refused(c, g.space) != nil {
		// The row is read only to tell its token. Without it the claim is refused as well.
		seen, err := scan(g.tx.QueryRow(ctx, g.sql.Seen, resource))
		if err != nil {
			seen = fencing.Seen{Space: g.space}
		}
		return fencing.Judge(c, g.space, seen)
	}
	seen, err := scan(g.tx.QueryRow(ctx, g.sql.Check, resource, g.space, int64(token)))
	if err != nil {
		return fmt.Errorf("pgxguard: check %q: %w", resource, err)
	}
	return fencing.Judge(c, g.space, seen)
}

func scan(row pgx.Row) (fencing.Seen, error) {
	var token int64
	var space string
	err := row.Scan(&token, &space)
	return fencing.Seen{Token: fencing.Token(token), Space: space}, err
}

// AcceptSpace makes rows of the space from rows of the space to, whose tokens begin anew, and returns how many. From then
// on guards with the space from are refused. It is an administrator's act: after the lock service was replaced or restored,
// and when no holder of the old one can write any more. An empty from names what guards without a space have written:
// those rows keep their tokens.
func (g *Guard) AcceptSpace(ctx context.Context, tx pgx.Tx, from, to string) (rows int64, _ error) {
	query, args, err := g.sql.Change(from, to)
	if err != nil {
		return 0, fmt.Errorf("pgxguard: accept space %q: %w", to, err)
	}
	tag, err := tx.Exec(ctx, query, args...)
	if err != nil {
		return 0, fmt.Errorf("pgxguard: accept space %q: %w", to, err)
	}
	return tag.RowsAffected(), nil
}
