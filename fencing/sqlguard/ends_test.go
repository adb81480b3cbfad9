package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// ending makes the database end the transaction, and drops what it says.
type ending func(ctx context.Context, t *sql.Tx) error

func statement(query string) ending {
	return func(ctx context.Context, tx *sql.Tx) error { _, err := tx.ExecContext(ctx, query); return err }
}

// endings are the ways in which each dialect's transactions end before their sections.
func (d database) endings(dsn string) map[guardtest.End]ending {
	switch d.dialect {
	case sqlguard.MySQL:
		return map[guardtest.End]ending{
			guardtest.Deadlock:       func(ctx context.Context, tx *sql.Tx) error { return d.deadlock(ctx, dsn, tx) },
			guardtest.ImplicitCommit: statement(`CREATE TABLE IF NOT EXISTS made_in_a_section (id int)`),
			guardtest.LostConnection: statement(`KILL CONNECTION_ID()`),
			guardtest.ManualCommit:   statement(`COMMIT`),
		}
	case sqlguard.SQLite:
		return map[guardtest.End]ending{guardtest.Interrupt: interrupt, guardtest.ManualCommit: statement(`COMMIT`)}
	}
	return map[guardtest.End]ending{
		guardtest.Deadlock:       func(ctx context.Context, tx *sql.Tx) error { return d.deadlock(ctx, dsn, tx) },
		guardtest.LostConnection: statement(`SELECT pg_terminate_backend(pg_backend_pid())`),
		guardtest.ManualCommit:   statement(`COMMIT`),
	}
}

// lockWaitTimeout fails while the row is busy, and with innodb_rollback_on_timeout the transaction is rolled back.
const lockWaitTimeout = `SELECT * FROM busy WHERE id = 1 FOR UPDATE NOWAIT`

// busy locks the row until the test has ended.
func (d database) busy(t *testing.T, dsn string) {
	tx, err := d.connect(t, dsn).BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tx.Rollback() })
	if err := statement(`SELECT * FROM busy WHERE id = 1 FOR UPDATE`)(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
}

// interrupt ends a statement that writes, and with it SQLite rolls back the transaction, with its savepoints. On a busy
// machine the time may be over before the statement begins: then there is no end, and it is executed again.
func interrupt(ctx context.Context, tx *sql.Tx) error {
	for {
		if err := statement(`SAVEPOINT before_the_end`)(ctx, tx); err != nil {
			return err
		}
		bounded, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		err := statement(`INSERT INTO scratch WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
			SELECT i + 100, i FROM n LIMIT 1000000000`)(bounded, tx)
		cancel()
		if statement(`RELEASE before_the_end`)(ctx, tx) != nil {
			return err
		}
	}
}

// deadlock lets the transaction be the victim of a deadlock on rows that no guard knows. The other one has waited
// for longer, and has more to roll back, so it is not.
func (d database) deadlock(ctx context.Context, dsn string, tx *sql.Tx) error {
	db, err := sql.Open(d.driver, dsn)
	if err != nil {
		return err
	}
	defer db.Close()
	other, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer other.Rollback()
	if _, err := tx.ExecContext(ctx, `UPDATE scratch SET value = value + 1 WHERE id = 1`); err != nil {
		return err
	}
	if _, err := other.ExecContext(ctx, `UPDATE scratch SET value = value + 1 WHERE id > 1`); err != nil {
		return err
	}
	blocked, pid := true, 0
	if d.dialect == sqlguard.PostgreSQL { // it looks for a deadlock once, a second after a wait began
		if _, err := other.ExecContext(ctx, `SET LOCAL deadlock_timeout = '1min'`); err != nil {
			return err
		}
		if err := other.QueryRowContext(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
			return err
		}
		blocked = false
	}
	waits := make(chan error, 1)
	go func() {
		_, err := other.ExecContext(ctx, `UPDATE scratch SET value = value + 1 WHERE id = 1`)
		waits <- err
	}()
	for !blocked {
		row := db.QueryRowContext(ctx, `SELECT count(*) > 0 FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'`, pid)
		if err := row.Scan(&blocked); err != nil {
			return err
		}
	}
	_, err = tx.ExecContext(ctx, `UPDATE scratch SET value = value + 1 WHERE id = 2`)
	if d.dialect == sqlguard.PostgreSQL { // the rows stay locked until the section ends
		return err
	}
	return errors.Join(err, <-waits)
}

