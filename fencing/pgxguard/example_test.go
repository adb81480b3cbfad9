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

// Tx shows the claim before anything is read.
func Example() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/bank")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	guard, err := pgxguard.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	claim := fencing.Claim{Resource: "accounts/42", Token: 33} // lease.Claim("accounts/42")
	err = guard.Tx(ctx, claim, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance - 10 WHERE id = 42`)
		return err
	})
	if errors.Is(err, fencing.ErrStale) {
		log.Print("somebody else holds the lock by now: ", err)
	}
}
