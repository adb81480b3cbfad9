package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// A table with the trigger refuses who shows no claim, or one for another row, and takes the rest.
func enforced(t *testing.T, db *sql.DB) {
	ctx, guard := t.Context(), must(t, db, sqlguard.PostgreSQL, nil)
	text, err := sqlguard.Enforce("enforced", "'enforced/' || row.id", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, `CREATE TABLE enforced (id int PRIMARY KEY, value int); INSERT INTO enforced VALUES (1, 0), (2, 0);`+text); err != nil {
		t.Fatal(err)
	}
	in := func(resource, query string) error {
		claim := fencing.Claim{Resource: resource, Token: 5, Space: space}
		return guard.Tx(ctx, claim, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, query)
			return err
		})
	}
	for _, query := range []string{
		`UPDATE enforced SET value = 1 WHERE id = 1`, `DELETE FROM enforced WHERE id = 1`, `INSERT INTO enforced VALUES (3, 0)`,
	} {
		if _, err := db.ExecContext(ctx, query); err == nil || !strings.Contains(err.Error(), "has shown no claim") {
			t.Errorf("%s without a claim: %v", query, err)
		}
	}
	const update = `UPDATE enforced SET value = value + 1 WHERE id = 1`
	if err := in("enforced/2", update); err == nil {
		t.Error("a write with another row's claim was taken")
	}
	for range 2 { // the second time the token is known
		if err := in("enforced/1", update); err != nil {
			t.Errorf("a write with its claim: %v", err)
		}
	}
	if _, err := db.ExecContext(ctx, update); err == nil {
		t.Error("after a guarded write one without a claim was taken")
	}
	for _, bad := range [][3]string{{"", "row.id", ""}, {"a", "id", ""}, {"a", "row.id; DROP", ""}, {"a", "row.id", "a-b"}} {
		if _, err := sqlguard.Enforce(bad[0], bad[1], bad[2]); !errors.Is(err, fencing.ErrInvalid) {
			t.Errorf("Enforce%q = %v, want ErrInvalid", bad, err)
		}
	}
}