// ends are the sections of guardtest with those endings. What must not fail shows whether the transaction has ended.
func (d database) ends(dsn string, guard *sqlguard.Guard,
	value func(context.Context, *sql.Tx, string) (string, error),
) map[guardtest.End]guardtest.Ended {
	all := map[guardtest.End]guardtest.Ended{}
	for end, run := range d.endings(dsn) {
		all[end] = func(ctx context.Context, claims fencing.Claims, resource string, ended func(), f guardtest.Change) error {
			return guard.Tx(ctx, claims, func(ctx context.Context, tx *sql.Tx) error {
				old, err := value(ctx, tx, resource)
				if err != nil {
					return err
				}
				run(ctx, tx)
				ended()
				text, err := f(ctx, old)
				tx.ExecContext(ctx, d.value, resource, text)
				return err
			})
		}
	}
	return all
}

// The balance of an account: the section of token 33 reads 100, its transaction ends, the next holder adds 1,000, and
// the section writes 110. It has an error, or the balance is 1,110.
func (d database) balance(t *testing.T, dsn string) {
	ctx, db := t.Context(), d.connect(t, dsn)
	guard := must(t, db, d.dialect, nil)
	param := map[bool][2]string{true: {"$1", "$2"}, false: {"?", "?"}}[d.dialect == sqlguard.PostgreSQL]
	set := fmt.Sprintf(`UPDATE balances SET value = %s WHERE id = %s`, param[0], param[1])
	add := fmt.Sprintf(`UPDATE balances SET value = value + 1000 WHERE id = %s`, param[0])
	endings := map[string]ending{}
	for end, run := range d.endings(dsn) {
		endings[string(end)] = run
	}
	for _, query := range map[sqlguard.Dialect][]string{
		sqlguard.MySQL: {
			`TRUNCATE scratch2`, `ANALYZE TABLE scratch2`, `START TRANSACTION`, `LOCK TABLES balances WRITE, fencing_tokens WRITE, scratch WRITE`, `ROLLBACK`,
			`COMMIT AND CHAIN`, lockWaitTimeout,
		},
		sqlguard.PostgreSQL: {`ROLLBACK`, `PREPARE TRANSACTION 'section'`, `COMMIT AND CHAIN`, `SELECT 1 / 0`},
		sqlguard.SQLite:     {`ROLLBACK`},
	}[d.dialect] {
		endings[query] = statement(query)
	}
	if d.dialect == sqlguard.MySQL {
		d.busy(t, dsn)
	}
	id := 0
	for name, run := range endings {
		id++
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			if _, err := db.ExecContext(ctx, fmt.Sprintf(`INSERT INTO balances VALUES (%d, 100)`, id)); err != nil {
				t.Fatal(err)
			}
			claim := fencing.Claim{Resource: fmt.Sprintf("balances/%d", id), Token: 33, Space: space}
			next := errors.New("it was not called")
			err := guard.Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
				run(ctx, tx)
				bounded, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				later := claim
				later.Token = 34
				// Where the session has locked whole tables, or prepared its transaction, it waits.
				next = must(t, d.connect(t, dsn), d.dialect, nil).Tx(bounded, later, func(ctx context.Context, tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, add, id)
					return err
				})
				tx.ExecContext(ctx, set, 110, id)
				return nil
			})
			if name == "PREPARE TRANSACTION 'section'" {
				if _, err := db.ExecContext(ctx, `ROLLBACK PREPARED 'section'`); err != nil {
					t.Error(err)
				}
			}
			var value int
			if err := db.QueryRowContext(ctx, `SELECT value FROM balances WHERE id = `+fmt.Sprint(id)).Scan(&value); err != nil {
				t.Fatal(err)
			}
			t.Logf("next holder: %v; section: %v; balance %d", next, err, value)
			if err == nil {
				t.Errorf("the section is acknowledged, the next holder's was %v, and the balance is %d", next, value)
			}
			if value != 100 && value != 1100 && !errors.Is(err, fencing.ErrUnfenced) {
				t.Errorf("the balance is %d, and the section = %v, want ErrUnfenced", value, err)
			}
			if d.dialect == sqlguard.MySQL && next == nil && value != 1100 {
				t.Errorf("the balance is %d, want what the next holder wrote: 1100", value)
			}
		})
	}
}

