// Package sqlguard guards what is kept in PostgreSQL, MySQL, MariaDB or SQLite, reached through database/sql. The check is
// one statement in the transaction that writes, so both happen or neither does, whatever crashes between the two.
//
//	guard, err := sqlguard.New(sqlguard.PostgreSQL, nil) // its table: guard.Schema()
//
//	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
//		tx, err := db.BeginTx(ctx, nil)
//		if err != nil {
//			return err
//		}
//		defer tx.Rollback()
//		if err := guard.In(tx).Check(ctx, "accounts/42", lease.Token()); err != nil {
//			return err // errors.Is(err, fencing.ErrStale): somebody else holds the lock by now
//		}
//		if _, err := tx.ExecContext(ctx, `UPDATE accounts SET …`); err != nil {
//			return err
//		}
//		return tx.Commit()
//	})
//
// Check first and read afterwards: from the check on no other holder's transaction commits on this resource, and what was
// read before it may be old. After an error roll back.
//
// # What it takes
//
// One small row for each resource, in a table of its own; it must never be deleted, since a guard that forgets admits a
// stale writer. Transactions on one resource wait for each other from the check to the commit, so keep them short. The
// database may refuse one of two for other reasons, a deadlock or, at the levels repeatable read and serializable,
// because another came first: then nothing was written, and the holder may try again with the same token.
//
// The statement for MySQL uses what MySQL 5.7 to 9 and MariaDB share, and is tested on MariaDB.
//
// In SQLite open the database with a busy timeout, and with transactions that begin with the lock on writing (_txlock=
// immediate in modernc.org/sqlite and github.com/mattn/go-sqlite3) if something is read before the check. It takes SQLite
// 3.35.
//
// What was committed is as durable as the database is set up to be: a failover to a replica that had not heard of a commit
// forgets the token, together with the write that it came with.
package sqlguard

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// Dialect is the database's.
type Dialect uint8

// The databases that have a statement for the check.
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
	// Space is the only one whose tokens are accepted (Lease.TokenSpace); it is remembered beside every token. Empty: any.
	Space string
}

// Guard guards the resources of one database. It holds no connection, and is safe for concurrent use.
type Guard struct {
	dialect Dialect
	space   string
	sql     statement.Set
}

// New returns a guard. It does no I/O: the table must exist before the first check; see Schema and Create. The error is a
// *fencing.InvalidError that names what cannot be used.
func New(d Dialect, o *Options) (*Guard, error) {
	if o == nil {
		o = &Options{}
	}
	table, err := statement.Table(o.Table)
	if err != nil {
		return nil, fmt.Errorf("sqlguard: new: %w", err)
	}
	if err := fencing.ValidateSpace(o.Space); err != nil {
		return nil, fmt.Errorf("sqlguard: new: %w", err)
	}
	set := map[Dialect]func(string) statement.Set{
		PostgreSQL: statement.PostgreSQL, MySQL: statement.MySQL, SQLite: statement.SQLite,
	}[d]
	if set == nil {
		return nil, fmt.Errorf("sqlguard: new: %w", &fencing.InvalidError{
			What: "dialect", Value: d.String(), Why: "want PostgreSQL, MySQL or SQLite",
		})
	}
	return &Guard{dialect: d, space: o.Space, sql: set(table)}, nil
}

// Schema returns the statement that creates the table unless it exists, for a migration.
func (g *Guard) Schema() string { return g.sql.Schema }

// Create executes Schema, for programs without migrations. A *sql.DB, *sql.Conn or *sql.Tx can be given.
func (g *Guard) Create(ctx context.Context, db interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}) error {
	if _, err := db.ExecContext(ctx, g.sql.Schema); err != nil {
		return fmt.Errorf("sqlguard: create the table: %w", err)
	}
	return nil
}

// Tx is the caller's transaction, a *sql.Tx or what wraps one. It has to be able to commit so that the compiler refuses a
// *sql.DB: on that, check and write would be two transactions.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	Commit() error
	Rollback() error
}

// In returns the guard inside tx. What it admits is remembered when tx commits. Like tx it is for one goroutine at a time.
func (g *Guard) In(tx Tx) fencing.SpaceGuard { return inside{g, tx} }

type inside struct {
	*Guard
	tx Tx
}

func (g inside) Check(ctx context.Context, resource string, token fencing.Token) error {
	return g.CheckFrom(ctx, "", resource, token)
}

func (g inside) CheckFrom(ctx context.Context, space, resource string, token fencing.Token) error {
	c := fencing.Claim{Resource: resource, Token: token, Space: space}
	if err := c.Validate(); err != nil {
		return fmt.Errorf("sqlguard: check: %w", err)
	}
	if fencing.Refused(c, g.space) != nil {
		// The row is read only to tell its token. Without it the claim is refused as well.
		seen, err := g.seen(ctx, c)
		if err != nil {
			seen = fencing.Seen{Space: g.space}
		}
		return fencing.Judge(c, g.space, seen)
	}
	admit := g.returning
	if g.dialect == MySQL {
		admit = g.insertID
	}
	seen, err := admit(ctx, c)
	if err != nil {
		return fmt.Errorf("sqlguard: check %q: %w", resource, err)
	}
	return fencing.Judge(c, g.space, seen)
}

// returning executes the statement where it answers with a row.
func (g inside) returning(ctx context.Context, c fencing.Claim) (fencing.Seen, error) {
	return scan(g.tx.QueryRowContext(ctx, g.sql.Check, c.Resource, g.space, int64(c.Token)))
}

// insertID executes the statement where it answers with a number.
func (g inside) insertID(ctx context.Context, c fencing.Claim) (fencing.Seen, error) {
	token := int64(c.Token)
	result, err := g.tx.ExecContext(ctx, g.sql.Check, c.Resource, g.space, token, g.space, token)
	if err != nil {
		return fencing.Seen{}, err
	}
	id, err := result.LastInsertId()
	if err != nil {
		return fencing.Seen{}, err
	}
	if uint64(id)&statement.Mark != 0 {
		return g.seen(ctx, c) // refused: the number had no room for the space
	}
	return fencing.Seen{Token: fencing.Token(id), Space: g.space}, nil
}

func (g inside) seen(ctx context.Context, c fencing.Claim) (fencing.Seen, error) {
	seen, err := scan(g.tx.QueryRowContext(ctx, g.sql.Seen, c.Resource))
	if errors.Is(err, sql.ErrNoRows) {
		return fencing.Seen{Space: g.space}, nil
	}
	return seen, err
}

func scan(row *sql.Row) (fencing.Seen, error) {
	var token int64
	var space string
	err := row.Scan(&token, &space)
	return fencing.Seen{Token: fencing.Token(token), Space: space}, err
}

// AcceptSpace makes rows of the space from rows of the space to, whose tokens begin anew, and returns how many. From then
// on guards with the space from are refused. It is an administrator's act: after the lock service was replaced or restored,
// and when no holder of the old one can write any more. An empty from names what guards without a space have written:
// those rows keep their tokens.
func (g *Guard) AcceptSpace(ctx context.Context, tx Tx, from, to string) (rows int64, _ error) {
	query, args, err := g.sql.Change(from, to)
	if err != nil {
		return 0, fmt.Errorf("sqlguard: accept space %q: %w", to, err)
	}
	result, err := tx.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, fmt.Errorf("sqlguard: accept space %q: %w", to, err)
	}
	return result.RowsAffected()
}
