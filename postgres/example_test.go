package postgres_test

import (
	"context"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/postgres"
)

// Lock, check and write in an existing database: a client that has lost the lock cannot write.
func Example() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://app@db/app")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if _, err := postgres.Migrate(ctx, pool, nil); err != nil { // or `fencelock postgres migrate`
		log.Fatal(err)
	}
	locks, err := fencelock.ForCorrectness(postgres.New(pool, nil), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)
	err = locks.Do(ctx, "accounts/42", func(ctx context.Context, lease *fencelock.Lease) error {
		return postgres.Tx(ctx, pool, lease.Claim("accounts/42"), func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `update accounts set balance = balance - 10 where id = 42`)
			return err
		})
	})
	if err != nil {
		log.Fatal(err)
	}
}

// Migrations returns the SQL for your own migration tool.
func ExampleMigrations() {
	steps, err := postgres.Migrations(nil)
	if err != nil {
		log.Fatal(err)
	}
	for _, step := range steps[:2] {
		fmt.Println(step.Version, step.Name)
	}
	// Output:
	// 1 0001_locks.sql
	// 2 0002_guard.sql
}
