package pgxguard_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/pgxguard"
)

func pool(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	p, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

func sections(t *testing.T, url string) {
	ctx, db := t.Context(), pool(t, url)
	guard := must(t, db, nil)
	claim := func(resource string) fencing.Claim { return fencing.Claim{Resource: resource, Token: 5, Space: space} }
	bounded := func(ctx context.Context) (context.Context, func()) { return context.WithTimeout(ctx, time.Minute) }
	nothing := func(context.Context, pgx.Tx) error { return nil }

	t.Run("nested-at-depth", func(t *testing.T) {
		ctx, cancel := bounded(ctx)
		defer cancel()
		other := must(t, db, &pgxguard.Options{Table: "other_tokens"})
		if err := other.Create(ctx); err != nil {
			t.Fatal(err)
		}
		for what, inner := range map[string]*pgxguard.Guard{"the same guard": guard, "another guard of the table": must(t, db, nil)} {
			var nested error
			err := guard.Tx(ctx, claim("depth"), func(ctx context.Context, _ pgx.Tx) error {
				return other.Tx(ctx, claim("depth"), func(ctx context.Context, _ pgx.Tx) error {
					nested = inner.Tx(ctx, claim("depth"), nothing)
					return nil
				})
			})
			if err != nil || !errors.Is(nested, fencing.ErrNested) {
				t.Errorf("%s: section = %v, and the one two levels below = %v, want ErrNested", what, err, nested)
			}
		}
	})
	t.Run("repeated-elsewhere", func(t *testing.T) {
		// A function that returns another guard's ErrRepeated has failed.
		err := guard.Tx(ctx, claim("repeated"), func(context.Context, pgx.Tx) error { return fencing.ErrRepeated })
		if !errors.Is(err, fencing.ErrRepeated) {
			t.Errorf("a section that fails with ErrRepeated = %v, want that error", err)
		}
	})
	t.Run("commit-of-the-tx", func(t *testing.T) {
		if err := guard.Tx(ctx, claim("commit"), func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }); !errors.Is(err, fencing.ErrUnfenced) {
			t.Errorf("a section that ends its transaction = %v, want ErrUnfenced", err)
		}
	})
	t.Run("verify", func(t *testing.T) {
		for query, want := range map[string]error{`SELECT 1`: nil, `COMMIT`: fencing.ErrUnfenced, `COMMIT AND CHAIN`: fencing.ErrUnfenced} {
			tx, err := db.Begin(ctx)
			if err != nil {
				t.Fatal(err)
			}
			in := guard.In(tx)
			if err := in.Verify(ctx); !errors.Is(err, fencing.ErrInvalid) {
				t.Errorf("Verify without a check = %v, want ErrInvalid", err)
			}
			if err := in.Check(ctx, claim("verify")); err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(ctx, query); err != nil {
				t.Fatal(err)
			}
			if err := in.Verify(ctx); !errors.Is(err, want) {
				t.Errorf("Verify after %s = %v, want %v", query, err, want)
			}
			if err := tx.Rollback(ctx); want == nil && err != nil || want != nil && !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("after Verify a rollback = %v", err)
			}
		}
	})
}

