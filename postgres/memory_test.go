package postgres_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/pgxguard"
	"github.com/fencelock/fencelock/fencing/sqlguard"
	"github.com/fencelock/fencelock/postgres"
)

// doors returns the ways to show a claim to the guard of a database.
func doors(t testing.TB, pool *pgxpool.Pool) map[string]func(context.Context, fencing.Claim) error {
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { db.Close() })
	all := map[string]func(context.Context, fencing.Claim) error{
		"postgres.Tx": func(ctx context.Context, c fencing.Claim) error {
			return postgres.Tx(ctx, pool, c, func(context.Context, pgx.Tx) error { return nil })
		},
		"fencelock.guard": func(ctx context.Context, c fencing.Claim) error {
			_, err := pool.Exec(ctx, `select fencelock.guard($1, $2, $3)`, c.Resource, int64(c.Token), c.Space)
			return err
		},
	}
	for name, table := range map[string]string{"": "", ", schema named": "fencelock.fencing_tokens"} {
		one, err := sqlguard.New(db, sqlguard.PostgreSQL, &sqlguard.Options{Table: table})
		if err != nil {
			t.Fatal(err)
		}
		two, err := pgxguard.New(pool, &pgxguard.Options{Table: table})
		if err != nil {
			t.Fatal(err)
		}
		all["sqlguard"+name] = func(ctx context.Context, c fencing.Claim) error {
			return one.Tx(ctx, c, func(context.Context, *sql.Tx) error { return nil })
		}
		all["pgxguard"+name] = func(ctx context.Context, c fencing.Claim) error {
			return two.Tx(ctx, c, func(context.Context, pgx.Tx) error { return nil })
		}
		all["pgxguard by hand"+name] = func(ctx context.Context, c fencing.Claim) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				in := two.In(tx)
				return errors.Join(in.Check(ctx, c), in.Verify(ctx))
			})
		}
	}
	return all
}

// stale reports whether err refuses a stale claim.
func stale(err error) bool {
	var pg *pgconn.PgError
	return errors.Is(err, fencing.ErrStale) || errors.As(err, &pg) && pg.Code == "FL409"
}

// second reports whether err is that of a database with two memories of guards.
func second(err error) bool {
	var pg *pgconn.PgError
	return errors.Is(err, fencing.ErrInvalid) && strings.Contains(err.Error(), "second memory") ||
		errors.As(err, &pg) && (pg.Code == "FL413" || pg.Code == "42P07")
}

// database makes a separate database.
func database(t testing.TB, server *containers.PostgresServer, name, options string) *pgxpool.Pool {
	t.Helper()
	execute(t, server, `create database `+name+` `+options)
	return newPool(t, strings.Replace(server.URL(), "/postgres?", "/"+name+"?", 1))
}

