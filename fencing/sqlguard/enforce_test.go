package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/internal/golden"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// enforced tries a table with the triggers: it refuses who shows no claim, or one for another row, and takes the rest.
func (d database) enforced(t *testing.T, dsn, resource string) {
	ctx, db := t.Context(), d.connect(t, dsn)
	db.SetMaxOpenConns(1) // what a session was allowed before must not help it now
	guard := must(t, db, d.dialect, nil)
	text, err := sqlguard.Enforce(d.dialect, "enforced", resource, "")
	if err != nil {
		t.Fatal(err)
	}
	setup := []string{
		`CREATE TABLE enforced (id int PRIMARY KEY, value int)`, `INSERT INTO enforced VALUES (1, 0), (2, 0)`,
	}
	for _, query := range append(append(setup, text...), text...) { // the second time they are there
		if _, err := db.ExecContext(ctx, query); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	const update = `UPDATE enforced SET value = value + 1 WHERE id = 1`
	claim := func(resource string, token fencing.Token) fencing.Claim {
		return fencing.Claim{Resource: resource, Token: token, Space: space}
	}
	section := func(claims fencing.Claims, queries ...string) error {
		return guard.Tx(ctx, claims, func(ctx context.Context, tx *sql.Tx) error {
			for _, query := range queries {
				if _, err := tx.ExecContext(ctx, query); err != nil {
					return err
				}
			}
			return nil
		})
	}
	refused := func(when string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "has shown no claim") {
			t.Errorf("%s: %v, want it refused", when, err)
		}
	}
	forgetful := func(when string) {
		t.Helper()
		for _, query := range []string{
			update, `DELETE FROM enforced WHERE id = 1`, `INSERT INTO enforced VALUES (3, 0)`,
		} {
			_, err := db.ExecContext(ctx, query)
			refused(when+", "+query, err)
		}
	}
	forgetful("without a claim")
	refused("with another row's claim", section(claim("enforced/2", 5), update))
	refused("one row is moved to where the claim does not reach",
		section(claim("enforced/1", 5), `UPDATE enforced SET id = 9 WHERE id = 1`))
	for range 2 { // the second time the token is known
		if err := section(claim("enforced/1", 5), update, update); err != nil {
			t.Errorf("with its claim: %v", err)
		}
		forgetful("after a guarded write")
	}
	set := fencing.Set{claim("enforced/1", 6), claim("enforced/3", 6)}
	if err := section(
		set, `INSERT INTO enforced VALUES (3, 0)`, update, `DELETE FROM enforced WHERE id = 3`,
	); err != nil {
		t.Errorf("with two claims: %v", err)
	}
	if err := guard.Check(ctx, claim("enforced/1", 7)); err != nil {
		t.Error(err)
	}
	forgetful("after its own check")
	undone := errors.New("undone")
	if err := guard.Tx(
		ctx, claim("enforced/1", 8), func(context.Context, *sql.Tx) error { return undone },
	); !errors.Is(err, undone) {
		t.Error(err)
	}
	forgetful("after a section that was rolled back")
	if err := section(claim("enforced/1", 6), update); !errors.Is(err, fencing.ErrStale) {
		t.Errorf("with a stale claim: %v", err)
	}

	d.late(t, dsn, guard)
	if d.dialect == sqlguard.PostgreSQL {
		refused("truncate", section(claim("enforced/1", 8), `TRUNCATE enforced`))
		d.moved(t, db, guard)
	}

	// A check by hand, and another session that shows a claim afterwards.
	if err := in(t, db, func(tx *sql.Tx) error { return guard.In(tx).Check(ctx, claim("enforced/1", 9)) }); err != nil {
		t.Fatal(err)
	}
	if err := must(t, d.connect(t, dsn), d.dialect, nil).Check(ctx, claim("enforced/1", 10)); err != nil {
		t.Fatal(err)
	}
	forgetful("after another session's check")

	var value int
	if err := db.QueryRowContext(ctx, `SELECT value FROM enforced WHERE id = 1`).Scan(&value); err != nil ||
		value != 5 {
		t.Errorf("the value is %d (%v) after 5 writes that were taken", value, err)
	}
}

func TestGolden(t *testing.T) {
	for name, d := range map[string]sqlguard.Dialect{
		"postgresql": sqlguard.PostgreSQL, "mysql": sqlguard.MySQL, "sqlite": sqlguard.SQLite,
	} {
		resource := "'accounts/' || row.id"
		if d == sqlguard.MySQL {
			resource = "CONCAT('accounts/', row.id)"
		}
		text, err := sqlguard.Enforce(d, "accounts", resource, "")
		if err != nil {
			t.Fatal(err)
		}
		golden.Compare(t, "enforce-"+name+".sql", strings.Join(text, "\n\n")+"\n")
	}
}

