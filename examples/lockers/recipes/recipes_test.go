package recipes_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/jmoiron/sqlx"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/examples/lockers/recipes"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// Each recipe writes with its claim, and a stale claim writes nothing. The table takes no write without a claim.
func TestRecipes(t *testing.T) {
	db, err := sql.Open("pgx", containers.Postgres(t).URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	guard, err := sqlguard.New(db, sqlguard.PostgreSQL, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := guard.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	enforce, err := sqlguard.Enforce(sqlguard.PostgreSQL, "accounts", "'accounts/' || row.id", "")
	if err != nil {
		t.Fatal(err)
	}
	setup := []string{
		`CREATE TABLE accounts (id int PRIMARY KEY, balance int)`,
		`INSERT INTO accounts SELECT i, 100 FROM generate_series(1, 9) AS i`,
	}
	for _, query := range append(setup, enforce...) {
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	x := sqlx.NewDb(db, "pgx")
	b := bun.NewDB(db, pgdialect.New())
	g, err := gorm.Open(postgres.New(postgres.Config{Conn: db}), &gorm.Config{PrepareStmt: true})
	if err != nil {
		t.Fatal(err)
	}
	type recipe func(ctx context.Context, claim fencing.Claim, id int) error
	for i, c := range []struct {
		name string
		take recipe
	}{
		{"sqlx", func(ctx context.Context, c fencing.Claim, id int) error {
			return recipes.Sqlx(ctx, guard, x, c, id)
		}},
		{"sqlx-begins", func(ctx context.Context, c fencing.Claim, id int) error {
			return recipes.SqlxTx(ctx, guard, x, c, id)
		}},
		{"gorm", func(ctx context.Context, c fencing.Claim, id int) error {
			return recipes.Gorm(ctx, guard, c, id)
		}},
		{"gorm-begins", func(ctx context.Context, c fencing.Claim, id int) error {
			return recipes.GormTx(ctx, guard, g, c, id)
		}},
		{"bun", func(ctx context.Context, c fencing.Claim, id int) error {
			return recipes.Bun(ctx, guard, b, c, id)
		}},
		{"squirrel", func(ctx context.Context, c fencing.Claim, id int) error {
			return recipes.Squirrel(ctx, guard, c, id)
		}},
		{"ent", func(ctx context.Context, c fencing.Claim, id int) error {
			return recipes.Ent(ctx, guard, c, id)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			id := i + 1
			claim := fencing.Claim{Resource: "accounts/" + string(rune('0'+id)), Token: 34, Space: "here"}
			for range 2 {
				if err := c.take(t.Context(), claim, id); err != nil {
					t.Errorf("with its claim: %v", err)
				}
			}
			claim.Token = 33
			if err := c.take(t.Context(), claim, id); !errors.Is(err, fencing.ErrStale) {
				t.Errorf("with a stale claim: %v, want ErrStale", err)
			}
			claim.Resource = "accounts/other"
			if err := c.take(t.Context(), claim, id); err == nil {
				t.Error("a write with another row's claim was taken, so it was not in the transaction of its check")
			}
			var balance int
			row := db.QueryRowContext(t.Context(), `SELECT balance FROM accounts WHERE id = $1`, id)
			if err := row.Scan(&balance); err != nil || balance != 80 {
				t.Errorf("the balance is %d (%v), want 80", balance, err)
			}
		})
	}
}
