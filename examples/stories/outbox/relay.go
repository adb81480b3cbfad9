package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/fencelock/fencelock/fencing"
)

// pay marks the order as paid, and writes the intent of its mail and event, in one transaction. A worker that was
// killed after its commit is followed by another, which finds the order paid. The key is made of the business fact, and
// not of the token: every worker makes the same.
func (sh *shop) pay(_ context.Context, claim fencing.Claim) (finish func(context.Context) error, err error) {
	return func(ctx context.Context) error {
		return sh.guarded(ctx, claim, func(tx *sql.Tx) error {
			query, key := `UPDATE orders SET paid = TRUE WHERE id = 7 AND NOT paid`, claim.Resource+"/paid"
			if sh.guard == nil { // nobody asks whether it is paid, and the key is that of the run
				query, key = `UPDATE orders SET paid = TRUE WHERE id = 7`, fmt.Sprintf("%s/%v", claim.Resource, claim.Token)
			}
			result, err := tx.ExecContext(ctx, query)
			if err != nil {
				return err
			}
			if rows, err := result.RowsAffected(); err != nil || rows == 0 {
				return err
			}
			_, err = tx.ExecContext(ctx, `INSERT INTO outbox (key, amount, sent) VALUES (?, 50, FALSE)`, key)
			return err
		})
	}, nil
}

// relay carries out the intents of the outbox; finish strikes them off.
func (sh *shop) relay(ctx context.Context, claim fencing.Claim) (finish func(context.Context) error, err error) {
	var intents []event
	err = sh.guarded(ctx, claim, func(tx *sql.Tx) (err error) {
		intents, err = unsent(ctx, tx)
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, each := range intents {
		key := each.key
		if sh.guard == nil {
			key = "" // as if the service had no such thing
		}
		sh.mail.send(key, fmt.Sprintf("%d were paid", each.amount))
		sh.topic = append(sh.topic, each)
	}
	return func(ctx context.Context) error {
		return sh.guarded(ctx, claim, func(tx *sql.Tx) error {
			for _, each := range intents {
				if _, err := tx.ExecContext(ctx, `UPDATE outbox SET sent = TRUE WHERE id = ?`, each.id); err != nil {
					return err
				}
			}
			return nil
		})
	}, nil
}

func unsent(ctx context.Context, tx *sql.Tx) (intents []event, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT id, key, amount FROM outbox WHERE NOT sent ORDER BY id`)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }() // rows.Err says what went wrong
	for rows.Next() {
		var e event
		if err := rows.Scan(&e.id, &e.key, &e.amount); err != nil {
			return nil, err
		}
		intents = append(intents, e)
	}
	return intents, rows.Err()
}

// event is an intent, and its form in the topic.
type event struct {
	id     int
	key    string // of the intent; made once, in the guarded transaction
	amount int
}

// mailer is a service that knows no tokens. A mail with a known key is not sent twice.
type mailer struct {
	sent []string
	keys map[string]bool
}

func (m *mailer) send(key, text string) {
	if m.keys == nil {
		m.keys = map[string]bool{}
	}
	if key != "" && m.keys[key] {
		return
	}
	m.keys[key] = true
	m.sent = append(m.sent, text)
}
