// Package lockers has lockers for goose, golang-migrate and gocron, to be copied. It is a separate module, so that
// these libraries stay out of fencelock's go.mod. Each works with any driver; package postgres needs only the migrated
// database.
package lockers

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"

	"github.com/fencelock/fencelock"
)

// Goose lets one process at a time run the migrations of a goose.Provider, and the others wait:
//
//	p, err := goose.NewProvider(goose.DialectPostgres, db, files,
//		goose.WithLocker(lockers.NewGoose(locks, "schema/shop")))
//	_, err = p.Up(ctx)
//
// goose does not look at the lock while it migrates: a lock that was lost meanwhile is the error of Unlock, and so of
// Up.
type Goose struct{ held }

// NewGoose returns a locker for providers. Name is the lock's.
func NewGoose(locks fencelock.Locker, name string) *Goose {
	return &Goose{held{locks: locks, name: name}}
}

// Lock implements lock.Locker: it waits until nobody else migrates, or ctx ends.
func (g *Goose) Lock(ctx context.Context, _ *sql.DB) error { return g.lock(ctx) }

// Unlock implements lock.Locker. If the lock was lost meanwhile, its error wraps fencelock.ErrLost.
func (g *Goose) Unlock(ctx context.Context, _ *sql.DB) error { return g.unlock(ctx) }

// held is a lock that one after the other holds.
type held struct {
	locks fencelock.Locker
	name  string

	mu    sync.Mutex // protects the following field
	lease *fencelock.Lease
}

func (h *held) lock(ctx context.Context) error {
	lease, err := h.locks.Acquire(ctx, h.name)
	if err != nil {
		return fmt.Errorf("lock %q: %w", h.name, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lease = lease
	return nil
}

func (h *held) unlock(ctx context.Context) error {
	h.mu.Lock()
	lease := h.lease
	h.lease = nil
	h.mu.Unlock()
	if lease == nil {
		return errors.New("unlock: it is not locked")
	}
	return lease.Release(ctx)
}

// err is nil while the lock is held.
func (h *held) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lease == nil {
		return errors.New("it is not locked")
	}
	return h.lease.Err()
}
