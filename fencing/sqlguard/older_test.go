package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/sqlguard"
	"github.com/fencelock/fencelock/internal/testtier"
)

// format1 is what version 9d2c49a of this package says to its database, as its fencing/testdata has it.
type format1 struct{ schema, lock, seen, terms, pin, remember string }

var formats1 = map[sqlguard.Dialect]format1{
	sqlguard.PostgreSQL: {
		schema: `CREATE TABLE IF NOT EXISTS fencing_tokens (
	resource text   PRIMARY KEY,            -- '' holds the guard's terms: its epoch, space, and floor (token)
	epoch    bigint NOT NULL DEFAULT 0,
	token    bigint NOT NULL DEFAULT 0 CHECK (token >= 0),
	sequence bigint NOT NULL DEFAULT 0,
	checks   bigint NOT NULL DEFAULT 0,
	space    text   NOT NULL DEFAULT ''
)`,
		lock: `INSERT INTO fencing_tokens AS seen (resource) VALUES ($1)
ON CONFLICT (resource) DO UPDATE SET checks = seen.checks + 1`,
		seen:     `SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = $1`,
		terms:    `SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''`,
		pin:      `INSERT INTO fencing_tokens (resource, space) VALUES ('', $1) ON CONFLICT (resource) DO NOTHING`,
		remember: `UPDATE fencing_tokens SET epoch = $1, token = $2, sequence = $3 WHERE resource = $4`,
	},
	sqlguard.MySQL: {
		schema: `CREATE TABLE IF NOT EXISTS fencing_tokens (
	resource VARBINARY(512)   NOT NULL PRIMARY KEY, -- '' holds the guard's terms: its epoch, space, and floor (token)
	epoch    BIGINT UNSIGNED NOT NULL DEFAULT 0,
	token    BIGINT UNSIGNED NOT NULL DEFAULT 0,
	sequence BIGINT UNSIGNED NOT NULL DEFAULT 0,
	checks   BIGINT UNSIGNED NOT NULL DEFAULT 0,
	space    VARBINARY(255)   NOT NULL DEFAULT ''
) ENGINE=InnoDB`,
		lock:     `INSERT INTO fencing_tokens (resource) VALUES (?) ON DUPLICATE KEY UPDATE resource = resource`,
		seen:     `SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = ? FOR UPDATE`,
		terms:    `SELECT epoch, space, token FROM fencing_tokens WHERE resource = '' LOCK IN SHARE MODE`,
		pin:      `INSERT INTO fencing_tokens (resource, space) VALUES ('', ?) ON DUPLICATE KEY UPDATE resource = resource`,
		remember: `UPDATE fencing_tokens SET epoch = ?, token = ?, sequence = ?, checks = checks + 1 WHERE resource = ?`,
	},
	sqlguard.SQLite: {
		schema: `CREATE TABLE IF NOT EXISTS fencing_tokens (
	resource TEXT    NOT NULL PRIMARY KEY,  -- '' holds the guard's terms: its epoch, space, and floor (token)
	epoch    INTEGER NOT NULL DEFAULT 0,
	token    INTEGER NOT NULL DEFAULT 0 CHECK (token >= 0),
	sequence INTEGER NOT NULL DEFAULT 0,
	checks   INTEGER NOT NULL DEFAULT 0,
	space    TEXT    NOT NULL DEFAULT ''
)`,
		lock: `INSERT INTO fencing_tokens (resource) VALUES (?)
ON CONFLICT (resource) DO UPDATE SET checks = checks + 1`,
		seen:     `SELECT epoch, token, sequence, checks FROM fencing_tokens WHERE resource = ?`,
		terms:    `SELECT epoch, space, token FROM fencing_tokens WHERE resource = ''`,
		pin:      `INSERT INTO fencing_tokens (resource, space) VALUES ('', ?) ON CONFLICT (resource) DO NOTHING`,
		remember: `UPDATE fencing_tokens SET epoch = ?, token = ?, sequence = ? WHERE resource = ?`,
	},
}