// What a section is besides: nested, repeated, tried again.
func (d database) sections(t *testing.T, dsn string) {
	ctx, db := t.Context(), d.connect(t, dsn)
	guard := must(t, db, d.dialect, nil)
	claim := func(resource string) fencing.Claim { return fencing.Claim{Resource: resource, Token: 5, Space: space} }
	nothing := func(context.Context, *sql.Tx) error { return nil }

	t.Run("nested-at-depth", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		other := must(t, db, d.dialect, &sqlguard.Options{Table: "other_tokens"})
		if err := other.Create(ctx); err != nil {
			t.Fatal(err)
		}
		for what, inner := range map[string]*sqlguard.Guard{
			"the same guard": guard, "another guard of the table": must(t, db, d.dialect, nil),
		} {
			nested := errors.New("it was not called")
			err := guard.Tx(ctx, claim("depth"), func(ctx context.Context, _ *sql.Tx) error {
				if d.dialect == sqlguard.SQLite { // it has one writer at a time
					nested = inner.Tx(context.WithValue(ctx, t, t), claim("depth"), nothing)
					return nil
				}
				return other.Tx(ctx, claim("depth"), func(ctx context.Context, _ *sql.Tx) error {
					nested = inner.Tx(ctx, claim("depth"), nothing)
					return nil
				})
			})
			if err != nil || !errors.Is(nested, fencing.ErrNested) {
				t.Errorf("%s: section = %v, and the one below = %v, want ErrNested", what, err, nested)
			}
		}
	})
	t.Run("repeated-elsewhere", func(t *testing.T) {
		// A function that returns another guard's ErrRepeated has failed.
		err := guard.Tx(ctx, claim("repeated"), func(context.Context, *sql.Tx) error { return fencing.ErrRepeated })
		if !errors.Is(err, fencing.ErrRepeated) {
			t.Errorf("a section that fails with ErrRepeated = %v, want that error", err)
		}
	})
	t.Run("sequence-of-a-check", func(t *testing.T) {
		calls := 0
		err := guard.Tx(ctx, claim("sequence").At(1), func(context.Context, *sql.Tx) error { return errors.New("disk full") })
		if err == nil {
			t.Error("a failing section = nil")
		}
		for range 2 {
			err = errors.Join(guard.Check(ctx, claim("sequence").At(1)), guard.Tx(ctx, claim("sequence").At(1),
				func(context.Context, *sql.Tx) error { calls++; return nil }))
		}
		if err != nil || calls != 1 {
			t.Errorf("a second try with a claim that was checked before = %v, made %d times; want once", err, calls)
		}
	})
	if d.dialect != sqlguard.SQLite { // it has one writer at a time
		t.Run("deadlock-again", func(t *testing.T) {
			for _, unfenced := range []bool{false, true} {
				calls := 0
				err := guard.Tx(ctx, claim("deadlock"), func(ctx context.Context, tx *sql.Tx) error {
					if calls++; calls > 1 {
						return nil
					}
					if unfenced {
						if err := statement(`COMMIT`)(ctx, tx); err != nil {
							return err
						}
						if d.dialect == sqlguard.PostgreSQL { // each statement is a transaction now
							return &pgconn.PgError{Code: "40P01"}
						}
					}
					return d.deadlock(ctx, dsn, tx)
				})
				switch {
				case !unfenced && (err != nil || calls != 2):
					t.Errorf("a section that returns a deadlock = %v after %d calls, want it tried again", err, calls)
				case unfenced && (!errors.Is(err, fencing.ErrUnfenced) || calls != 1):
					t.Errorf("a section that returns a deadlock after a commit = %v after %d calls, want ErrUnfenced", err, calls)
				}
			}
		})
	}
	if d.dialect != sqlguard.PostgreSQL { // there each of these ends the transaction
		t.Run("goes-on", func(t *testing.T) {
			failing := []string{`INSERT INTO scratch VALUES (1, 0)`, `SELECT nothing`}
			if d.dialect == sqlguard.MySQL {
				failing = append(failing, `SET STATEMENT max_statement_time = 0.01 FOR SELECT SLEEP(10) FROM scratch`)
			}
			for i, query := range failing {
				resource := fmt.Sprintf("goes-on/%d", i)
				err := guard.Tx(ctx, claim(resource), func(ctx context.Context, tx *sql.Tx) error {
					if statement(query)(ctx, tx) == nil {
						t.Errorf("%s does not fail", query)
					}
					_, err := tx.ExecContext(ctx, d.value, resource, "new")
					return err
				})
				var value string
				failed := db.QueryRowContext(ctx, d.reading(), resource).Scan(&value)
				if err != nil || failed != nil || value != "new" {
					t.Errorf("a section that drops the error of %s = %v, and the value is %q (%v)", query, err, value, failed)
				}
			}
		})
	}
	t.Run("verify", func(t *testing.T) {
		for query, want := range map[string]error{`SELECT 1`: nil, `COMMIT`: fencing.ErrUnfenced} {
			err := in(t, db, func(tx *sql.Tx) error {
				in := guard.In(tx)
				if err := in.Verify(ctx); !errors.Is(err, fencing.ErrInvalid) {
					t.Errorf("Verify without a check = %v, want ErrInvalid", err)
				}
				return errors.Join(in.Check(ctx, claim("verify")), statement(query)(ctx, tx), in.Verify(ctx))
			})
			if !errors.Is(err, want) {
				t.Errorf("Verify after %s = %v, want %v", query, err, want)
			}
		}
	})
}
