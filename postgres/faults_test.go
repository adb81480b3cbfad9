package postgres_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/postgres"
)

// A waiter whose client's listening connection is ended acquires all the same, and losses are pushed again afterwards.
func TestListenerIsEnded(t *testing.T) {
	server := migrated(t)
	a, b := postgres.New(newPool(t, server.URL()), nil), postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, a)
	defer closeDriver(t, b)
	admin := connect(t, server.URL())
	listeners := func() (n int) {
		t.Helper()
		row := admin.QueryRow(soon(t, 20*time.Second), `select count(*) from pg_stat_activity where query like 'listen %'`)
		if err := row.Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	listening := func() {
		t.Helper()
		for ctx := soon(t, 30*time.Second); listeners() == 0; time.Sleep(10 * time.Millisecond) {
			if ctx.Err() != nil {
				t.Fatal("nobody listens")
			}
		}
	}
	g := take(t, a, "x")
	lost := make(chan backend.Reason, 4)
	got := make(chan backend.Grant, 1)
	go func() {
		r := request("x", time.Minute)
		r.Wait = true
		r.Lost = func(why backend.Reason) { lost <- why }
		next, err := b.Acquire(soon(t, time.Minute), r)
		if err != nil {
			t.Errorf("the waiter: %v", err)
		}
		got <- next
	}()
	listening()
	execute(t, server, `select pg_terminate_backend(pid) from pg_stat_activity where query like 'listen %'`)
	if err := a.Release(soon(t, 20*time.Second), g); err != nil {
		t.Fatal(err)
	}
	if next := <-got; next.Token <= g.Token {
		t.Errorf("the waiter has token %v after %v", next.Token, g.Token)
	}
	listening()
	if err := a.ForceRelease(soon(t, 20*time.Second), "x", "a test"); err != nil {
		t.Fatal(err)
	}
	select {
	case why := <-lost:
		if why != backend.ReasonForceReleased {
			t.Errorf("the reason is %q", why)
		}
	case <-time.After(20 * time.Second): // by its renewals it would learn in a third of its minute
		t.Error("the loss was not pushed")
	}
}

// The schema is dropped under a client that holds, and made anew: the client has lost its history, and those that come
// after get greater tokens.
func TestSchemaIsDropped(t *testing.T) {
	server := migrated(t)
	d := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	held := take(t, d, "x")
	execute(t, server, `drop schema fencelock cascade`)
	_, err := d.Acquire(soon(t, 20*time.Second), request("y", time.Minute))
	if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), "migrate") {
		t.Errorf("without the schema: %v, want ErrMisconfigured that names the remedy", err)
	}
	if err := d.Renew(soon(t, 20*time.Second), []backend.Grant{held})[0].Err; !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("renewing without the schema: %v, want ErrMisconfigured", err)
	}
	migrate(t, newPool(t, server.URL()))
	if _, err := d.Acquire(soon(t, 20*time.Second), request("x", time.Minute)); !errors.Is(err, backend.ErrHistoryLost) {
		t.Errorf("the client that lived through it: %v, want ErrHistoryLost", err)
	}
	fresh := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, fresh)
	if next := take(t, fresh, "x"); next.Token <= held.Token {
		t.Errorf("token %v after %v", next.Token, held.Token)
	}
}

// Somebody's transaction keeps the row of a name, another one an old snapshot: calls end with their contexts, other
// names are free, and all goes on afterwards.
func TestForeignTransactions(t *testing.T) {
	server := migrated(t)
	d := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	if err := d.Release(soon(t, 20*time.Second), take(t, d, "x")); err != nil {
		t.Fatal(err)
	}
	old := connect(t, server.URL())
	if _, err := old.Exec(t.Context(), `begin isolation level repeatable read; select * from fencelock.names`); err != nil {
		t.Fatal(err)
	}
	tx, err := connect(t, server.URL()).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `select 1 from fencelock.names where name = 'x' for update`); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	r := request("x", time.Minute)
	if _, err := d.Acquire(ctx, r); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("behind somebody's transaction: %v, want the context's error", err)
	}
	take(t, d, "y")
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.Release(soon(t, 20*time.Second), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("giving back what the request left: %v", err)
	}
	take(t, d, "x")
}
