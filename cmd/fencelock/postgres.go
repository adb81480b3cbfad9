package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/postgres"
)

const postgresHelp = `Usage: fencelock postgres migrate [options]

Brings the schema of the PostgreSQL driver to the version of this program, in one transaction. Programs that do so at
the same time wait for each other. The role must be allowed to create a schema, or to create in it.

Options:

  --dsn URL      postgres://user@host:5432/database. Default: $FENCELOCK_DSN
  --schema NAME  where the tables and functions are. Default: fencelock
  --print        print the SQL of all steps instead, for a migration tool of yours

Exit codes:

    0  done, or there was nothing to do
   64  the command line makes no sense
   69  the database cannot be reached, or refused
`

// postgresMain is "fencelock postgres".
func postgresMain(args []string) int {
	s := lookSettings{word: "postgres"}
	f := newFlags("postgres")
	f.StringVar(&s.backend, "dsn", os.Getenv("FENCELOCK_DSN"), "")
	schema := f.String("schema", "", "")
	printOnly := f.Bool("print", false, "")
	err := s.parse(f, args, "migrate")
	switch {
	case err != nil:
	case s.args[0] != "migrate":
		err = fmt.Errorf("%q: the only subcommand of postgres is migrate", s.args[0])
	case s.backend == localServer && !*printOnly:
		err = errors.New("--dsn is missing")
	}
	return s.run(err, postgresHelp, func(ctx context.Context) error {
		return migrate(ctx, s.backend, &postgres.Options{Schema: *schema}, *printOnly)
	})
}

func migrate(ctx context.Context, dsn string, o *postgres.Options, printOnly bool) error {
	steps, err := postgres.Migrations(o)
	if err != nil {
		return err
	}
	if printOnly {
		for _, step := range steps {
			fmt.Printf("-- %s\n%s\n", step.Name, step.SQL)
		}
		return nil
	}
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "--dsn", Value: backend.RedactURL(dsn), Why: "pgx cannot read it",
		}
	}
	defer pool.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*attemptTime)
	defer cancel()
	n, err := postgres.Migrate(ctx, pool, o)
	if err != nil {
		return err
	}
	fmt.Printf("applied %d of %d steps\n", n, len(steps))
	return nil
}
