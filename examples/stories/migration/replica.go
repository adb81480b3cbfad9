package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/examples/stories/internal/story"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

type replica struct {
	story  *story.Story
	number int
	locks  *fencelock.Client
	db     *sql.DB
	guard  *sqlguard.Guard
}

// boot prepares a replica before it serves. It may be called anew after an error.
func (r *replica) boot(ctx context.Context, meet func()) error {
	if r.story.Unsafe {
		version, err := r.version(ctx, fencing.Claim{})
		meet()
		if err != nil {
			return err
		}
		return r.migrate(ctx, version, fencing.Claim{})
	}
	meet()
	return r.locks.Do(ctx, schema, func(ctx context.Context, lease *fencelock.Lease) error {
		version, err := r.version(ctx, lease.Claim(schema))
		if err != nil {
			return err
		}
		return r.migrate(ctx, version, lease.Claim(schema))
	})
}

// version reads the version of the schema, after the check: from then on nobody who had the lock before changes it.
func (r *replica) version(ctx context.Context, claim fencing.Claim) (n int, err error) {
	err = r.do(ctx, claim, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, `SELECT version FROM schema_version`).Scan(&n)
	})
	return n, err
}

// migrate does the steps from version on.
func (r *replica) migrate(ctx context.Context, version int, claim fencing.Claim) error {
	from := version
	for ; version < len(steps); version++ {
		err := r.do(ctx, claim, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, steps[version]); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, `UPDATE schema_version SET version = ?`, version+1)
			return err
		})
		if err != nil {
			return fmt.Errorf("replica %d: step %d: %w", r.number, version+1, err)
		}
	}
	r.story.Tell("replica %d found version %d, left version %d, and serves", r.number, from, version)
	return nil
}

// do runs f in a transaction, unless a later holder of the lock than the one who makes the claim has been here.
func (r *replica) do(ctx context.Context, claim fencing.Claim, f func(*sql.Tx) error) error {
	return story.Guarded(ctx, r.db, r.guard, claim, f)
}