// admit is the check of version 9d2c49a for one claim without a sequence, up to the rule for its terms.
func (f format1) admit(ctx context.Context, tx *sql.Tx, table string, c fencing.Claim) error {
	in := func(query string) string { return strings.ReplaceAll(query, "fencing_tokens", table) }
	if _, err := tx.ExecContext(ctx, in(f.lock), c.Resource); err != nil {
		return err
	}
	var epoch, token, sequence, checks, termsEpoch, floor int64
	var space string
	if err := tx.QueryRowContext(ctx, in(f.seen), c.Resource).Scan(&epoch, &token, &sequence, &checks); err != nil {
		return err
	}
	err := tx.QueryRowContext(ctx, in(f.terms)).Scan(&termsEpoch, &space, &floor)
	if errors.Is(err, sql.ErrNoRows) && token == 0 {
		if _, err := tx.ExecContext(ctx, in(f.pin), c.Space); err != nil {
			return err
		}
		err = tx.QueryRowContext(ctx, in(f.terms)).Scan(&termsEpoch, &space, &floor)
	}
	switch {
	case err != nil:
		return err
	case epoch > termsEpoch || space != "" && space != c.Space:
		return errors.New("refused by the terms")
	case epoch < termsEpoch:
		token = 0
	}
	if int64(c.Token) < max(token, floor) {
		return errors.New("stale")
	}
	_, err = tx.ExecContext(ctx, in(f.remember), termsEpoch, int64(c.Token), 0, c.Resource)
	return err
}

func TestOlderWriters(t *testing.T) {
	for name, d := range map[string]database{"sqlite": sqLite, "postgres": postgres, "mariadb": mariaDB} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var dsn string
			switch name {
			case "postgres":
				dsn = containers.Postgres(t).URL()
			case "mariadb":
				dsn = containers.MariaDB(t).DSN()
			default:
				dsn = "file:" + filepath.Join(t.TempDir(), "older.db") +
					"?_txlock=immediate&_pragma=busy_timeout(30000)&_pragma=synchronous(off)"
			}
			db := d.connect(t, dsn)
			if _, err := db.ExecContext(
				t.Context(), `CREATE TABLE written (resource varchar(500) PRIMARY KEY, value varchar(100))`,
			); err != nil {
				t.Fatal(err)
			}
			long := 2 * time.Second
			if testtier.Wanted() {
				long = time.Minute
			}
			guardtest.RunOlder(t, space, long, func(t testing.TB, round int) *guardtest.Older {
				return d.older(t, db, fmt.Sprintf("tokens_%d", round))
			})
			d.lostBefore(t, db)
			if d.dialect == sqlguard.MySQL {
				d.interrupted(t, db)
			}
		})
	}
}

// lostBefore migrates a table that has lost its terms, which stay lost, and an unused table.
func (d database) lostBefore(t *testing.T, db *sql.DB) {
	ctx, o := t.Context(), d.older(t, db, "lost_before")
	if err := o.Old(ctx, fencing.Claim{Resource: "older", Token: 5, Space: space}, "5"); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, `DELETE FROM lost_before WHERE resource = ''`); err != nil {
		t.Fatal(err)
	}
	err := o.Keeper.Migrate(ctx)
	if failed := o.New(ctx, fencing.Claim{Resource: "new", Token: 5}, "5"); err != nil ||
		!errors.Is(failed, fencing.ErrTermsLost) {
		t.Errorf("after the migration, %v, of a table without terms: %v, want ErrTermsLost", err, failed)
	}
	if err := o.Keeper.Accept(ctx, space, 6); err != nil {
		t.Errorf("accept after the migration of a table without terms: %v", err)
	}
	o = d.older(t, db, "never_used")
	if err := errors.Join(
		o.Keeper.Migrate(ctx), o.New(ctx, fencing.Claim{Resource: "older", Token: 5, Space: space}, "5"),
	); err != nil {
		t.Errorf("after the migration of an empty table: %v", err)
	}
}

