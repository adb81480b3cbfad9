package sqlguard

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// Tx begins a transaction, shows the claims, calls f in it if they are admitted, verifies that the transaction is still
// the same one, and commits if f returns nil. f reads current data: until the commit no other holder's transaction
// commits on these resources.
//
// If the claims are refused, f is not called, and the error wraps fencing.ErrStale, for example. If f or another step
// fails, the transaction is rolled back. If the database aborted the transaction, Tx retries, up to 20 times, each
// after a pause that grows to a quarter of a second: f may be called more than once, so it must have no effects
// outside of tx.
//
// f must not end the transaction, and must return the errors of its statements. A statement that commits implicitly
// (DDL in MySQL), a deadlock with an error that f drops, or a COMMIT in a statement end the lock on the resources with
// the transaction. Tx detects that, returns fencing.ErrUnfenced without a commit, and does not retry. Changes that
// were committed inside f stay; in PostgreSQL and SQLite also the writes of f after the transaction had ended. In
// MySQL and MariaDB these are rolled back.
//
// fencing.ErrUnknown: the answer to the commit is missing. If the wait of a COMMIT for a synchronous standby is
// cancelled, PostgreSQL answers with a notice, which database/sql hides: Tx returns nil then. Package pgxguard
// detects it.
//
// If the hold has already made the write (Claim.Sequence), Tx returns nil without calling f.
//
// Within f use tx, and the context of f: a nested section over the same DB and table is fencing.ErrNested.
func (g *Guard) Tx(ctx context.Context, claims fencing.Claims, f func(ctx context.Context, tx *sql.Tx) error) error {
	if f == nil {
		return fmt.Errorf("sqlguard: tx: %w", &fencing.InvalidError{What: "function", Why: "it is nil"})
	}
	return g.section(ctx, "tx", claims, f)
}

func (g *Guard) section(ctx context.Context, call string, claims fencing.Claims,
	f func(ctx context.Context, tx *sql.Tx) error,
) error {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return fmt.Errorf("sqlguard: %s: %w", call, err)
	}
	ctx, nested := statement.Inside(ctx, g.db, g.sql.Table)
	if nested {
		return fmt.Errorf("sqlguard: %s %q: %w", call, list[0].Resource, fencing.ErrNested)
	}
	if f == nil {
		statement.WithoutSequence(list)
		return g.tx(ctx, func(tx *sql.Tx) error {
			_, err := g.sql.Check(ctx, conn{tx}, list, true)
			if err == nil && g.sql.End != "" {
				_, err = tx.ExecContext(ctx, g.sql.End)
			}
			return named(err)
		})
	}
	return g.tries(ctx, func() error { return g.try(ctx, list, f) })
}

// named prefixes an error with the package's name, except for refusals, which are clear without it.
func named(err error) error {
	if err == nil || fencing.Refusal(err) {
		return err
	}
	return fmt.Errorf("sqlguard: %w", err)
}

// tries calls once, with retries if the database rolled back.
func (g *Guard) tries(ctx context.Context, once func() error) error {
	for n := 0; ; n++ {
		err := once()
		if err == nil || fencing.Refusal(err) || errors.Is(err, fencing.ErrUnfenced) ||
			errors.Is(err, fencing.ErrUnknown) || !g.again(err) || n+1 >= statement.Attempts ||
			!statement.Pause(ctx, n) {
			return err
		}
	}
}

// try runs a section once.
func (g *Guard) try(ctx context.Context, list []fencing.Claim, f func(context.Context, *sql.Tx) error) error {
	s, err := g.begin(ctx)
	if err != nil {
		return err
	}
	defer s.end(ctx)
	section, err := g.sql.Check(ctx, conn{s.tx}, list, true)
	if errors.Is(err, fencing.ErrRepeated) {
		return nil // the write is there
	}
	if err == nil {
		err = section.Begin(ctx, conn{s.tx})
	}
	if err != nil {
		return named(err)
	}
	if err := f(ctx, s.tx); err != nil {
		return s.failed(ctx, section, err)
	}
	err = section.Verify(ctx, conn{s.tx})
	if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil {
		err = fmt.Errorf("%w: %w", fencing.ErrUnfenced, err) // f has ended it
	}
	if err != nil {
		s.unfenced = errors.Is(err, fencing.ErrUnfenced)
		return named(err)
	}
	return s.commit(ctx)
}

