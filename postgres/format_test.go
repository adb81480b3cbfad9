package postgres_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/postgres"
)

// The migration of a schema before format 2 keeps the tokens that SQL and clients have shown.
func TestTokensAreMigrated(t *testing.T) {
	t.Parallel()
	server := containers.Postgres(t)
	steps, err := postgres.Migrations(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range steps[:3] {
		execute(t, server, step.SQL)
	}
	execute(t, server, `select fencelock.guard('accounts/42', 33, 'here')`)
	execute(t, server, `update fencelock.fencing_tokens set sequence = 7 where resource = 'accounts/42'`)
	pool := newPool(t, server.URL())
	tx := func(token fencing.Token, sequence uint64) (called bool, err error) {
		claim := fencing.Claim{Resource: "accounts/42", Token: token, Space: "here", Sequence: sequence}
		err = postgres.Tx(t.Context(), pool, claim, func(context.Context, pgx.Tx) error { called = true; return nil })
		return called, err
	}
	if _, err := tx(34, 0); !errors.Is(err, fencing.ErrGuardVersion) {
		t.Errorf("before the migration: %v, want ErrGuardVersion", err)
	}
	if _, err := postgres.Migrate(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	var pg *pgconn.PgError
	if _, err := pool.Exec(
		t.Context(), `select fencelock.guard('accounts/42', 32, 'here')`,
	); !errors.As(err, &pg) || pg.Code != "FL409" {
		t.Errorf("fencelock.guard with token 32 after 33: %v, want FL409", err)
	}
	if called, err := tx(32, 0); called || !errors.Is(err, fencing.ErrStale) {
		t.Errorf("a section with token 32 after 33: %v, called: %v; want ErrStale", err, called)
	}
	if called, err := tx(33, 7); called || err != nil {
		t.Errorf("write 7 again: %v, called: %v; want it repeated", err, called)
	}
	if called, err := tx(33, 8); !called || err != nil {
		t.Errorf("write 8: %v, called: %v", err, called)
	}
	// The statement of the previous version, for clients that were not upgraded.
	if _, err := pool.Exec(
		t.Context(), `SELECT epoch, token, sequence, checks FROM fencelock.fencing_tokens WHERE resource = 'accounts/42'`,
	); err == nil {
		t.Error("the version before reads the table after the migration")
	}
}
