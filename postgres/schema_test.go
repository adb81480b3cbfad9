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

// A step of a later version is applied under a holder. If it permits programs of this version, running and new
// programs keep working. If not, acquires are refused with both versions, and the hold stays until it is released.
func TestSchemaOfALaterVersion(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	held := take(t, d, "x")
	steps, err := postgres.Migrations(nil)
	if err != nil {
		t.Fatal(err)
	}
	mine := len(steps)
	for _, step := range steps {
		if step.LeastProgram < 1 || step.LeastProgram > step.Version {
			t.Errorf("%s is for programs that know version %d", step.Name, step.LeastProgram)
		}
	}
	plant := func(version, least int) {
		execute(t, server, `insert into fencelock.migrations (version, least_program) values ($1, $2)`, version, least)
	}
	fresh := func() error {
		d := postgres.New(newPool(t, server.URL()), nil)
		defer closeDriver(t, d)
		return d.Ping(soon(t, time.Minute))
	}
	plant(mine+1, mine)
	plant(mine+2, mine-1)
	if err := d.Ping(soon(t, time.Minute)); err != nil {
		t.Errorf("a program that the later steps allow: %v", err)
	}
	if err := fresh(); err != nil {
		t.Errorf("a new client that the later steps allow: %v", err)
	}
	take(t, d, "y")
	if n, err := postgres.Migrate(t.Context(), newPool(t, server.URL()), nil); n != 0 || err != nil {
		t.Errorf("Migrate where the later steps allow this program: %d, %v", n, err)
	}
	plant(mine+3, mine+2)
	_, migrating := postgres.Migrate(t.Context(), newPool(t, server.URL()), nil)
	for what, err := range map[string]error{
		"a client in use": d.Ping(soon(t, time.Minute)), "a new client": fresh(), "Migrate": migrating,
	} {
		if !errors.Is(err, backend.ErrMisconfigured) ||
			!strings.Contains(err.Error(), "this program is older than the schema") ||
			!strings.Contains(err.Error(), fmt.Sprintf("knows version %d,", mine)) ||
			!strings.Contains(err.Error(), fmt.Sprintf("version %d of the schema", mine+3)) {
			t.Errorf("%s: %v, want ErrMisconfigured with versions %d and %d", what, err, mine, mine+3)
		}
	}
	if _, err := d.Acquire(soon(t, time.Minute), request("z", time.Minute)); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("acquire: %v, want ErrMisconfigured", err)
	}
	if err := renewed(t, d, held); err != nil {
		t.Errorf("the hold of before: %v", err)
	}
	if err := d.Release(soon(t, time.Minute), held); err != nil {
		t.Errorf("the hold of before: %v", err)
	}
}

// A program locks the tables in another order than the steps of the migration: the migration retries.
func TestMigrationMeetsADeadlock(t *testing.T) {
	t.Parallel()
	server := containers.Postgres(t)
	steps, err := postgres.Migrations(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range steps[:2] {
		execute(t, server, step.SQL)
	}
	// The first to check for a deadlock becomes its victim: the migration.
	program := connect(t, server.URL()+"&deadlock_timeout=10min")
	if _, err := program.Exec(t.Context(), `begin; select * from fencelock.sessions`); err != nil {
		t.Fatal(err)
	}
	migrated := make(chan error, 1)
	go func() {
		n, err := postgres.Migrate(soon(t, time.Minute), newPool(t, server.URL()+"&deadlock_timeout=3s"), nil)
		if err == nil && n != len(steps)-2 {
			err = fmt.Errorf("%d steps", n)
		}
		migrated <- err
	}()
	blocked(t, server.URL(), "alter table")
	if _, err := program.Exec(soon(t, time.Minute), `select * from fencelock.holds; commit`); err != nil {
		t.Error(err)
	}
	if err := <-migrated; err != nil {
		t.Error(err)
	}
}