// tx runs f in a transaction, with retries if the database rolled back.
func (g *Guard) tx(ctx context.Context, f func(*sql.Tx) error) error {
	return g.tries(ctx, func() error {
		tx, err := g.db.BeginTx(ctx, &sql.TxOptions{Isolation: g.level})
		if err != nil {
			return err
		}
		defer tx.Rollback() //nolint:errcheck // after a commit it does nothing, and a lost connection has rolled back
		if err := f(tx); err != nil {
			return err
		}
		return tx.Commit()
	})
}

// Tx is the caller's transaction, a *sql.Tx or a wrapper of one. It has to be able to commit so that the compiler
// refuses a *sql.DB: on that, check and write would be two transactions.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	Commit() error
	Rollback() error
}

// ErrOldView: the caller's transaction has read before it showed its claim, and would keep reading that old snapshot.
// MySQL and MariaDB do so at repeatable read, their default.
var ErrOldView = statement.ErrOldView

// In returns the guard inside a transaction that the caller drives: for experts, and libraries that begin their own
// transactions. Tx follows these rules automatically.
//
//   - Show the claims first, and read afterwards: earlier reads may be old. On MySQL and MariaDB at repeatable read,
//     their default, later reads are then old as well; the check detects that and returns ErrOldView.
//   - A refused check rolls the transaction back, so that it cannot be committed.
//   - Check outside of savepoints: rolling one back undoes the check, and keeps earlier writes.
//   - Call Verify last, right before the commit, and commit only if it returns nil. Without it there is no guarantee.
//   - If the database aborts the transaction, retry with the same claim.
//
// Like tx it is for one goroutine at a time.
func (g *Guard) In(tx Tx) *InTx { return &InTx{g: g, tx: tx} }

// InTx is a guard inside a transaction that the caller drives; see Guard.In.
type InTx struct {
	g       *Guard
	tx      Tx
	section *statement.Section
}

var _ fencing.Guard = (*InTx)(nil)

// Check shows the claims in the transaction, once. It rolls the transaction back unless they are admitted.
func (i *InTx) Check(ctx context.Context, claims fencing.Claims) error {
	list, err := fencing.Sorted(claims)
	switch {
	case err != nil:
		err = fmt.Errorf("check: %w", err)
	case i.section != nil:
		err = &fencing.InvalidError{
			What: "claims", Value: list[0].Resource, Why: "the transaction has shown its claims: show all of them as one Set",
		}
	default:
		section, failed := i.g.sql.Check(ctx, conn{i.tx}, list, false)
		if err = failed; err == nil {
			err = section.Begin(ctx, conn{i.tx})
		}
		i.section = section
	}
	if err != nil {
		i.tx.Rollback() //nolint:errcheck // what matters is that nothing is committed
		i.section = nil
	}
	return named(err)
}

// Verify is the last step before the commit: it returns an error that wraps fencing.ErrUnfenced, and rolls back, if the
// transaction is not the one in which Check was called. In MySQL and MariaDB writes after the transaction had ended
// may be committed by then, unless the session runs with autocommit = 0.
func (i *InTx) Verify(ctx context.Context) error {
	if i.section == nil {
		return fmt.Errorf("sqlguard: verify: %w", &fencing.InvalidError{What: "transaction", Why: "Check admitted nothing in it"})
	}
	err := i.section.Verify(ctx, conn{i.tx})
	if errors.Is(err, sql.ErrTxDone) {
		err = fmt.Errorf("%w: %w", fencing.ErrUnfenced, err)
	}
	if err == nil && i.g.sql.End != "" {
		_, err = i.tx.ExecContext(ctx, i.g.sql.End)
	}
	if err != nil {
		i.tx.Rollback() //nolint:errcheck // what matters is that nothing is committed
	}
	i.section = nil
	return named(err)
}

// conn is a transaction as package statement wants it.
type conn struct {
	tx interface {
		ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
		QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	}
}

func (c conn) Exec(ctx context.Context, query string, args ...any) (int64, error) {
	result, err := c.tx.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (c conn) Row(ctx context.Context, query string, args []any, into ...any) (bool, error) {
	err := c.tx.QueryRowContext(ctx, query, args...).Scan(into...)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}
