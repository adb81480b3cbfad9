// This file joins the lock and the data: a transaction that checks the fencing token and then writes. It adds nothing
// to the check of package pgxguard but the table, which the migrations make beside the locks, and what to do when that
// is missing.

package postgres

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/pgxguard"
)

// guardTable is where Tx remembers the tokens that it has seen. It is the default schema's, since Tx has no options.
const guardTable = defaultSchema + ".fencing_tokens"

// Tx runs f in a transaction that shows the claims first, and commits if f returns nil. If a claim is refused, because
// somebody with a greater token was here before, f is not called and nothing is written; the error wraps
// fencing.ErrStale, for example. Until the transaction ends, nobody else passes the check for these resources.
//
//	err := postgres.Tx(ctx, pool, lease.Claim("accounts/42"), func(ctx context.Context, tx pgx.Tx) error {
//		_, err := tx.Exec(ctx, `update accounts set balance = balance - 10 where id = 42`)
//		return err
//	})
//
// It is pgxguard.Guard.Tx, read committed, with the table that Migrate has made in the schema "fencelock": what is
// said there of repetitions and of Claim.Sequence holds here. SQL, and other clients, call fencelock.guard for the same
// check; sqlguard.New with Options.Table "fencelock.fencing_tokens" is the same for database/sql.
//
// ctx bounds all of it, f included. A table that is missing, or closed to the role, is backend.ErrMisconfigured, with
// what to do. Tx may be called concurrently; sections of one resource come one after the other.
func Tx(
	ctx context.Context, db pgxguard.DB, claims fencing.Claims, f func(ctx context.Context, tx pgx.Tx) error,
) error {
	guard, err := pgxguard.New(db, &pgxguard.Options{Table: guardTable})
	if err != nil {
		return fmt.Errorf("postgres: tx: %w", err)
	}
	err = guard.Tx(ctx, claims, f)
	if code := sqlState(err); (code == "42P01" || code == "42501") && strings.Contains(err.Error(), "fencing_tokens") {
		return fmt.Errorf("postgres: tx: %w: %w%s", backend.ErrMisconfigured, err, remedy(err))
	}
	return err
}
