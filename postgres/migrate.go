// This file brings a schema to the version that the driver needs, by numbered steps that are files in migrations/. The
// driver never migrates: its role need only use the schema and execute its functions.
//
// A probe compares the version of the schema with the number of steps in the program. An older schema is refused, with
// the command that migrates it. A later schema is used if its steps allow programs of this version: the first line of
// a step has the number of steps that a program must know to continue after it ("-- least program: 6"), and the table
// migrations keeps that number. A step without that line stops all older programs. Separate schemas for each version
// would be two lock services: two programs could hold one name at the same time.

package postgres

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
	"time"

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

	// LeastProgram is the version of the schema that a program must know to continue after this step: Version, unless
	// older programs may continue.
	LeastProgram int
}

// firstLeast is the first step after which the table migrations has the column least_program.
const firstLeast = 6

var leastProgram = regexp.MustCompile(`^-- least program: (\d+)\n`)

// migrations returns the steps in their order, for the default schema. It cannot fail: the files are in the binary.
func migrations() []Migration {
	var all []Migration
	files, _ := fs.Glob(migrationFiles, "migrations/*.sql") // sorted; the pattern is right
	for i, file := range files {
		text, err := migrationFiles.ReadFile(file)
		if err != nil {
			panic(err) // embedded
		}
		m := Migration{Version: i + 1, Name: strings.TrimPrefix(file, "migrations/"), SQL: string(text), LeastProgram: i + 1}
		if found := leastProgram.FindStringSubmatch(m.SQL); found != nil {
			m.LeastProgram, _ = strconv.Atoi(found[1])
		}
		all = append(all, m)
	}
	return all
}

// Migrations returns all steps, for the schema that o names, for programs that apply them with their own tool. Such a
// tool also runs the statement in the last line of each step, which writes the version that the driver reads. A schema
// with a bad name is an error that wraps backend.ErrInvalidOption.
func Migrations(o *Options) ([]Migration, error) {
	schema, err := o.schema()
	if err != nil {
		return nil, callError("migrate", err)
	}
	all := migrations()
	for i := range all {
		// The record is part of the step, so that a tool that applies steps one by one records them too.
		record := fmt.Sprintf("(version) values (%d)", i+1)
		if i+1 >= firstLeast {
			record = fmt.Sprintf("(version, least_program) values (%d, %d)", i+1, all[i].LeastProgram)
		}
		all[i].SQL += "\ninsert into fencelock.migrations " + record + ";\n"
		all[i].SQL = inSchema(all[i].SQL, schema)
	}
	return all, nil
}

// Migrate brings the schema that o names to the version of this package, in one transaction, and returns the number
// of applied steps: 0 if the schema is up to date. Concurrent calls wait for each other, by an advisory lock; after a
// deadlock with programs that use the schema it begins again. The
// role must be allowed to create a schema, or to create in it.
//
// A schema of a later version than this package's stays unchanged: 0 if it allows this package's programs, and
// backend.ErrMisconfigured otherwise. Migrate also restores the row of the table cluster, if the tables were emptied.
// Other errors wrap the server's error, and ErrUnavailable, ErrMisconfigured or ErrUnknown like the errors of calls;
// after an error the schema is unchanged.
func Migrate(ctx context.Context, pool *pgxpool.Pool, o *Options) (int, error) {
	all, err := Migrations(o)
	if err != nil {
		return 0, err
	}
	if pool == nil {
		return 0, callError("migrate", kit.InvalidOption("pool", "nil", "it is nil"))
	}
	schema, _ := o.schema() // Migrations has checked it
	// Programs that use the schema lock its tables in another order than the steps do.
	applied, err := apply(ctx, pool, schema, all)
	for err != nil && rolledBack(err) && again(err) && kit.Sleep(ctx, kit.RetryPause(time.Second)) == nil {
		applied, err = apply(ctx, pool, schema, all)
	}
	if err != nil {
		return 0, callError("migrate", err)
	}
	return applied, nil
}

// apply applies the missing steps, in one transaction, so that a step that fails leaves the schema as it was. It
// returns their number.
func apply(ctx context.Context, pool *pgxpool.Pool, schema string, all []Migration) (applied int, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// The lock is taken before the version is read: a program that waits here then finds the steps of the other.
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
		// An older program must not change it, and does not know its steps.
		if version > len(all) {
			least := 0
			if err := tx.QueryRow(ctx, leastOf(schema), len(all)).Scan(&least); err != nil {
				return err
			}
			return checkVersion(schema, version, least)
		}
		for _, m := range all[version:] {
			// A step is many statements, which only the simple protocol accepts in one message.
			if _, err := tx.Conn().PgConn().Exec(ctx, m.SQL).ReadAll(); err != nil {
				return fmt.Errorf("%s: %w", m.Name, err)
			}
			applied++
		}
		_, err := tx.Exec(ctx, inSchema(`select fencelock.begin_history()`, schema))
		return err
	})
	return applied, err
}

// leastOf is the statement that reads the least version that a program must know, among the steps after $1. It needs a
// schema of a version from firstLeast on.
func leastOf(schema string) string {
	return inSchema(`select coalesce(max(least_program), 0)::int from fencelock.migrations
		where version > $1::int`, schema)
}

// checkVersion returns an error unless this program can use a schema of that version; least is the version that a
// program must know, if the schema is later than this program.
func checkVersion(schema string, version, least int) error {
	known := len(migrations())
	e := &backend.ConfigError{
		Setting: "version of schema " + schema, Value: strconv.Itoa(version), Want: strconv.Itoa(known),
	}
	switch {
	case version < known:
		e.Why = "run `fencelock postgres migrate` or postgres.Migrate with the version of this program"
	case version > known && least > known:
		e.Why = fmt.Sprintf("this program is older than the schema: it knows version %d, and version %d of the schema "+
			"is for programs that know version %d; run a later version of the program", known, version, least)
	default:
		return nil
	}
	return e
}