// A database has one fencing memory, whichever way a claim is shown, and whichever part was made first.
func TestOneMemory(t *testing.T) {
	t.Parallel()
	server := containers.Postgres(t)
	schema := func(pool *pgxpool.Pool, table string) []string {
		guard, err := pgxguard.New(pool, &pgxguard.Options{Table: table})
		if err != nil {
			t.Fatal(err)
		}
		return guard.Schema()
	}
	printed := func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		for _, each := range schema(pool, "") {
			_, failed := pool.Exec(ctx, each)
			err = errors.Join(err, failed)
			if err != nil {
				break
			}
		}
		return err
	}
	create := func(ctx context.Context, pool *pgxpool.Pool) error {
		guard, err := pgxguard.New(pool, nil)
		if err != nil {
			return err
		}
		return guard.Create(ctx)
	}
	migrate := func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := postgres.Migrate(ctx, pool, nil)
		return err
	}

	t.Run("each-pair", func(t *testing.T) {
		t.Parallel()
		ctx, pool := t.Context(), database(t, server, "pairs", "")
		if err := migrate(ctx, pool); err != nil {
			t.Fatal(err)
		}
		if err := create(ctx, pool); err != nil {
			t.Errorf("Create where Migrate has been: %v", err)
		}
		if err := printed(ctx, pool); !second(err) {
			t.Errorf("the statements of Schema where Migrate has been: %v, want them to fail", err)
		}
		all := doors(t, pool)
		for one, first := range all {
			for two, then := range all {
				claim := fencing.Claim{Resource: one + " and " + two, Token: 34, Space: "here"}
				if err := first(ctx, claim); err != nil {
					t.Fatalf("%s: %v", one, err)
				}
				claim.Token = 33
				if err := then(ctx, claim); !stale(err) {
					t.Errorf("%s has admitted 34, and %s: 33 = %v, want it stale", one, two, err)
				}
			}
		}
	})
	for name, first := range map[string]func(context.Context, *pgxpool.Pool) error{"created": create, "printed": printed} {
		t.Run("migrate-after-"+name, func(t *testing.T) {
			t.Parallel()
			ctx, pool := t.Context(), database(t, server, name, "")
			if err := first(ctx, pool); err != nil {
				t.Fatal(err)
			}
			guard := doors(t, pool)["sqlguard"]
			claim := fencing.Claim{Resource: "r", Token: 34, Space: "here"}
			if err := guard(ctx, claim); err != nil {
				t.Fatal(err)
			}
			if err := migrate(ctx, pool); !errors.Is(err, backend.ErrMisconfigured) || !second(err) {
				t.Errorf("Migrate = %v, want ErrMisconfigured", err)
			}
			if err := guard(ctx, claim); err != nil {
				t.Errorf("after Migrate has refused, the guard: %v", err)
			}
			// As documented in docs/UPGRADE.md.
			for _, each := range []string{`create schema fencelock`, `alter table fencing_tokens set schema fencelock`} {
				if _, err := pool.Exec(ctx, each); err != nil {
					t.Fatal(err)
				}
			}
			if err := migrate(ctx, pool); err != nil {
				t.Fatal(err)
			}
			claim.Token = 33
			if err := guard(ctx, claim); !stale(err) && !errors.Is(err, fencing.ErrTermsLost) {
				t.Errorf("the guard that knew the table where it was: %v, want it refused", err)
			}
			for name, door := range doors(t, pool) {
				if err := door(ctx, claim); !stale(err) {
					t.Errorf("%s: %v, want it stale", name, err)
				}
			}
			if err := guard(ctx, claim); !stale(err) {
				t.Errorf("the guard again: %v, want it stale", err)
			}
		})
	}
	t.Run("trigger", func(t *testing.T) {
		t.Parallel()
		ctx, pool := t.Context(), database(t, server, "triggers", "")
		if err := migrate(ctx, pool); err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(ctx, `create table accounts (id int)`); err != nil {
			t.Fatal(err)
		}
		claim := fencing.Claim{Resource: "accounts/1", Token: 34, Space: "here"}
		for _, table := range []string{"", "fencelock.fencing_tokens"} {
			text, err := sqlguard.Enforce(sqlguard.PostgreSQL, "accounts", "'accounts/' || row.id", table)
			if err != nil {
				t.Fatal(err)
			}
			for _, each := range text {
				if _, err := pool.Exec(ctx, each); err != nil {
					t.Fatal(err)
				}
			}
			err = postgres.Tx(ctx, pool, claim, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `insert into accounts values (1)`)
				return err
			})
			if err != nil {
				t.Errorf("postgres.Tx with the trigger of the guard %q: %v", table, err)
			}
			_, err = pool.Exec(ctx, `insert into accounts values (1)`)
			if err == nil || !strings.Contains(err.Error(), "has shown no claim") {
				t.Errorf("a write without a claim, with the trigger of the guard %q: %v, want it refused", table, err)
			}
		}
	})
	t.Run("require_guard", func(t *testing.T) {
		t.Parallel()
		ctx, pool := t.Context(), database(t, server, "required", "")
		if err := migrate(ctx, pool); err != nil {
			t.Fatal(err)
		}
		db := stdlib.OpenDBFromPool(pool)
		t.Cleanup(func() { db.Close() })
		for _, step := range []struct{ query, hole string }{
			{`create table accounts (id int)`, "it has no trigger"},
			{`create trigger fenced after insert or update or delete on accounts
				for each row execute function fencelock.require_guard('accounts/', 'id')`, "TRUNCATE is not refused"},
			{`create trigger fenced_truncate before truncate on accounts
				for each statement execute function fencelock.require_guard('accounts/', 'id')`, ""},
		} {
			if _, err := pool.Exec(ctx, step.query); err != nil {
				t.Fatal(err)
			}
			all, err := sqlguard.Covered(ctx, db, sqlguard.PostgreSQL, "", "accounts")
			if err != nil || len(all) != 1 || strings.Join(all[0].Holes, "; ") != step.hole {
				t.Errorf("after %q Covered = %+v, %v, want %q", step.query, all, err, step.hole)
			}
		}
	})
	t.Run("two", func(t *testing.T) {
		t.Parallel()
		ctx, pool := t.Context(), database(t, server, "two", "")
		if err := migrate(ctx, pool); err != nil {
			t.Fatal(err)
		}
		all := doors(t, pool)
		claim := fencing.Claim{Resource: "r", Token: 34, Space: "here"}
		for name, door := range all {
			if err := door(ctx, claim); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		// A second memory is made by hand.
		if _, err := pool.Exec(ctx, `create table fencing_tokens (like fencelock.fencing_tokens including all)`); err != nil {
			t.Fatal(err)
		}
		named, err := pgxguard.New(pool, &pgxguard.Options{Table: "public.fencing_tokens"})
		if err != nil {
			t.Fatal(err)
		}
		if err := named.Create(ctx); !second(err) {
			t.Errorf("Create of the second one = %v, want it refused", err)
		}
		for _, all := range []map[string]func(context.Context, fencing.Claim) error{all, doors(t, pool)} {
			for name, door := range all {
				if err := door(ctx, claim); !second(err) {
					t.Errorf("with two tables, %s: %v, want it refused", name, err)
				}
			}
		}
		if err := postgres.Tx(ctx, pool, claim, func(context.Context, pgx.Tx) error { return nil }); !errors.Is(err,
			backend.ErrMisconfigured) {
			t.Errorf("with two tables, postgres.Tx = %v, want ErrMisconfigured", err)
		}
		_, err = postgres.Migrate(ctx, pool, &postgres.Options{Schema: "other"})
		if !errors.Is(err, backend.ErrMisconfigured) {
			t.Errorf("Migrate of another schema = %v, want ErrMisconfigured", err)
		}
		if _, err := pool.Exec(ctx, `drop table public.fencing_tokens`); err != nil {
			t.Fatal(err)
		}
		// Another lock service in the database has its own guard: the error then names the table.
		if _, err := postgres.Migrate(ctx, pool, &postgres.Options{Schema: "other"}); err != nil {
			t.Fatal(err)
		}
		for name, door := range doors(t, pool) {
			named := !strings.HasPrefix(name, "sqlguard") && !strings.HasPrefix(name, "pgxguard") ||
				strings.Contains(name, "schema named")
			if err := door(ctx, claim); named && err != nil || !named && !second(err) {
				t.Errorf("with two lock services, %s: %v, want it refused: %v", name, err, !named)
			}
		}
	})
}

