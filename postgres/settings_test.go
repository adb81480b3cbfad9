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

// A setting of the role does not affect the driver's connections. Behind a pooler that refuses the driver's settings,
// the error names the setting with which the functions cannot work.
func TestSettingsOfTheRole(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	for _, sql := range []string{
		`create role app login in role pg_monitor`, `grant usage on schema fencelock to app`,
		`grant all on all tables in schema fencelock to app`,
		`alter role app set default_transaction_isolation = 'repeatable read'`,
		`alter role app set statement_timeout = '300ms'`, `create schema app`,
		`create function app.clock_timestamp() returns timestamptz language sql as $$ select 'infinity'::timestamptz $$`,
		`grant usage on schema app to app`, `alter role app set search_path = 'app', 'pg_catalog'`,
	} {
		execute(t, server, sql)
	}
	as := func(url string) *postgres.Driver {
		return postgres.New(newPool(t, url), nil)
	}
	url := func(addr string) string { return "postgres://app@" + addr + "/postgres?sslmode=disable" }
	a, b := as(url(server.Addr())), as(url(server.Addr()))
	defer closeDriver(t, a)
	defer closeDriver(t, b)
	g := take(t, a, "x")
	tx, err := connect(t, server.URL()).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `select 1 from fencelock.names for update`); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		r := request("x", time.Minute)
		r.Wait = true
		_, err := b.Acquire(soon(t, time.Minute), r)
		ended <- err
	}()
	blocked(t, server.URL(), "acquire")
	select { // longer than the role's statement_timeout
	case err := <-ended:
		t.Fatalf("behind a row that somebody has: %v", err)
	case <-time.After(600 * time.Millisecond):
	}
	if !waits(t, server.URL(), "acquire") {
		t.Error("the role's statement_timeout has ended the statement")
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := a.Release(soon(t, time.Minute), g); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Behind a pooler that drops the driver's settings, the error names an isolation with which calls would fail.
func TestIsolationBehindAPooler(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	addr := pooler(t, server, "transaction")
	for level, want := range map[string]error{
		"repeatable read": backend.ErrMisconfigured, "read committed": nil, "serializable": nil,
	} {
		execute(t, server, `alter role postgres set default_transaction_isolation = '`+level+`'`)
		execute(t, server, `select pg_terminate_backend(pid) from pg_stat_activity
			where pid <> pg_backend_pid() and backend_type = 'client backend'`)
		d := postgres.New(newPool(t, urlOf(addr)), nil)
		err := d.Ping(soon(t, time.Minute))
		for ctx := soon(t, time.Minute); errors.Is(err, backend.ErrUnavailable) && ctx.Err() == nil; {
			err = d.Ping(ctx) // until the pooler has connections again
		}
		if !errors.Is(err, want) || want != nil && !strings.Contains(err.Error(), "default_transaction_isolation") {
			t.Errorf("%s: %v, want %v that names the setting", level, err, want)
		}
		closeDriver(t, d)
	}
}
