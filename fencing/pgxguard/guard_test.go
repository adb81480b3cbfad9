package pgxguard_test

import (
	"context"
	"errors"
	"testing"

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
	server := containers.Postgres(t, containers.Args("-c", "max_prepared_transactions=8")) // one is inside a section
	conn := connect(t, server.URL())
	guard := must(t, conn, nil)
	for range 2 { // the second time it is there
		if err := guard.Create(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := conn.Exec(t.Context(), `CREATE TABLE written (resource text PRIMARY KEY, value text)`); err != nil {
		t.Fatal(err)
	}
	guardtest.Run(t, guardtest.Harness{
		Name: "pgx", Open: open, Address: server.URL(), Space: space, Ordered: true,
		Restart: containers.Within(server.Restart),
	})
	t.Run("by-hand", func(t *testing.T) { byHand(t, connect(t, server.URL())) })
	t.Run("balance", func(t *testing.T) { balance(t, server.URL()) })
	t.Run("section", func(t *testing.T) { sections(t, server.URL()) })
	t.Run("cancelled-commit", func(t *testing.T) { cancelledCommit(t, server.URL()) })
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

func must(t testing.TB, db pgxguard.DB, o *pgxguard.Options) *pgxguard.Guard {
	t.Helper()
	g, err := pgxguard.New(db, o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// dialer connects when a transaction begins, and anew after a context has ended, which closes a connection.
type dialer struct {
	url  string
	conn *pgx.Conn
}

func (d *dialer) BeginTx(ctx context.Context, o pgx.TxOptions) (_ pgx.Tx, err error) {
	if d.conn == nil || d.conn.IsClosed() {
		if d.conn, err = pgx.Connect(ctx, d.url); err != nil {
			return nil, err
		}
	}
	return d.conn.BeginTx(ctx, o)
}

// open returns a client with one connection.
func open(_ context.Context, url string) (*guardtest.Client, error) {
	db := &dialer{url: url}
	guard, err := pgxguard.New(db, nil)
	if err != nil {
		return nil, err
	}
	read := func(ctx context.Context, tx pgx.Tx, resource string) (value string, err error) {
		err = tx.QueryRow(ctx, `SELECT value FROM written WHERE resource = $1`, resource).Scan(&value)
		if errors.Is(err, pgx.ErrNoRows) {
			return "", nil
		}
		return value, err
	}
	write := func(ctx context.Context, tx pgx.Tx, resource, value string) error {
		_, err := tx.Exec(ctx, `INSERT INTO written (resource, value) VALUES ($1, $2)
			ON CONFLICT (resource) DO UPDATE SET value = excluded.value`, resource, value)
		return err
	}
	// by drives a transaction by hand.
	by := func(ctx context.Context, f func(pgx.Tx) error) error {
		tx, err := db.BeginTx(ctx, pgx.TxOptions{})
		if err != nil {
			return err
		}
		defer tx.Rollback(ctx)
		if err := f(tx); err != nil {
			return err
		}
		return tx.Commit(ctx)
	}
	ends := map[guardtest.End]guardtest.Ended{}
	for end, query := range map[guardtest.End]string{
		guardtest.Interrupt:      `SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(30)`,
		guardtest.LostConnection: `SELECT pg_terminate_backend(pg_backend_pid())`,
		guardtest.ManualCommit:   `COMMIT`,
	} {
		ends[end] = func(ctx context.Context, claims fencing.Claims, resource string, ended func(), f guardtest.Change) error {
			return guard.Tx(ctx, claims, func(ctx context.Context, tx pgx.Tx) error {
				old, err := read(ctx, tx, resource)
				if err != nil {
					return err
				}
				tx.Exec(ctx, query)
				ended()
				text, err := f(ctx, old)
				write(ctx, tx, resource, text)
				return err
			})
		}
	}
	return &guardtest.Client{
		Keeper: guard,
		Ends:   ends,
		SetTerms: func(ctx context.Context, text string) error {
			return by(ctx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `UPDATE fencing_tokens SET state = $1 WHERE resource = ''`, text)
				if text == "" {
					_, err = tx.Exec(ctx, `DELETE FROM fencing_tokens WHERE resource = ''`)
				}
				return err
			})
		},
		Wipe: func(ctx context.Context) error {
			return by(ctx, func(tx pgx.Tx) error { _, err := tx.Exec(ctx, `DROP TABLE fencing_tokens`); return err })
		},
		Pinned: func(ctx context.Context, id fencing.Nonce, c fencing.Claim) error {
			pinned, err := pgxguard.New(db, &pgxguard.Options{ID: id})
			if err != nil {
				return err
			}
			return pinned.Check(ctx, c)
		},
		Update: func(ctx context.Context, claims fencing.Claims, resource string, f guardtest.Change) error {
			return guard.Tx(ctx, claims, func(ctx context.Context, tx pgx.Tx) error {
				old, err := read(ctx, tx, resource)
				if err != nil {
					return err
				}
				text, err := f(ctx, old)
				if err != nil {
					return err
				}
				return write(ctx, tx, resource, text)
			})
		},
		Hand: func(ctx context.Context, c fencing.Claim, h guardtest.Hand) error {
			return by(ctx, func(tx pgx.Tx) error {
				if _, err := read(ctx, tx, "something else"); err != nil {
					return err
				}
				h.Early()
				in := guard.In(tx)
				if err := in.Check(ctx, c); err != nil && !h.Careless {
					return err
				}
				old, err := read(ctx, tx, c.Resource)
				if err != nil && !h.Careless {
					return err
				}
				if err := write(ctx, tx, c.Resource, h.Change(old)); err != nil && !h.Careless {
					return err
				}
				if err := in.Verify(ctx); err != nil && !h.Careless {
					return err
				}
				return nil
			})
		},
		Savepoint: func(ctx context.Context, c fencing.Claim, rival func(), value string) error {
			return by(ctx, func(tx pgx.Tx) error {
				inner, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				if err := guard.In(inner).Check(ctx, c); err != nil {
					return err
				}
				if err := inner.Rollback(ctx); err != nil {
					return err
				}
				rival()
				return write(ctx, tx, c.Resource, value)
			})
		},
		Check: func(ctx context.Context, c fencing.Claim) error { return guard.Check(ctx, c) },
		Write: func(ctx context.Context, c fencing.Claim, value string, between func()) error {
			return guard.Tx(ctx, c, func(ctx context.Context, tx pgx.Tx) error {
				between()
				return write(ctx, tx, c.Resource, value)
			})
		},
		Read: func(ctx context.Context, resource string) (value string, err error) {
			tx, err := db.BeginTx(ctx, pgx.TxOptions{})
			if err != nil {
				return "", err
			}
			defer tx.Rollback(ctx)
			return read(ctx, tx, resource)
		},
		Close: func() error {
			if db.conn == nil {
				return nil
			}
			return db.conn.Close(context.Background())
		},
	}, nil
}

// A check in the caller's transaction: what is refused rolls it back, and in a savepoint it is refused.
func byHand(t *testing.T, conn *pgx.Conn) {
	ctx, guard := t.Context(), must(t, conn, nil)
	claim := func(token fencing.Token) fencing.Claim {
		return fencing.Claim{Resource: "by-hand", Token: token, Space: space}
	}
	if err := guard.Check(ctx, claim(34)); err != nil {
		t.Fatal(err)
	}
	tx, err := conn.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := guard.In(tx).Check(ctx, claim(33)); !errors.Is(err, fencing.ErrStale) {
		t.Errorf("a stale token: %v", err)
	}
	if _, err := tx.Exec(ctx, `SELECT 1`); err == nil {
		t.Error("after a refusal the transaction goes on")
	}
	if err := tx.Commit(ctx); err == nil {
		t.Error("after a refusal the transaction commits")
	}
	if tx, err = conn.Begin(ctx); err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(ctx)
	inner, err := tx.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := guard.In(inner).Check(ctx, claim(35)); !errors.Is(err, fencing.ErrNested) {
		t.Errorf("a check in a savepoint: %v, want ErrNested", err)
	}
	if err := guard.In(tx).Check(ctx, claim(35)); err != nil {
		t.Errorf("a check outside of it: %v", err)
	}
}

func TestNewRefuses(t *testing.T) {
	var invalid *fencing.InvalidError
	if _, err := pgxguard.New(new(pgx.Conn), &pgxguard.Options{Table: "a-b"}); !errors.As(err, &invalid) ||
		invalid.What != "table" {
		t.Errorf("New with a bad table = %v", err)
	}
	if _, err := pgxguard.New(nil, nil); !errors.As(err, &invalid) || invalid.What != "database" {
		t.Errorf("New without a database = %v", err)
	}
}
