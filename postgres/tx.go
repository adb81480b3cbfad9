package postgres

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/background"
)

// Beginner begins transactions: a *pgxpool.Pool, or a *pgx.Conn.
type Beginner interface {
	BeginTx(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error)
}

// maxTxAttempts bounds how often Tx begins anew where the database gave up.
const maxTxAttempts = 20

// Tx runs f in a transaction that shows the claims first, and commits if f returns nil. If a claim is refused, because
// somebody with a greater token was here before, f is not called and nothing is written; the error wraps
// fencing.ErrStale, for example. Until the transaction ends, nobody else passes the check for these resources.
//
//	err := postgres.Tx(ctx, pool, lease.Claim("accounts/42"), func(ctx context.Context, tx pgx.Tx) error {
//		_, err := tx.Exec(ctx, `update accounts set balance = balance - 10 where id = 42`)
//		return err
//	})
//
// A transaction that the database gave up (a deadlock, a conflict at a stricter isolation level) is begun anew, up to 20
// times: f has no other effects than those in tx. The tables are those of the schema "fencelock" (Migrate), and
// fencelock.guard is what others call for the same check: SQL, or database/sql with any driver.
func Tx(ctx context.Context, db Beginner, claims fencing.Claims, f func(ctx context.Context, tx pgx.Tx) error) error {
	list, err := fencing.Sorted(claims)
	if err != nil {
		return fmt.Errorf("postgres: tx: %w", err)
	}
	if db == nil || f == nil {
		return fmt.Errorf("postgres: tx: %w", invalidOption("database or function", "nil", "it is nil"))
	}
	for n := 1; ; n++ {
		err := once(ctx, db, list, f)
		code := sqlState(err)
		if code != "40001" && code != "40P01" || n == maxTxAttempts || !pauseFor(ctx, background.RetryPause(0)) {
			return err
		}
	}
}

func once(ctx context.Context, db Beginner, claims []fencing.Claim, f func(context.Context, pgx.Tx) error) error {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return fmt.Errorf("postgres: tx: %w", err)
	}
	defer func() { // also on a panic in f; after a commit it does nothing
		_ = tx.Rollback(context.WithoutCancel(ctx))
	}()
	for _, c := range claims {
		if !c.Token.Exclusive() {
			return refusal(c, &pgconn.PgError{Code: "FL400"})
		}
		_, err := tx.Exec(ctx, `select fencelock.guard($1, $2, $3)`, c.Resource, int64(c.Token), c.Space)
		if err != nil {
			return refusal(c, err)
		}
	}
	if err := f(ctx, tx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("postgres: tx: commit: %w", err)
	}
	return nil
}

// refusal makes the error of package fencing of what the function guard raised.
func refusal(c fencing.Claim, err error) error {
	var pg *pgconn.PgError
	errors.As(err, &pg)
	switch sqlState(err) {
	case "FL409":
		highest, _ := strconv.ParseUint(pg.Detail, 10, 63)
		return &fencing.StaleError{Resource: c.Resource, Token: c.Token, Highest: fencing.Token(highest)}
	case "FL410":
		return &fencing.SpaceError{Resource: c.Resource, Token: c.Token, Space: c.Space, Want: pg.Detail}
	case "FL400":
		if c.Token.Valid() {
			return &fencing.NotExclusiveError{Resource: c.Resource, Token: c.Token}
		}
		return &fencing.NoTokenError{Resource: c.Resource}
	}
	if misconfigured(err) {
		return fmt.Errorf("postgres: tx: %w: %w%s", backend.ErrMisconfigured, err, remedy(err))
	}
	return fmt.Errorf("postgres: tx: check %q: %w", c.Resource, err)
}

func pauseFor(ctx context.Context, pause time.Duration) bool {
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
