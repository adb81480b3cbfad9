package postgres_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/postgres"
)

// A schema of a later version is refused with both versions, also by drivers that ran during its migration.
func TestLaterSchemaIsRefused(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	steps, err := postgres.Migrations(nil)
	if err != nil {
		t.Fatal(err)
	}
	want := func(err error) bool {
		return errors.Is(err, backend.ErrMisconfigured) &&
			strings.Contains(err.Error(), fmt.Sprintf(`"%d", must be %d`, len(steps)+1, len(steps)))
	}
	running := ways["Open"](t, server.Addr())
	t.Cleanup(func() { _ = running.Close(soon(t, 20*time.Second)) })
	take(t, running, "held")
	execute(t, server, `do $$ declare f regprocedure; begin
		for f in select oid from pg_proc where pronamespace = 'fencelock'::regnamespace and proname like 'acquire%' loop
			execute format('drop function %s', f);
		end loop;
	end $$`)
	execute(t, server, `insert into fencelock.migrations (version, least_program) values ($1, $1)`, len(steps)+1)
	for _, name := range []string{"free", "held", "free"} {
		if _, err := running.Acquire(soon(t, 20*time.Second), request(name, time.Minute)); !want(err) {
			t.Errorf("a running driver: Acquire %q = %v", name, err)
		}
	}
	late := ways["New"](t, server.Addr())
	if _, err := late.Acquire(soon(t, 20*time.Second), request("free", time.Minute)); !want(err) {
		t.Errorf("a new driver: Acquire = %v", err)
	}
}

// A schema of an earlier version is refused with both versions, although it lacks columns that this driver reads.
func TestEarlierSchemaIsRefused(t *testing.T) {
	t.Parallel()
	steps, err := postgres.Migrations(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, known := range []int{2, len(steps) - 1} { // that of the previous release, and the last one
		server := containers.Postgres(t, containers.Args("-c", "fsync=on"))
		for _, step := range steps[:known] {
			execute(t, server, step.SQL)
		}
		d := ways["New"](t, server.Addr())
		err := d.(backend.Pinger).Ping(soon(t, 20*time.Second))
		if want := fmt.Sprintf(`"%d", must be %d`, known, len(steps)); !errors.Is(err, backend.ErrMisconfigured) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("a schema of version %d: %v, want %s", known, err, want)
		}
	}
}
