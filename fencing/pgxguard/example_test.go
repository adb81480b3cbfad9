package pgxguard_test

import (
	"context"
	"errors"
	"log"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/pgxguard"
)

// The check is the first statement of the transaction that writes.
func Example() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/bank")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	guard, err := pgxguard.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	token := fencing.Token(33) // lease.Token()
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := guard.In(tx).Check(ctx, "accounts/42", token); err != nil {
			return err // rolls back
		}
		_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance - 10 WHERE id = 42`)
		return err
	})
	if errors.Is(err, fencing.ErrStale) {
		log.Print("somebody else holds the lock by now: ", err)
	}
}