// The balance of an account: the section of token 33 reads 100, its transaction ends, the next holder adds 1,000, and
// the section writes 110. It has an error, and with ErrUnfenced alone the balance may be 110.
func balance(t *testing.T, url string) {
	ctx, db := t.Context(), pool(t, url)
	exec := func(query string) {
		t.Helper()
		if _, err := db.Exec(ctx, query); err != nil {
			t.Fatal(err)
		}
	}
	exec(`CREATE TABLE balances (id int PRIMARY KEY, value int)`)
	for id, query := range []string{
		`COMMIT`, `ROLLBACK`, `COMMIT AND CHAIN`, `ROLLBACK AND CHAIN`, `PREPARE TRANSACTION 'section'`, `SELECT 1 / 0`,
		`SET LOCAL statement_timeout = 10`, // and the next statement takes longer
		`SELECT pg_terminate_backend(pg_backend_pid())`,
	} {
		t.Run(query, func(t *testing.T) {
			exec(fmt.Sprintf(`INSERT INTO balances VALUES (%d, 100)`, id))
			claim := fencing.Claim{Resource: fmt.Sprintf("balances/%d", id), Token: 33, Space: space}
			next := errors.New("it was not called")
			err := must(t, db, nil).Tx(ctx, claim, func(ctx context.Context, tx pgx.Tx) error {
				tx.Exec(ctx, query)
				if strings.HasPrefix(query, "SET") {
					tx.Exec(ctx, `SELECT pg_sleep(10)`)
				}
				bounded, cancel := context.WithTimeout(ctx, time.Second) // a prepared transaction keeps the row locked
				defer cancel()
				later := claim
				later.Token = 34
				next = must(t, pool(t, url), nil).Tx(bounded, later, func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, `UPDATE balances SET value = value + 1000 WHERE id = $1`, id)
					return err
				})
				tx.Exec(ctx, `UPDATE balances SET value = 110 WHERE id = $1`, id)
				return nil
			})
			if strings.HasPrefix(query, "PREPARE") {
				exec(`ROLLBACK PREPARED 'section'`)
			}
			var value int
			if err := db.QueryRow(ctx, `SELECT value FROM balances WHERE id = $1`, id).Scan(&value); err != nil {
				t.Fatal(err)
			}
			t.Logf("next holder: %v; section: %v; balance %d", next, err, value)
			if err == nil || value != 100 && value != 1100 && !errors.Is(err, fencing.ErrUnfenced) {
				t.Errorf("the section = %v, the next holder's %v, and the balance is %d", err, next, value)
			}
		})
	}
}

// A commit that stopped waiting for a synchronous standby is answered as a success, and may be lost in a failover.
func cancelledCommit(t *testing.T, url string) {
	ctx, db, operator := t.Context(), pool(t, url), connect(t, url)
	set := func(query string) {
		t.Helper()
		for _, each := range []string{query, `SELECT pg_reload_conf()`} {
			if _, err := operator.Exec(ctx, each); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := operator.Exec(ctx, `SET synchronous_commit = local`); err != nil {
		t.Fatal(err)
	}
	for _, cancel := range []string{"pg_cancel_backend", "pg_terminate_backend"} {
		set(`ALTER SYSTEM SET synchronous_standby_names = 'nobody'`)
		answered := make(chan error, 1)
		section := func() {
			answered <- must(t, db, nil).Tx(ctx, fencing.Claim{Resource: "sync", Token: 5, Space: space},
				func(context.Context, pgx.Tx) error { return nil })
		}
		go section()
		began := time.Now()
		for n := 0; n == 0; {
			err := operator.QueryRow(ctx, fmt.Sprintf(`SELECT count(*) FILTER (WHERE %s(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`,
				cancel)).Scan(&n)
			if err != nil {
				t.Fatal(err)
			}
			if n > 0 {
				break
			}
			select {
			case err := <-answered:
				if err != nil || time.Since(began) > time.Minute {
					t.Fatalf("the section = %v, though nobody has replicated it", err)
				}
				go section() // the server has not read its settings yet
			case <-time.After(time.Millisecond):
			}
		}
		if err := <-answered; !errors.Is(err, fencing.ErrUnknown) {
			t.Errorf("a commit after %s ended its wait = %v, want ErrUnknown", cancel, err)
		}
		set(`ALTER SYSTEM RESET synchronous_standby_names`)
	}
	if err := must(t, db, nil).Tx(ctx, fencing.Claim{Resource: "sync", Token: 6, Space: space},
		func(context.Context, pgx.Tx) error { return nil }); err != nil {
		t.Errorf("afterwards a section = %v", err)
	}
}