func TestEnforceRefuses(t *testing.T) {
	for _, bad := range []struct {
		dialect                sqlguard.Dialect
		table, resource, guard string
	}{
		{sqlguard.PostgreSQL, "", "row.id", ""},
		{sqlguard.PostgreSQL, "a", "id", ""},
		{sqlguard.MySQL, "a", "row.id; DROP", ""},
		{sqlguard.MySQL, "a", "row.id", "a-b"},
		{sqlguard.SQLite, "main.a", "row.id", ""},
		{sqlguard.SQLite, "a", "row.id", "main.fencing_tokens"},
		{0, "a", "row.id", ""},
	} {
		if _, err := sqlguard.Enforce(
			bad.dialect, bad.table, bad.resource, bad.guard,
		); !errors.Is(err, fencing.ErrInvalid) {
			t.Errorf("Enforce(%+v) = %v, want ErrInvalid", bad, err)
		}
	}
}

// moved tries a table with another trigger, which moves a row to a resource without a claim, and a generated column.
func (d database) moved(t *testing.T, db *sql.DB, guard *sqlguard.Guard) {
	ctx := t.Context()
	text, err := sqlguard.Enforce(d.dialect, "moved", "row.name", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, query := range append([]string{
		`CREATE TABLE moved (id int, name text GENERATED ALWAYS AS ('moved/' || id) STORED)`,
		`CREATE FUNCTION move() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.id = 2 THEN NEW.id := 9; END IF; RETURN NEW; END $$`,
		`CREATE TRIGGER zz BEFORE INSERT ON moved FOR EACH ROW EXECUTE FUNCTION move()`,
	}, text...) {
		if _, err := db.ExecContext(ctx, query); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	for id, taken := range map[int]bool{1: true, 2: false} {
		claim := fencing.Claim{Resource: fmt.Sprintf("moved/%d", id), Token: 5, Space: space}
		err := guard.Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `INSERT INTO moved VALUES ($1)`, id)
			return err
		})
		if (err == nil) != taken {
			t.Errorf("the row %d with the claim %s: %v, want it taken: %v", id, claim.Resource, err, taken)
		}
	}
}

// late tries sections after their transactions have ended: they write no more once another holder was there.
func (d database) late(t *testing.T, dsn string, guard *sqlguard.Guard) {
	other := must(t, d.connect(t, dsn), d.dialect, nil)
	for name, end := range d.endings(dsn) {
		if name == guardtest.Deadlock {
			continue // other tests deadlock on the same rows
		}
		claim := func(token fencing.Token) fencing.Claim {
			return fencing.Claim{Resource: "enforced/2", Token: token, Space: space}
		}
		err := guard.Tx(t.Context(), claim(5), func(ctx context.Context, tx *sql.Tx) error {
			end(ctx, tx)
			next := other.Tx(t.Context(), claim(5), func(ctx context.Context, tx *sql.Tx) error {
				return statement(`UPDATE enforced SET value = 1000 WHERE id = 2`)(ctx, tx)
			})
			late := statement(`UPDATE enforced SET value = 10 WHERE id = 2`)(ctx, tx)
			gone := name == guardtest.LostConnection
			if next != nil || late == nil || !gone && !strings.Contains(late.Error(), "has shown no claim") {
				t.Errorf("%s: the next holder: %v; the late write: %v, want it refused", name, next, late)
			}
			return late
		})
		var value int
		failed := d.connect(t, dsn).QueryRowContext(t.Context(), `SELECT value FROM enforced WHERE id = 2`).Scan(&value)
		if failed != nil || value != 1000 || err == nil {
			t.Errorf("%s: the section = %v, and the value is %d (%v), want an error and 1000", name, err, value, failed)
		}
	}
}

// What a foreign key and REPLACE change in SQLite runs the triggers, the latter only as the documentation says.
func sqLiteImplicit(t *testing.T, dsn string) {
	ctx := t.Context()
	for _, recursive := range []bool{false, true} {
		db := sqLite.connect(t, fmt.Sprintf("%s&_pragma=foreign_keys(1)&_pragma=recursive_triggers(%v)", dsn, recursive))
		text, err := sqlguard.Enforce(sqlguard.SQLite, "implicit", "'implicit/' || row.id", "")
		if err != nil {
			t.Fatal(err)
		}
		for _, query := range append([]string{
			`DROP TABLE IF EXISTS implicit`, `DROP TABLE IF EXISTS owners`,
			`CREATE TABLE owners (id int PRIMARY KEY)`, `INSERT INTO owners VALUES (1)`,
			`CREATE TABLE implicit (id int PRIMARY KEY, name text UNIQUE, owner int REFERENCES owners ON DELETE CASCADE)`,
			`INSERT INTO implicit VALUES (1, 'a', 1), (2, 'b', 1)`,
		}, text...) {
			if _, err := db.ExecContext(ctx, query); err != nil {
				t.Fatalf("%s: %v", query, err)
			}
		}
		for _, try := range []struct {
			query string
			taken bool
		}{
			{`DELETE FROM owners`, false},
			{`REPLACE INTO implicit VALUES (1, 'b', 1)`, !recursive}, // it deletes the row 2
		} {
			claim := fencing.Claim{Resource: "implicit/1", Token: 5, Space: space}
			err := must(t, db, sqlguard.SQLite, nil).Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
				return statement(try.query)(ctx, tx)
			})
			if (err == nil) != try.taken {
				t.Errorf("%s, with recursive triggers %v: %v, want it taken: %v", try.query, recursive, err, try.taken)
			}
		}
	}
}
