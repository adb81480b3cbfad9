package sqlguard

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/internal/statement"
)

// sectionKey marks the context of a section; the value is its Guard.
type sectionKey struct{}

// Tx begins a transaction, shows the claims, calls f in it if they are admitted, and commits if f returns nil. What f
// reads is the present: until the commit no other holder's transaction commits on these resources.
//
// If the claims are refused, f is not called, and the error wraps fencing.ErrStale, for example. If f fails, or
// anything else does, the transaction is rolled back. Where the database gave up for reasons of its own Tx begins anew,
// up to 20 times, each after a pause that grows to a quarter of a second: f may be called more than once, so its only
// effects are those in tx. The error of a commit may leave it open whether the transaction was committed.
//
// Where the hold has made the write before (Claim.Sequence) it is there: f is not called, and Tx returns nil.
//
// Within f use tx, and the context that f is given: another section of this guard below it is fencing.ErrNested.
func (g *Guard) Tx(ctx context.Context, claims fencing.Claims, f func(ctx context.Context, tx *sql.Tx) error) error {
	if f == nil {
		return fmt.Errorf("sqlguard: tx: %w", &fencing.InvalidError{What: "function", Why: "it is nil"})
	}
	err := g.section(ctx, "tx", claims, f)
	if errors.Is(err, fencing.ErrRepeated) {
		return nil
	}
	return err
}

func (g *Guard) section(ctx context.Context, call string, claims fencing.Claims,
	f func(ctx context.Context, tx *sql.Tx) error,
) error {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return fmt.Errorf("sqlguard: %s: %w", call, err)
	}
	if outer, _ := ctx.Value(sectionKey{}).(*Guard); outer == g {
		return fmt.Errorf("sqlguard: %s %q: %w", call, list[0].Resource, fencing.ErrNested)
	}
	return g.tx(ctx, func(tx *sql.Tx) error {
		if err := g.sql.Check(ctx, conn{tx}, list, true); err != nil {
			return named(err)
		}
		if f != nil {
			if err := f(context.WithValue(ctx, sectionKey{}, g), tx); err != nil {
				return err
			}
		}
		if g.sql.End == "" {
			return nil
		}
		_, err := tx.ExecContext(ctx, g.sql.End)
		return err
	})
}

// named puts the package's name in front of an error that is no refusal; those say enough.
func named(err error) error {
	if fencing.Refusal(err) {
		return err
	}
	return fmt.Errorf("sqlguard: %w", err)
}

// tx runs f in a transaction, and again where the database gave up.
func (g *Guard) tx(ctx context.Context, f func(*sql.Tx) error) error {
	for n := 0; ; n++ {
		err := g.once(ctx, f)
		if err == nil || fencing.Refusal(err) || !g.again(err) || n+1 >= statement.Attempts ||
			!statement.Pause(ctx, n) {
			return err
		}
	}
}

func (g *Guard) once(ctx context.Context, f func(*sql.Tx) error) error {
	tx, err := g.db.BeginTx(ctx, &sql.TxOptions{Isolation: g.level})
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // after a commit it does nothing, and a lost connection has rolled back
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// Tx is the caller's transaction, a *sql.Tx or what wraps one. It has to be able to commit so that the compiler refuses
// a *sql.DB: on that, check and write would be two transactions.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	Commit() error
	Rollback() error
}

// ErrOldView: the caller's transaction has read something before it showed its claim, and would go on reading what was
// true then. MySQL and MariaDB do so at repeatable read, their default.
var ErrOldView = statement.ErrOldView

// In returns the guard inside a transaction that the caller drives: for experts, and libraries that begin transactions
// of their own. Tx does what is said here by itself.
//
//   - Show the claims first, and read afterwards: what was read before may be old. On MySQL and MariaDB at repeatable
//     read, their default, what is read afterwards is then old as well; the check sees that and answers ErrOldView.
//   - A check that is not admitted rolls the transaction back, so that nothing can be committed in it.
//   - Check outside of savepoints: rolling one back takes back the check, and keeps what was written before.
//   - Where the database gives up, begin anew with the same claim.
//
// Like tx it is for one goroutine at a time.
func (g *Guard) In(tx Tx) fencing.Guard { return inside{g, tx} }

type inside struct {
	g  *Guard
	tx Tx
}

func (i inside) Check(ctx context.Context, claims fencing.Claims) error {
	list, err := fencing.Sorted(claims)
	if err != nil {
		err = fmt.Errorf("sqlguard: check: %w", err)
	} else if err = i.g.sql.Check(ctx, conn{i.tx}, list, false); err != nil {
		err = named(err)
	}
	if err != nil {
		i.tx.Rollback() //nolint:errcheck // what matters is that nothing is committed
	}
	return err
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
