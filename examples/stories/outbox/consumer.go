package main

import (
	"context"
	"database/sql"

	"github.com/fencelock/fencelock/fencing"
)

// consume reads the partition from where the consumer before has ended; finish counts the events.
func (sh *shop) consume(ctx context.Context, claim fencing.Claim) (finish func(context.Context) error, err error) {
	next := 0 // an offset kept elsewhere is not there yet when it is needed
	if sh.guard != nil {
		err = sh.guarded(ctx, claim, func(tx *sql.Tx) error {
			return tx.QueryRowContext(ctx, `SELECT next FROM offsets WHERE partition = 0`).Scan(&next)
		})
		if err != nil {
			return nil, err
		}
	}
	batch := sh.topic[next:]
	return func(ctx context.Context) error {
		for i, e := range batch {
			offset := next + i
			// An event redelivered under this hold is not counted twice.
			if err := sh.guarded(
				ctx, claim.At(uint64(offset)+1), func(tx *sql.Tx) error { return sh.count(ctx, tx, e, offset) },
			); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// count enters the sale, unless its key is there, and the offset after it.
func (sh *shop) count(ctx context.Context, tx *sql.Tx, e event, offset int) error {
	known := false
	if sh.guard != nil {
		if err := tx.QueryRowContext(
			ctx, `SELECT count(*) > 0 FROM sales WHERE key = ?`, e.key,
		).Scan(&known); err != nil {
			return err
		}
	}
	if !known {
		if _, err := tx.ExecContext(ctx, `INSERT INTO sales VALUES (?, ?)`, e.key, e.amount); err != nil {
			return err
		}
	}
	_, err := tx.ExecContext(ctx, `UPDATE offsets SET next = ? WHERE partition = 0`, offset+1)
	return err
}
