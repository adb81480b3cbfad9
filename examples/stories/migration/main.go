// Command migration lets the replicas of a service bring the schema of their database up to date, all at the same
// moment.
//
//	go run ./examples/stories/migration
//	go run ./examples/stories/migration -unsafe
//
// Tier: correctness. A migration that runs twice corrupts data: euros become cents, and cents become hundredths of
// cents. It cannot be one transaction, since the steps of a large one take hours, and since many databases commit at
// each change of the schema. So the lock lets one replica work while the others wait, and find the work done; and every
// step checks the token (package sqlguard), because a replica that was paused between two steps must not go on when
// another has taken over. A step and the version that it leads to are one transaction: the next replica goes on where
// the other stopped.
//
// With -unsafe there is no lock. All replicas see version 0, and all of them migrate.
package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
)

const (
	schema   = "schema/shop" // the lock is named for its resource
	replicas = 4
)

// steps lead from each version to the next.
var steps = []string{
	`CREATE TABLE IF NOT EXISTS currencies (code TEXT PRIMARY KEY)`,
	`UPDATE products SET price = price * 100`, // from euros to cents
	`INSERT INTO currencies VALUES ('EUR') ON CONFLICT DO NOTHING`,
}

func main() { story.Main(tell) }

func tell(ctx context.Context, s *story.Story) error {
	db, guard, err := s.GuardedDatabase(ctx)
	if err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, `CREATE TABLE products (price INTEGER); INSERT INTO products VALUES (20);
		CREATE TABLE schema_version (version INTEGER); INSERT INTO schema_version VALUES (0)`)
	if err != nil {
		return err
	}
	s.Tell("a product costs 20 euros; %d replicas start at once, with a migration to cents", replicas)

	tier := fencelock.Correctness
	if s.Unsafe {
		tier = fencelock.Efficiency // any driver: no lock is taken
	}
	var all []*replica
	for i := range replicas {
		locks, err := s.Open(ctx, tier, fmt.Sprintf("replica-%d", i))
		if err != nil {
			return err
		}
		all = append(all, &replica{story: s, number: i, locks: locks, db: db, guard: guard})
	}
	if err := startAll(ctx, all); err != nil {
		return err
	}
	var price int
	if err := db.QueryRowContext(ctx, `SELECT price FROM products`).Scan(&price); err != nil {
		return err
	}
	if s.Unsafe {
		s.Tell("it costs %d cents now: every replica multiplied by 100", price)
	} else {
		s.Tell("it costs %d cents now", price)
	}
	if (price == 2000) == s.Unsafe {
		return fmt.Errorf("the price is %d with -unsafe=%t", price, s.Unsafe)
	}
	return nil
}

// startAll boots the replicas, and lets them meet in the worst moment.
func startAll(ctx context.Context, replicas []*replica) error {
	var all, start sync.WaitGroup
	start.Add(len(replicas))
	errs := make([]error, len(replicas))
	for i, r := range replicas {
		all.Go(func() {
			errs[i] = r.boot(ctx, func() {
				start.Done()
				start.Wait()
			})
		})
	}
	all.Wait()
	return errors.Join(errs...)
}
