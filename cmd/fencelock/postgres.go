package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/postgres"
)

const postgresHelp = `Usage: fencelock postgres migrate [options]

Migrates the schema of the PostgreSQL driver to the version of this program, in one transaction. Concurrent migrations
wait for each other. The role needs the right to create the schema, or to create tables in it.

Options:

{options}

Exit codes:

    0  success, or the schema was already up to date
   64  the command line is invalid
   69  the database cannot be reached, or refused the migration
`

func definePostgres(o *options) func([]string) error {
	from := o.backend("the database, postgres://user@host:5432/database")
	schema := o.String("schema", "", "the schema of the tables and functions; the default is fencelock")
	printOnly := o.Bool("print", false, "print the SQL of all migrations instead, for another migration tool")
	return func(args []string) (err error) {
		s := lookSettings{word: "postgres"}
		switch err := s.parse(args, "migrate"); {
		case err != nil:
			return err
		case s.args[0] != "migrate":
			return fmt.Errorf("%q: the only subcommand of postgres is migrate", s.args[0])
		}
		url := ""
		if !*printOnly {
			if url, err = from.required(); err != nil {
				return err
			}
		}
		return s.run(nil, func(ctx context.Context) error {
			return migrate(ctx, url, &postgres.Options{Schema: *schema}, *printOnly)
		})
	}
}

func migrate(ctx context.Context, url string, o *postgres.Options, printOnly bool) error {
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
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "--backend", Value: backend.RedactURL(url), Why: "pgx cannot read it",
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
