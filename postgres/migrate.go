// This file brings a schema to the version that the driver needs, by numbered steps that are files in migrations/. The
// driver never migrates automatically: its role need only use the schema and execute its functions.
//
// A probe compares the version of the schema with the number of steps in the program and refuses calls unless they are
// equal, with the command that helps. A schema for each version, side by side, would be two lock services: two
// programs in it could hold one name at once.

package postgres

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

// Migration is one numbered step of the schema.
type Migration struct {
	Version int    // from 1, without a gap
	Name    string // its file: 0001_locks.sql
	SQL     string
}

// migrations returns the steps in their order, for the default schema. It cannot fail: the files are in the binary.
func migrations() []Migration {
	var all []Migration
	files, _ := fs.Glob(migrationFiles, "migrations/*.sql") // sorted; the pattern is right
	for i, file := range files {
		text, err := migrationFiles.ReadFile(file)
		if err != nil {
			panic(err) // embedded
		}
		all = append(all, Migration{Version: i + 1, Name: strings.TrimPrefix(file, "migrations/"), SQL: string(text)})
	}
	return all
}

// Migrations returns all steps, for the schema that o names, for programs that apply them with their own tool. Such a
// tool also runs, after each step, the statement in the step's last line: the driver reads the version that it
// writes. A schema with a bad name is an error that wraps backend.ErrInvalidOption.
func Migrations(o *Options) ([]Migration, error) {
	schema, err := o.schema()
	if err != nil {
		return nil, callError("migrate", "", err)
	}
	all := migrations()
	for i := range all {
		// In the step itself, so that a tool that applies steps one by one records them too.
		all[i].SQL += fmt.Sprintf("\ninsert into fencelock.migrations (version) values (%d);\n", i+1)
		all[i].SQL = inSchema(all[i].SQL, schema)
	}
	return all, nil
}

// Migrate brings the schema that o names to the version of this package, in one transaction, and returns the number
// of applied steps: 0 if the schema is up to date. Concurrent calls wait for each other, by an advisory lock. The
// role must be allowed to create a schema, or to create in it.
//
// A schema of a later version than this package's is backend.ErrMisconfigured and stays unchanged. Other errors wrap
// the server's error, and ErrUnavailable, ErrMisconfigured or ErrUnknown like the errors of calls; after an error the
// schema is unchanged.
func Migrate(ctx context.Context, pool *pgxpool.Pool, o *Options) (int, error) {
	all, err := Migrations(o)
	if err != nil {
		return 0, err
	}
	if pool == nil {
		return 0, callError("migrate", "", kit.InvalidOption("pool", "nil", "it is nil"))
	}
	schema, _ := o.schema() // Migrations has checked it
	// One transaction for all: a step that fails leaves the schema as it was.
	applied := 0
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// Taken before the version is read: a program that waits here then finds the steps of the other.
		const lock = `select pg_advisory_xact_lock(hashtextextended($1, 0))`
		if _, err := tx.Exec(ctx, lock, "fencelock migrate "+schema); err != nil {
			return err
		}
		// A schema without the table of versions was never migrated.
		version := 0
		var there bool
		row := tx.QueryRow(ctx, `select to_regclass($1) is not null`, schema+".migrations")
		if err := row.Scan(&there); err != nil {
			return err
		}
		if there {
			row = tx.QueryRow(ctx, inSchema(`select coalesce(max(version), 0) from fencelock.migrations`, schema))
			if err := row.Scan(&version); err != nil {
				return err
			}
		}
		// An older program must not touch it, and does not know the changes.
		if version > len(all) {
			return &backend.ConfigError{
				Setting: "version of schema " + schema, Value: strconv.Itoa(version), Want: strconv.Itoa(len(all)),
				Why: "a later version of this package made it",
			}
		}
		for _, m := range all[version:] {
			// A step is many statements, which only the simple protocol takes at once.
			if _, err := tx.Conn().PgConn().Exec(ctx, m.SQL).ReadAll(); err != nil {
				return fmt.Errorf("%s: %w", m.Name, err)
			}
			applied++
		}
		return nil
	})
	if err != nil {
		return 0, callError("migrate", "", err)
	}
	return applied, nil
}
