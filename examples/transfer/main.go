// Command transfer moves money between two accounts under the locks of both, in a database that refuses the writes of
// a process that has lost them.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"

	_ "modernc.org/sqlite" // the driver of your database

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/backend/memory" // memory://, in this process, to try it out
	_ "github.com/fencelock/fencelock/builtin"        // fencelock://: the driver of your lock service
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

func main() {
	url := flag.String("backend", "memory://", "`URL` of the lock service, such as fencelock://127.0.0.1:7480")
	flag.Parse()
	if err := run(context.Background(), *url); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, url string) error {
	db, err := sql.Open("sqlite", "file:bank?mode=memory&cache=shared&_txlock=immediate&_pragma=busy_timeout(30000)")
	if err != nil {
		return err
	}
	defer db.Close()
	guard, err := sqlguard.New(db, sqlguard.SQLite, nil)
	if err != nil {
		return err
	}
	if err := guard.Create(ctx); err != nil { // a table beside the accounts: once, in a migration
		return err
	}
	_, err = db.ExecContext(ctx, `CREATE TABLE accounts (name TEXT, balance INTEGER);
		INSERT INTO accounts VALUES ('ann', 100), ('bob', 0)`)
	if err != nil {
		return err
	}
	locks, err := fencelock.Open(ctx, url, fencelock.Correctness, nil)
	if err != nil {
		return err // wraps ErrTier for a backend without fencing tokens
	}
	defer locks.Close(ctx)
	return transfer(ctx, locks, guard, "ann", "bob", 30)
}

// transfer waits for both locks. It cannot deadlock with a transfer in the other direction.
func transfer(ctx context.Context, locks *fencelock.Client, guard *sqlguard.Guard, from, to string, amount int) error {
	names := []string{"accounts/" + from, "accounts/" + to}
	return locks.DoAll(ctx, names, func(ctx context.Context, leases fencelock.Leases) error {
		// One transaction of the check and the writes: fencing.ErrStale if a later holder has written.
		return guard.Tx(ctx, leases.Claims(), func(ctx context.Context, tx *sql.Tx) error {
			const update = `UPDATE accounts SET balance = balance + ? WHERE name = ? AND balance + ? >= 0`
			for name, change := range map[string]int{from: -amount, to: amount} {
				result, err := tx.ExecContext(ctx, update, change, name, change)
				if err != nil {
					return err
				}
				if n, err := result.RowsAffected(); err != nil || n != 1 {
					return errors.Join(err, fmt.Errorf("%s cannot pay %d to %s", from, amount, to))
				}
			}
			fmt.Println(from, "paid", amount, "to", to)
			return nil
		})
	})
}
