package sqlguard_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// accounts opens a database with a table that was there before anybody thought of fencing.
func accounts() (db *sql.DB, remove func()) {
	dir, err := os.MkdirTemp("", "fencing-")
	if err != nil {
		log.Fatal(err)
	}
	db, err = sql.Open("sqlite", "file:"+filepath.Join(dir, "bank.db")+"?_txlock=immediate&_pragma=busy_timeout(30000)")
	if err != nil {
		log.Fatal(err)
	}
	if _, err := db.Exec(`CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER); INSERT INTO accounts VALUES (42, 100)`); err != nil {
		log.Fatal(err)
	}
	return db, func() {
		if err := db.Close(); err != nil {
			log.Fatal(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			log.Fatal(err)
		}
	}
}

// The guard's table stands beside those that it guards; Tx shows the claim before anything is read.
func Example() {
	ctx := context.Background()
	db, remove := accounts()
	defer remove()
	guard, err := sqlguard.New(db, sqlguard.SQLite, nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := guard.Create(ctx); err != nil { // or the statements of guard.Schema, in a migration
		log.Fatal(err)
	}
	debit := func(token fencing.Token, amount int) error {
		claim := fencing.Claim{Resource: "accounts/42", Token: token} // lease.Claim("accounts/42")
		return guard.Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `UPDATE accounts SET balance = balance - ? WHERE id = 42`, amount)
			return err
		})
	}
	fmt.Println(debit(33, 10)) // holder A writes
	fmt.Println(debit(34, 10)) // A was paused, B holds the lock now
	fmt.Println(debit(33, 10)) // A wakes up
	fmt.Println(debit(0, 10))  // somebody uses the efficiency tier
	var balance int
	fmt.Println(db.QueryRow(`SELECT balance FROM accounts`).Scan(&balance), balance)
	// Output:
	// <nil>
	// <nil>
	// fencing: token 33 for "accounts/42" is stale: 34 was admitted before
	// fencing: no token for "accounts/42" (34 was admitted before): leases of the efficiency tier carry none
	// <nil> 80
}

// Where a lock protects one row, the row can carry the token. The condition on a token above zero refuses those of the
// efficiency tier, and of shared holds, which are negative as an int64.
func Example_column() {
	db, remove := accounts()
	defer remove()
	// This is the migration.
	if _, err := db.Exec(`ALTER TABLE accounts ADD COLUMN fencing_token BIGINT NOT NULL DEFAULT 0`); err != nil {
		log.Fatal(err)
	}
	debit := func(token fencing.Token, amount int) string {
		result, err := db.Exec(`UPDATE accounts SET balance = balance - $1, fencing_token = $2
			WHERE id = $3 AND fencing_token <= $2 AND $2 > 0`, amount, int64(token), 42)
		if err != nil {
			log.Fatal(err)
		}
		if rows, err := result.RowsAffected(); err != nil || rows == 0 {
			return "refused"
		}
		return "written"
	}
	fmt.Println(debit(0, 10))
	fmt.Println(debit(fencing.Token(99).NotExclusive(), 10))
	fmt.Println(debit(33, 10))
	fmt.Println(debit(34, 10))
	fmt.Println(debit(33, 10))
	// Output:
	// refused
	// refused
	// written
	// written
	// refused
}
