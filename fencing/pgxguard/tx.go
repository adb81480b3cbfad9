package pgxguard

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

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
// f must not end the transaction. If one of its statements is COMMIT, ROLLBACK or PREPARE TRANSACTION, Tx returns
// fencing.ErrUnfenced without a commit, and does not retry; later writes of f are durable, as are committed ones.
//
// fencing.ErrUnknown: the answer to the commit is missing, or has a notice. The server sends a notice if the wait for
// a synchronous standby was cancelled; the commit may not survive a failover then. Any other notice during the
// commit, by a deferred trigger for example, has the same result.
//
// If the hold has already made the write (Claim.Sequence), Tx returns nil without calling f.
//
// Within f use tx, and the context of f: a nested section over the same DB and table is fencing.ErrNested.
func (g *Guard) Tx(ctx context.Context, claims fencing.Claims, f func(ctx context.Context, tx pgx.Tx) error) error {
	if f == nil {
		return fmt.Errorf("pgxguard: tx: %w", &fencing.InvalidError{What: "function", Why: "it is nil"})
	}
	return g.section(ctx, "tx", claims, f)
}

func (g *Guard) section(ctx context.Context, call string, claims fencing.Claims,
	f func(ctx context.Context, tx pgx.Tx) error,
) error {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return fmt.Errorf("pgxguard: %s: %w", call, err)
	}
	ctx, nested := statement.Inside(ctx, g.db, g.sql.Table)
	if nested {
		return fmt.Errorf("pgxguard: %s %q: %w", call, list[0].Resource, fencing.ErrNested)
	}
	if f == nil {
		statement.WithoutSequence(list)
	}
	return g.tx(ctx, func(tx pgx.Tx) error {
		section, err := g.sql.Check(ctx, conn{tx}, list, true)
		if errors.Is(err, fencing.ErrRepeated) && f != nil {
			return errRepeated // the write is there
		}
		if err != nil || f == nil {
			return named(err)
		}
		if err := f(ctx, tx); err != nil {
			return failed(ctx, tx, section, err)
		}
		err = section.Verify(ctx, conn{tx})
		if errors.Is(err, pgx.ErrTxClosed) {
			err = fmt.Errorf("%w: %w", fencing.ErrUnfenced, err) // f has ended it
		}
		return named(err)
	})
}

// errRepeated ends a section with a write that was made before.
var errRepeated = errors.New("the write was made before")

// failed returns the error of a section with a function that failed with err.
func failed(ctx context.Context, tx pgx.Tx, section *statement.Section, err error) error {
	switch tx.Conn().PgConn().TxStatus() {
	case 'I':
		return named(statement.Unfenced(err))
	case 'T':
		if errors.Is(section.Verify(ctx, conn{tx}), fencing.ErrUnfenced) {
			return named(statement.Unfenced(err))
		}
	}
	return err
}

// named prefixes an error with the package's name, except for refusals, which are clear without it.
func named(err error) error {
	if err == nil || fencing.Refusal(err) {
		return err
	}
	return fmt.Errorf("pgxguard: %w", err)
}

// tx runs f in a transaction, with retries if the database rolled back.
func (g *Guard) tx(ctx context.Context, f func(pgx.Tx) error) error {
	for n := 0; ; n++ {
		err := g.once(ctx, f)
		if errors.Is(err, errRepeated) {
			return nil
		}
		if err == nil || fencing.Refusal(err) || errors.Is(err, fencing.ErrUnfenced) ||
			errors.Is(err, fencing.ErrUnknown) || !statement.Again(err) || n+1 >= statement.Attempts ||
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
	return commit(ctx, tx)
}

// rollback ends a transaction that was not committed. Where ctx has ended pgx closes the connection, which does the
// same.
func rollback(ctx context.Context, tx pgx.Tx) {
	tx.Rollback(ctx) //nolint:errcheck // after a commit it does nothing, and a connection that is gone has rolled back
}

// In returns the guard inside a transaction that the caller drives: for experts, and libraries that begin their own
// transactions. Tx follows these rules automatically.
//
//   - Show the claims first, and read afterwards: earlier reads may be old.
//   - A refused check rolls the transaction back, so that it cannot be committed.
//   - A savepoint (Begin of a pgx.Tx) is refused with fencing.ErrNested: rolling it back would undo the check, and
//     keep the writes of the outer transaction. The same is true for savepoints made by a statement, which the guard
//     cannot detect.
//   - Call Verify last, right before the commit, and commit only if it returns nil. Without it there is no guarantee.
//   - If the database aborts the transaction, retry with the same claim.
//
// Like tx it is for one goroutine at a time.
func (g *Guard) In(tx pgx.Tx) *InTx { return &InTx{g: g, tx: tx} }

// InTx is a guard inside a transaction that the caller drives; see Guard.In.
type InTx struct {
	g       *Guard
	tx      pgx.Tx
	section *statement.Section
}

var _ fencing.Guard = (*InTx)(nil)

// Check shows the claims in the transaction, once. It rolls the transaction back unless they are admitted.
func (i *InTx) Check(ctx context.Context, claims fencing.Claims) error {
	list, err := fencing.Sorted(claims)
	switch {
	case err != nil:
		err = fmt.Errorf("check: %w", err)
	case savepoint(i.tx):
		err = fmt.Errorf("check %q: %w", list[0].Resource, fencing.ErrNested)
	case i.section != nil:
		err = &fencing.InvalidError{
			What: "claims", Value: list[0].Resource,
			Why: "the transaction has shown its claims: show all of them as one Set",
		}
	default:
		i.section, err = i.g.sql.Check(ctx, conn{i.tx}, list, false)
	}
	if err != nil {
		rollback(ctx, i.tx)
		i.section = nil
	}
	return named(err)
}

// Verify is the last step before the commit: it returns an error that wraps fencing.ErrUnfenced, and rolls back, if the
// transaction is not the one in which Check was called.
func (i *InTx) Verify(ctx context.Context) error {
	if i.section == nil {
		return fmt.Errorf("pgxguard: verify: %w",
			&fencing.InvalidError{What: "transaction", Why: "Check admitted nothing in it"})
	}
	err := i.section.Verify(ctx, conn{i.tx})
	if errors.Is(err, pgx.ErrTxClosed) {
		err = fmt.Errorf("%w: %w", fencing.ErrUnfenced, err)
	}
	if err != nil {
		rollback(ctx, i.tx)
	}
	i.section = nil
	return named(err)
}

// savepoint reports whether the transaction is one inside another. Pgx shows that only by the type, which is
// unexported.
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