// In a database of another encoding, guards and locks store the same text, whichever client names it.
func TestEncoding(t *testing.T) {
	t.Parallel()
	server := containers.Postgres(t, containers.Args("-c", "fsync=on"))
	ctx, pool := t.Context(), database(t, server, "latin", `encoding 'LATIN1' locale 'C' template template0`)
	if _, err := postgres.Migrate(ctx, pool, nil); err != nil {
		t.Fatal(err)
	}
	url := pool.Config().ConnString()
	utf8 := newPool(t, url+"&client_encoding=UTF8")
	claim := fencing.Claim{Resource: "Straße 7", Token: 34, Space: "here"}
	for name, door := range doors(t, pool) { // pgx does not declare its encoding
		if name == "fencelock.guard" {
			continue
		}
		err := door(ctx, claim)
		if !errors.Is(err, fencing.ErrInvalid) || !strings.Contains(err.Error(), "client_encoding is LATIN1") {
			t.Errorf("%s on a connection in LATIN1: %v, want it refused", name, err)
		}
		if err := door(ctx, fencing.Claim{Resource: "ascii", Token: 34, Space: "here"}); err != nil {
			t.Errorf("%s of an ASCII name on a connection in LATIN1: %v", name, err)
		}
	}
	all := doors(t, utf8)
	for one, first := range all {
		for two, then := range all {
			claim := fencing.Claim{Resource: "Straße 7 " + one + two, Token: 34, Space: "here"}
			if err := first(ctx, claim); err != nil {
				t.Errorf("%s: %v", one, err)
			}
			claim.Token = 33
			if err := then(ctx, claim); !stale(err) {
				t.Errorf("%s has admitted 34, and %s: 33 = %v, want it stale", one, two, err)
			}
		}
	}
	for way, driver := range map[string]func() (*postgres.Driver, error){
		"New":  func() (*postgres.Driver, error) { return postgres.New(pool, nil), nil },
		"Open": func() (*postgres.Driver, error) { return postgres.Open(ctx, url) },
	} {
		d, err := driver()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close(context.WithoutCancel(ctx)) })
		name := fmt.Sprintf("Größe %s", way)
		if _, err := d.Acquire(soon(t, 20*time.Second), request(name, time.Minute)); err != nil {
			t.Errorf("%s: Acquire of %q: %v", way, name, err)
		}
		var known bool
		row := utf8.QueryRow(ctx, `select exists (select from fencelock.held where name = $1)`, name)
		if err := row.Scan(&known); err != nil || !known {
			t.Errorf("%s: SQL does not see the hold of %q (%v)", way, name, err)
		}
		if _, err := d.Acquire(soon(t, 20*time.Second), request("订单", time.Minute)); !errors.Is(err, backend.ErrInvalidName) {
			t.Errorf("%s: Acquire of a name that the database cannot keep: %v, want ErrInvalidName", way, err)
		}
	}
}
