package pgxguard

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

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
func (g *Guard) Tx(ctx context.Context, claims fencing.Claims, f func(ctx context.Context, tx pgx.Tx) error) error {
	if f == nil {
		return fmt.Errorf("pgxguard: tx: %w", &fencing.InvalidError{What: "function", Why: "it is nil"})
	}
	err := g.section(ctx, "tx", claims, f)
	if errors.Is(err, fencing.ErrRepeated) {
		return nil
	}
	return err
}

func (g *Guard) section(ctx context.Context, call string, claims fencing.Claims,
	f func(ctx context.Context, tx pgx.Tx) error,
) error {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return fmt.Errorf("pgxguard: %s: %w", call, err)
	}
	if outer, _ := ctx.Value(sectionKey{}).(*Guard); outer == g {
		return fmt.Errorf("pgxguard: %s %q: %w", call, list[0].Resource, fencing.ErrNested)
	}
	return g.tx(ctx, func(tx pgx.Tx) error {
		if err := g.sql.Check(ctx, conn{tx}, list, true); err != nil {
			return named(err)
		}
		if f == nil {
			return nil
		}
		return f(context.WithValue(ctx, sectionKey{}, g), tx)
	})
}

// named puts the package's name in front of an error that is no refusal; those say enough.
func named(err error) error {
	if fencing.Refusal(err) {
		return err
	}
	return fmt.Errorf("pgxguard: %w", err)
}

// tx runs f in a transaction, and again where the database gave up.
func (g *Guard) tx(ctx context.Context, f func(pgx.Tx) error) error {
	for n := 0; ; n++ {
		err := g.once(ctx, f)
		if err == nil || fencing.Refusal(err) || !statement.Again(err) || n+1 >= statement.Attempts ||
			!statement.Pause(ctx, n) {
			return err
		}
	}
}

func (g *Guard) once(ctx context.Context, f func(pgx.Tx) error) error {
	tx, err := g.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: g.level})
	if err != nil {
		return err
	}
	defer rollback(ctx, tx)
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// rollback ends a transaction that was not committed. Where ctx has ended pgx closes the connection, which does the
// same.
func rollback(ctx context.Context, tx pgx.Tx) {
	tx.Rollback(ctx) //nolint:errcheck // after a commit it does nothing, and a connection that is gone has rolled back
}

// In returns the guard inside a transaction that the caller drives: for experts, and libraries that begin transactions
// of their own. Tx does what is said here by itself.
//
//   - Show the claims first, and read afterwards: what was read before may be old.
//   - A check that is not admitted rolls the transaction back, so that nothing can be committed in it.
//   - A savepoint (Begin of a pgx.Tx) is refused with fencing.ErrNested: rolling it back would take back the check, and
//     keep what the outer transaction writes. Of savepoints made by a statement the same is true, and nobody sees them.
//   - Where the database gives up, begin anew with the same claim.
//
// Like tx it is for one goroutine at a time.
func (g *Guard) In(tx pgx.Tx) fencing.Guard { return inside{g, tx} }

type inside struct {
	g  *Guard
	tx pgx.Tx
}

func (i inside) Check(ctx context.Context, claims fencing.Claims) error {
	list, err := fencing.Sorted(claims)
	switch {
	case err != nil:
		err = fmt.Errorf("pgxguard: check: %w", err)
	case savepoint(i.tx):
		err = fmt.Errorf("pgxguard: check %q: %w", list[0].Resource, fencing.ErrNested)
	default:
		if err = i.g.sql.Check(ctx, conn{i.tx}, list, false); err != nil {
			err = named(err)
		}
	}
	if err != nil {
		rollback(ctx, i.tx)
	}
	return err
}

// savepoint reports whether the transaction is one inside another. Pgx does not say so but by the type, which has no
// name outside of it.
func savepoint(tx pgx.Tx) bool { return fmt.Sprintf("%T", tx) == "*pgx.dbSimulatedNestedTx" }

// conn is a transaction as package statement wants it.
type conn struct{ tx pgx.Tx }

func (c conn) Exec(ctx context.Context, query string, args ...any) (int64, error) {
	tag, err := c.tx.Exec(ctx, query, args...)
	return tag.RowsAffected(), err
}

func (c conn) Row(ctx context.Context, query string, args []any, into ...any) (bool, error) {
	err := c.tx.QueryRow(ctx, query, args...).Scan(into...)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}