// interrupted migrates a table after an earlier migration has ended at each of its statements that commit.
func (d database) interrupted(t *testing.T, db *sql.DB) {
	ctx := t.Context()
	claim := fencing.Claim{Resource: "older", Token: 5, Space: space}
	add := `ALTER TABLE %s ADD COLUMN state VARBINARY(512) NOT NULL DEFAULT ''`
	const id = "5a2f19fbb6b44c5f8f7b1d3c9a0e6f21"
	for i, done := range [][]string{{add}, {
		add, `UPDATE %s SET state = CONCAT(epoch, ' 0 ', token, ' - ', sequence) WHERE resource <> ''`,
		`UPDATE %s SET state = '2 ` + id + ` 0 0 =` + space + `', epoch = 18446744073709551615,
			token = 18446744073709551615 WHERE resource = ''`,
	}} {
		table := fmt.Sprintf("interrupted_%d", i)
		o := d.older(t, db, table)
		if err := o.Old(ctx, claim, "5"); err != nil {
			t.Fatal(err)
		}
		for _, query := range done {
			if _, err := db.ExecContext(ctx, fmt.Sprintf(query, table)); err != nil {
				t.Fatal(err)
			}
		}
		later := claim
		later.Token = 6
		if before, after := o.New(ctx, later, "6"), o.Old(ctx, later, "6"); (before == nil) == (after == nil) {
			t.Errorf("after %d statements of a migration: the guard answers %v, the earlier version %v, want one of them to admit",
				len(done), before, after)
		}
		later.Token = 7
		if err := errors.Join(o.Keeper.Migrate(ctx), o.New(ctx, later, "7")); err != nil {
			t.Errorf("after the migration went on: %v", err)
		}
		if err := o.New(ctx, claim, "5"); !errors.Is(err, fencing.ErrStale) {
			t.Errorf("after the migration went on a stale token is %v, want ErrStale", err)
		}
		if rows, err := db.QueryContext(ctx, `SELECT epoch FROM `+table); err == nil {
			rows.Close()
			t.Errorf("after the migration went on the columns of before are there")
		}
	}
}

func (d database) older(t testing.TB, db *sql.DB, table string) *guardtest.Older {
	f := formats1[d.dialect]
	for _, query := range []string{strings.ReplaceAll(f.schema, "fencing_tokens", table), `DELETE FROM written`} {
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	guard := must(t, db, d.dialect, &sqlguard.Options{Table: table})
	return &guardtest.Older{
		Keeper: guard,
		Keep: func(ctx context.Context, terms fencing.Terms, seen fencing.Seen) error {
			query := fmt.Sprintf(`INSERT INTO %s (resource, epoch, token, sequence, space)
				VALUES ('', %d, %d, 0, '%s'), ('older', %d, %d, %d, '')`, table,
				terms.Epoch, uint64(terms.Floor), terms.Space, seen.Epoch, uint64(seen.Token), seen.Sequence)
			_, err := db.ExecContext(ctx, query)
			return err
		},
		Old: func(ctx context.Context, c fencing.Claim, value string) error {
			tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: map[bool]sql.IsolationLevel{
				true: sql.LevelDefault, false: sql.LevelReadCommitted,
			}[d.dialect == sqlguard.SQLite]})
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if err := f.admit(ctx, tx, table, c); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, d.value, c.Resource, value); err != nil {
				return err
			}
			return tx.Commit()
		},
		New: func(ctx context.Context, c fencing.Claim, value string) error {
			fresh := must(t, db, d.dialect, &sqlguard.Options{Table: table})
			return fresh.Tx(ctx, c, func(ctx context.Context, tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, d.value, c.Resource, value)
				return err
			})
		},
		Read: func(ctx context.Context) (value string, err error) {
			return value, db.QueryRowContext(ctx, d.reading(), "older").Scan(&value)
		},
	}
}
