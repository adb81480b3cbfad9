package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// seller is one request in one replica of the shop.
type seller struct {
	story    *story.Story
	customer string
	locks    *fencelock.Client
	db       *sql.DB
	guard    *sqlguard.Guard
}

// sell reserves an item. It may be called anew after an error.
func (r *seller) sell(ctx context.Context, meet func()) error {
	if r.story.Unsafe {
		return r.reserve(ctx, fencing.Claim{}, meet) // they meet between the look and the write
	}
	meet()
	return r.locks.Do(ctx, stock, func(ctx context.Context, lease *fencelock.Lease) error {
		return r.reserve(ctx, lease.Claim(stock), func() {})
	})
}

// reserve writes a reservation if an item is left. It calls askCarrier in between.
func (r *seller) reserve(ctx context.Context, claim fencing.Claim, askCarrier func()) error {
	var left int
	err := r.do(ctx, claim, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, `SELECT remaining FROM lamps`).Scan(&left)
	})
	askCarrier()
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", r.customer, err)
	case left == 0:
		r.story.Tell("%s: sold out", r.customer)
		return nil
	}
	err = r.do(ctx, claim, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `UPDATE lamps SET remaining = remaining - 1`); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO reservations VALUES (?)`, r.customer)
		return err
	})
	if err != nil {
		return fmt.Errorf("%s: %w", r.customer, err)
	}
	r.story.Tell("%s: saw %d, reserved one", r.customer, left)
	return nil
}

// do runs f in a transaction, unless a later holder of the lock than the one who makes the claim has been here.
func (r *seller) do(ctx context.Context, claim fencing.Claim, f func(*sql.Tx) error) error {
	return story.Guarded(ctx, r.db, r.guard, claim, f)
}
