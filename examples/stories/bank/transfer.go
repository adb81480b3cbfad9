package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
)

func open(ctx context.Context, s *story.Story, owner string) (b *bank, err error) {
	b = &bank{}
	if b.db, b.guard, err = s.GuardedDatabase(ctx); err != nil {
		return nil, err
	}
	tier := fencelock.Efficiency
	if !s.Unsafe {
		tier = fencelock.Correctness
	}
	b.locks, err = s.Open(ctx, tier, owner)
	return b, err
}

// transfer moves money under the locks of both accounts. It calls between after the debit and before the credit.
func (b *bank) transfer(
	ctx context.Context, from, to string, amount int, between func(), opts ...fencelock.AcquireOption,
) error {
	return b.locks.DoAll(ctx, []string{"accounts/" + from, "accounts/" + to},
		func(ctx context.Context, leases fencelock.Leases) error {
			if b.guard == nil {
				return move(ctx, b.db, from, to, amount, between)
			}
			return b.guard.Tx(ctx, leases.Claims(), func(ctx context.Context, tx *sql.Tx) error {
				return move(ctx, tx, from, to, amount, between)
			})
		}, opts...)
}

// database is a *sql.DB, where each statement is a separate transaction, or a *sql.Tx.
type database interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// move reads, computes and writes, as programs do that have more to decide than a sum.
func move(ctx context.Context, db database, from, to string, amount int, between func()) error {
	var payer, payee int
	if err := db.QueryRowContext(ctx, `SELECT balance FROM accounts WHERE name = ?`, from).Scan(&payer); err != nil {
		return err
	}
	if err := db.QueryRowContext(ctx, `SELECT balance FROM accounts WHERE name = ?`, to).Scan(&payee); err != nil {
		return err
	}
	if payer < amount {
		return fmt.Errorf("%s has %d and cannot pay %d", from, payer, amount)
	}
	if _, err := db.ExecContext(ctx, `UPDATE accounts SET balance = ? WHERE name = ?`, payer-amount, from); err != nil {
		return err
	}
	between()
	_, err := db.ExecContext(ctx, `UPDATE accounts SET balance = ? WHERE name = ?`, payee+amount, to)
	return err
}
