// Command inventory sells the last items of a stock to more customers than there are items.
//
//	go run ./examples/stories/inventory
//	go run ./examples/stories/inventory -unsafe
//
// Tier: correctness. An item sold twice is a broken promise. A reservation looks at the remaining stock, asks a
// carrier whether it delivers, which takes longer than a transaction should stay open, and writes. The lock keeps
// others out from the look to the write. A seller paused in between for longer than its lease is beyond the
// lock's reach: so both the look and the write check the token (package sqlguard). The look must, too: from that check
// on no earlier holder of the lock writes, and the remaining stock stays as it was seen. Where no carrier is asked in
// between, no lock is needed: one transaction with the condition left > 0 will do.
//
// With -unsafe there is no lock: all sellers see the same items, and the stock is negative in the end.
package main

import (
	"context"
	"fmt"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
)

const (
	stock   = "stock/lamp" // the lock is named for its resource
	items   = 3
	sellers = 5
)

func main() { story.Main(tell) }

func tell(ctx context.Context, s *story.Story) error {
	db, guard, err := s.GuardedDatabase(ctx)
	if err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, `CREATE TABLE lamps (remaining INTEGER);
		CREATE TABLE reservations (customer TEXT)`); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, `INSERT INTO lamps VALUES (?)`, items); err != nil {
		return err
	}
	s.Tell("%d lamps are left; %d customers want one each, all at once", items, sellers)

	var all []*seller
	for i := range sellers {
		customer := fmt.Sprintf("customer-%d", i+1)
		locks, err := s.Open(ctx, fencelock.Correctness, customer)
		if err != nil {
			return err
		}
		all = append(all, &seller{story: s, customer: customer, locks: locks, db: db, guard: guard})
	}
	err = story.Together(len(all), func(i int, meet func()) error { return all[i].sell(ctx, meet) })
	if err != nil {
		return err
	}

	var left, sold int
	err = db.QueryRowContext(ctx, `SELECT remaining, (SELECT count(*) FROM reservations) FROM lamps`).Scan(&left, &sold)
	if err != nil {
		return err
	}
	if s.Unsafe {
		s.Tell("%d lamps are sold, %d are left: every seller saw %d, and none saw the others", sold, left, items)
	} else {
		s.Tell("%d lamps are sold, %d are left", sold, left)
	}
	if left+sold != items || (left < 0) != s.Unsafe || sold < items {
		return fmt.Errorf("%d are sold and %d left with -unsafe=%t", sold, left, s.Unsafe)
	}
	return nil
}
