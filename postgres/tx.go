// This file joins the lock and the data: a transaction that checks the fencing token and then writes. It is the check
// of package pgxguard, with the table that the migrations make beside the locks, and a remedy for a missing table.

package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/pgxguard"
)

// guardTable has the tokens that Tx has seen. It is in the default schema, since Tx has no options.
const guardTable = defaultSchema + ".fencing_tokens"

// Tx runs f in a transaction that shows the claims first, and commits if f returns nil. If a claim is refused, for
// example because a holder with a greater token has written before, Tx returns the refusal (such as fencing.ErrStale)
// without calling f. Until the transaction ends, no other check for these resources completes.
//
//	err := postgres.Tx(ctx, pool, lease.Claim("accounts/42"), func(ctx context.Context, tx pgx.Tx) error {
//		_, err := tx.Exec(ctx, `update accounts set balance = balance - 10 where id = 42`)
//		return err
//	})
//
// Tx is pgxguard.Guard.Tx, read committed, with the table that Migrate has made in the schema "fencelock": the
// documentation of repetitions and of Claim.Sequence there applies here. SQL, and other clients, call fencelock.guard
// for the same check. Guards of pgxguard and sqlguard find that table automatically.
//
// ctx bounds all of it, f included. The error is backend.ErrMisconfigured, with a remedy, if the table is missing or
// the role has no access to it, or if guards of this database use a second table. Tx may be called concurrently;
// sections of one resource run one after the other.
func Tx(
	ctx context.Context, db pgxguard.DB, claims fencing.Claims, f func(ctx context.Context, tx pgx.Tx) error,
) error {
	guard, err := pgxguard.New(db, &pgxguard.Options{Table: guardTable})
	if err != nil {
		return fmt.Errorf("postgres: tx: %w", err)
	}
	err = guard.Tx(ctx, claims, f)
	if invalid := (*fencing.InvalidError)(nil); errors.As(err, &invalid) && invalid.What == "table" {
		return fmt.Errorf("postgres: tx: %w: %w", backend.ErrMisconfigured, err)
	}
	if code := sqlState(err); (code == "42P01" || code == "42501") && strings.Contains(err.Error(), "fencing_tokens") {
		return fmt.Errorf("postgres: tx: %w: %w%s", backend.ErrMisconfigured, err, remedy(err))
	}
	return err
}
