// Command stalewriter lets a database refuse the write of a holder that was paused for longer than its lease.
//
//	go run ./examples/stories/stalewriter                                 # SQLite in a temporary folder
//	go run ./examples/stories/stalewriter -db postgres://user@host/name   # PostgreSQL: two tables story_…
//	go run ./examples/stories/stalewriter -unsafe
//
// Tier: correctness. Two writers at once lose a deposit, and no length of lease prevents it: a process can be paused
// between its last look at the lock and its write for as long as it pleases the garbage collector, the hypervisor or
// the disk. Each lease carries a token greater than all before it, and the transaction that writes checks it first
// (package sqlguard).
//
// With -unsafe the same lock is of the efficiency tier, and the database does not check: the late write succeeds, and a
// deposit of 1000 is gone without an error anywhere.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

const account = "accounts/7" // the lock is named for its resource

func main() {
	url := flag.String("db", "", "`URL` of a PostgreSQL database to write to. Default: SQLite in a temporary folder")
	story.Main(func(ctx context.Context, s *story.Story) error { return tell(ctx, s, *url) })
}

func tell(ctx context.Context, s *story.Story, postgres string) error {
	b, err := open(ctx, s, postgres)
	if err != nil {
		return err
	}
	tier := fencelock.Correctness
	if s.Unsafe {
		tier, b.guard = fencelock.Efficiency, nil
	}
	ann, err := s.Open(ctx, tier, "ann")
	if err != nil {
		return err
	}
	bob, err := s.Open(ctx, tier, "bob")
	if err != nil {
		return err
	}

	// A paused process does not renew. NoRenew stands for that part of a pause.
	ttl := story.ShortTTL(bob)
	late, err := bob.Acquire(ctx, account, fencelock.TTL(ttl), fencelock.NoRenew())
	if err != nil {
		return err
	}
	var read int
	err = b.do(ctx, late.Claim(account), func(tx *sql.Tx) (err error) {
		read, err = balance(ctx, tx)
		return err
	})
	if err != nil {
		return fmt.Errorf("bob: %w", err)
	}
	s.Tell("bob takes the lock for %v (token %v), reads %d, wants to add 10, and is paused", ttl, late.Token(), read)

	// Do waits until bob's lease has run out.
	err = ann.Do(ctx, account, func(ctx context.Context, lease *fencelock.Lease) error {
		s.Tell("ann gets the lock (token %v) and adds 1000", lease.Token())
		return b.do(ctx, lease.Claim(account), func(tx *sql.Tx) error {
			n, err := balance(ctx, tx)
			if err != nil {
				return err
			}
			return write(ctx, tx, n+1000)
		})
	})
	if err != nil {
		return fmt.Errorf("ann: %w", err)
	}

	// Bob is in the middle of his work: he looks at neither clock nor lease.
	err = b.do(ctx, late.Claim(account), func(tx *sql.Tx) error { return write(ctx, tx, read+10) })
	s.Tell("bob wakes up and writes %d (token %v)", read+10, late.Token())
	switch {
	case s.Unsafe && err == nil:
		s.Tell("nothing stops this write: no token, no check")
		return b.expect(ctx, s, read+10, "ann's 1000 are gone, and nobody was notified")
	case !s.Unsafe && errors.Is(err, fencing.ErrStale):
		s.Tell("the database refuses it: %v", err)
		return b.expect(ctx, s, read+1000, "ann's 1000 are safe; bob starts anew, with a new lease")
	}
	return fmt.Errorf("bob's late write: %v", err)
}

// bank keeps one account.
type bank struct {
	db    *sql.DB
	guard *sqlguard.Guard // nil: writes are not checked
}

// do runs f in a transaction, unless the guard knows a later holder of the lock than the one who makes the claim. The
// check comes first, in the same transaction as the write: both happen, or neither.
func (b *bank) do(ctx context.Context, claim fencing.Claim, f func(*sql.Tx) error) error {
	return story.Guarded(ctx, b.db, b.guard, claim, f)
}

func balance(ctx context.Context, tx *sql.Tx) (n int, err error) {
	err = tx.QueryRowContext(ctx, `SELECT balance FROM story_accounts`).Scan(&n)
	return n, err
}

func write(ctx context.Context, tx *sql.Tx, balance int) error {
	_, err := tx.ExecContext(ctx, `UPDATE story_accounts SET balance = $1`, balance)
	return err
}

// expect looks at the balance, the only fact that counts.
func (b *bank) expect(ctx context.Context, s *story.Story, want int, comment string) error {
	var got int
	err := b.db.QueryRowContext(ctx, `SELECT balance FROM story_accounts`).Scan(&got)
	if err == nil && got != want {
		err = fmt.Errorf("the balance is %d; want %d", got, want)
	}
	s.Tell("the balance is %d: %s", got, comment)
	return err
}
