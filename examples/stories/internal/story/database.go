package story

import (
	"context"
	"database/sql"
	"path/filepath"

	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/fencing/sqlguard"
)

// Database opens the story's SQLite database, story.db in its folder. It is closed when the story ends.
func (s *Story) Database(ctx context.Context) (*sql.DB, error) {
	db, err := sql.Open("sqlite", DSN(s.Dir))
	if err != nil {
		return nil, err
	}
	s.AtEnd(func(context.Context) error { return db.Close() })
	return db, db.PingContext(ctx)
}

// DSN names the SQLite database in a story's folder. Transactions begin with the lock on writing, and wait for each
// other; statements outside of one do, too.
func DSN(dir string) string {
	return "file:" + filepath.ToSlash(filepath.Join(dir, "story.db")) + "?_txlock=immediate&_pragma=busy_timeout(30000)"
}

// Guard returns the guard of a database, and makes its table, story_tokens.
func Guard(ctx context.Context, db *sql.DB, dialect sqlguard.Dialect) (*sqlguard.Guard, error) {
	guard, err := sqlguard.New(db, dialect, &sqlguard.Options{Table: "story_tokens"})
	if err != nil {
		return nil, err
	}
	return guard, guard.Create(ctx)
}

// GuardedDatabase opens the story's database with its guard. In the unsafe story the guard is nil: nobody checks.
func (s *Story) GuardedDatabase(ctx context.Context) (db *sql.DB, guard *sqlguard.Guard, err error) {
	if db, err = s.Database(ctx); err == nil && !s.Unsafe {
		guard, err = Guard(ctx, db, sqlguard.SQLite)
	}
	return db, guard, err
}

// Guarded runs f in a transaction that shows the claims first, or in a bare one if there is no guard.
func Guarded(
	ctx context.Context, db *sql.DB, guard *sqlguard.Guard, claims fencing.Claims, f func(*sql.Tx) error,
) error {
	if guard == nil {
		return inTx(ctx, db, f)
	}
	return guard.Tx(ctx, claims, func(_ context.Context, tx *sql.Tx) error { return f(tx) })
}

func inTx(ctx context.Context, db *sql.DB, f func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // no effect after a commit
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}
