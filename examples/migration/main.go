// Command migration brings a database's schema up to date on one of all replicas that start at the same time. The
// others wait, and find the work done.
package main

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"log"

	_ "modernc.org/sqlite" // the driver of your database

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/backend/memory" // memory://, in this process, to try it out
	_ "github.com/fencelock/fencelock/builtin"        // fencelock://: the driver of your lock service
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

var steps = []string{
	`CREATE TABLE products (name TEXT, price INTEGER)`,
	`UPDATE products SET price = price * 100`, // from euros to cents: a second run would corrupt it
}

func main() {
	url := flag.String("backend", "memory://", "`URL` of the lock service, such as fencelock://127.0.0.1:7480")
	flag.Parse()
	if err := run(context.Background(), *url); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, url string) error {
	db, err := sql.Open("sqlite", "file:shop?mode=memory&cache=shared&_txlock=immediate&_pragma=busy_timeout(30000)")
	if err != nil {
		return err
	}
	defer db.Close()
	guard, err := sqlguard.New(db, sqlguard.SQLite, nil)
	if err != nil {
		return err
	}
	if err := guard.Create(ctx); err != nil {
		return err
	}
	locks, err := fencelock.Open(ctx, url, fencelock.Correctness, nil)
	if err != nil {
		return err
	}
	defer locks.Close(ctx)
	return locks.Do(ctx, "schema/shop", func(ctx context.Context, lease *fencelock.Lease) error {
		return migrate(ctx, guard, lease)
	})
}

// migrate executes the steps that are missing. Each is one transaction with the guard's check and the new version: a
// replica that was paused between two steps is refused, and another one continues where it stopped.
func migrate(ctx context.Context, guard *sqlguard.Guard, lease *fencelock.Lease) error {
	for done := false; !done; {
		err := guard.Tx(ctx, lease.Claim("schema/shop"), func(ctx context.Context, tx *sql.Tx) error {
			var version int
			if err := tx.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&version); err != nil {
				return err
			}
			if done = version == len(steps); done {
				return nil
			}
			fmt.Println("step", version+1)
			_, err := tx.ExecContext(ctx, steps[version]+fmt.Sprintf(`; PRAGMA user_version = %d`, version+1))
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
