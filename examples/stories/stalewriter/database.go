package main

import (
	"context"
	"database/sql"
	"errors"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"

	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// open opens the account, with a balance of 30.
func open(ctx context.Context, s *story.Story, postgres string) (b *bank, err error) {
	b = &bank{}
	if postgres == "" {
		if b.db, err = s.Database(ctx); err == nil {
			b.guard, err = story.Guard(ctx, b.db, sqlguard.SQLite)
		}
	} else {
		b.db, b.guard, err = openPostgres(ctx, s, postgres)
	}
	if err != nil {
		return nil, err
	}
	_, err = b.db.ExecContext(ctx,
		`CREATE TABLE story_accounts (balance integer); INSERT INTO story_accounts VALUES (30)`)
	return b, err
}

// openPostgres opens a PostgreSQL database without the tables of an earlier story, and drops this story's tables at its
// end: each story may have its own lock service, with new tokens. In production a guard's table is never
// dropped.
func openPostgres(ctx context.Context, s *story.Story, url string) (*sql.DB, *sqlguard.Guard, error) {
	db, err := sql.Open("pgx", url)
	if err != nil {
		return nil, nil, err
	}
	drop := func(ctx context.Context) error {
		_, err := db.ExecContext(ctx, `DROP TABLE IF EXISTS story_accounts, story_tokens`)
		return err
	}
	s.AtEnd(func(ctx context.Context) error { return errors.Join(drop(ctx), db.Close()) })
	if err := drop(ctx); err != nil {
		return nil, nil, err
	}
	guard, err := story.Guard(ctx, db, sqlguard.PostgreSQL)
	return db, guard, err
}
