package pgxguard_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/guardtest"
	"github.com/fencelock/fencelock/fencing/pgxguard"
)

const space = "cluster-1"

func TestMain(m *testing.M) {
	guardtest.RunChild(map[string]guardtest.Open{"pgx": open})
	goleak.VerifyTestMain(m)
}

func TestGuard(t *testing.T) {
	server := containers.Postgres(t)
	conn := connect(t, server.URL())
	guard := must(t, &pgxguard.Options{Space: space})
	for range 2 { // the second time it is there
		if err := guard.Create(t.Context(), conn); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := conn.Exec(t.Context(), `CREATE TABLE written (resource text PRIMARY KEY, value text)`); err != nil {
		t.Fatal(err)
	}
	guardtest.Run(t, guardtest.Harness{
		Name: "pgx", Open: open, Address: server.URL(), Space: space,
		Restart: func(t testing.TB) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := server.Restart(ctx); err != nil {
				t.Fatal(err)
			}
		},
	})
	t.Run("spaces", func(t *testing.T) { spaces(t, connect(t, server.URL())) })
}

func connect(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func must(t testing.TB, o *pgxguard.Options) *pgxguard.Guard {
	t.Helper()
	g, err := pgxguard.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// open returns a client with one connection, and another one after a context has ended, which closes it.
func open(_ context.Context, url string) (*guardtest.Client, error) {
	guard, err := pgxguard.New(&pgxguard.Options{Space: space})
	if err != nil {
		return nil, err
	}
	var conn *pgx.Conn
	in := func(ctx context.Context, f func(pgx.Tx) error) (err error) {
		if conn == nil || conn.IsClosed() {
			if conn, err = pgx.Connect(ctx, url); err != nil {
				return err
			}
		}
		return pgx.BeginFunc(ctx, conn, f)
	}
	return &guardtest.Client{
		Check: func(ctx context.Context, c fencing.Claim) error {
			return in(ctx, func(tx pgx.Tx) error { return fencing.Check(ctx, guard.In(tx), c) })
		},
		Write: func(ctx context.Context, c fencing.Claim, value string, between func()) error {
			return in(ctx, func(tx pgx.Tx) error {
				if err := fencing.Check(ctx, guard.In(tx), c); err != nil {
					return err
				}
				between()
				_, err := tx.Exec(ctx, `INSERT INTO written (resource, value) VALUES ($1, $2)
					ON CONFLICT (resource) DO UPDATE SET value = excluded.value`, c.Resource, value)
				return err
			})
		},
		Read: func(ctx context.Context, resource string) (value string, err error) {
			err = in(ctx, func(tx pgx.Tx) error {
				return tx.QueryRow(ctx, `SELECT value FROM written WHERE resource = $1`, resource).Scan(&value)
			})
			if errors.Is(err, pgx.ErrNoRows) {
				return "", nil
			}
			return value, err
		},
		Close: func() error {
			if conn == nil {
				return nil
			}
			return conn.Close(context.Background())
		},
	}, nil
}

func spaces(t *testing.T, conn *pgx.Conn) {
	old, replaced := must(t, &pgxguard.Options{Space: space}), must(t, &pgxguard.Options{Space: "cluster-2"})
	check := func(g *pgxguard.Guard, space string, token fencing.Token) error {
		return pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			return g.In(tx).CheckFrom(t.Context(), space, "spaces", token)
		})
	}
	accept := func(from, to string) (rows int64, err error) {
		err = pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) (err error) {
			rows, err = old.AcceptSpace(t.Context(), tx, from, to)
			return err
		})
		return rows, err
	}
	if err := check(old, space, 40); err != nil {
		t.Fatal(err)
	}
	if err := check(replaced, "cluster-2", 50); !errors.Is(err, fencing.ErrSpace) {
		t.Errorf("a guard of another space than the row's: %v", err)
	}
	if rows, err := accept(space, "cluster-2"); err != nil || rows == 0 {
		t.Fatalf("to accept another space: %d rows, %v", rows, err)
	}
	if err := check(old, space, 60); !errors.Is(err, fencing.ErrSpace) {
		t.Errorf("the old space after the new one was accepted: %v", err)
	}
	if err := check(replaced, "cluster-2", 3); err != nil {
		t.Errorf("the new space's tokens begin anew: %v", err)
	}
	if _, err := accept("cluster-2", "cluster-2"); !errors.Is(err, fencing.ErrInvalid) {
		t.Errorf("to accept the space that is there: %v, want ErrInvalid", err)
	}
}

func TestNewRefuses(t *testing.T) {
	for what, o := range map[string]pgxguard.Options{"table": {Table: "a-b"}, "space": {Space: "a\nb"}} {
		_, err := pgxguard.New(&o)
		var invalid *fencing.InvalidError
		if !errors.As(err, &invalid) || invalid.What != what {
			t.Errorf("New(%+v) = %v, want an error about the %s", o, err, what)
		}
	}
}
