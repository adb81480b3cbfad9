package lockers

import (
	"context"
	"fmt"
	"io"

	"github.com/golang-migrate/migrate/v4/database"

	"github.com/fencelock/fencelock"
)

// Migrate is a database driver of golang-migrate with another lock: one process at a time migrates, and the others
// wait, for Migrate.LockTimeout at most, 15 s by default.
//
//	inner, err := pgx.WithInstance(db, &pgx.Config{})
//	m, err := migrate.NewWithInstance("iofs", files, "postgres", lockers.NewMigrate(ctx, inner, locks, "schema/shop"))
//	err = m.Up()
//
// No further step begins once the lock is lost.
type Migrate struct {
	database.Driver // the database's own; its lock is not taken
	held
	ctx context.Context
}

// NewMigrate wraps a driver. ctx ends the waits for the lock, which golang-migrate has no context for. Name is the
// lock's.
func NewMigrate(ctx context.Context, inner database.Driver, locks fencelock.Locker, name string) *Migrate {
	return &Migrate{Driver: inner, held: held{locks: locks, name: name}, ctx: ctx}
}

// Lock implements database.Driver.
func (m *Migrate) Lock() error { return m.lock(m.ctx) }

// Unlock implements database.Driver. If the lock was lost meanwhile, its error wraps fencelock.ErrLost.
func (m *Migrate) Unlock() error { return m.unlock(context.WithoutCancel(m.ctx)) }

// Run implements database.Driver: it returns an error without the lock.
func (m *Migrate) Run(migration io.Reader) error {
	if err := m.err(); err != nil {
		return fmt.Errorf("no migration without the lock %q: %w", m.name, err)
	}
	return m.Driver.Run(migration)
}
