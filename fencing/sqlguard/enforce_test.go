package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/fencing"
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
	forgetful("after a check of its own")
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
	for name, d := range map[string]sqlguard.Dialect{"postgresql": sqlguard.PostgreSQL, "mysql": sqlguard.MySQL} {
		text, err := sqlguard.Enforce(d, "accounts", map[sqlguard.Dialect]string{
			sqlguard.PostgreSQL: "'accounts/' || row.id", sqlguard.MySQL: "CONCAT('accounts/', row.id)",
		}[d], "")
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
		{sqlguard.SQLite, "a", "row.id", ""},
	} {
		if _, err := sqlguard.Enforce(
			bad.dialect, bad.table, bad.resource, bad.guard,
		); !errors.Is(err, fencing.ErrInvalid) {
			t.Errorf("Enforce(%+v) = %v, want ErrInvalid", bad, err)
		}
	}
}
