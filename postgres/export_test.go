package postgres

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
)

// IgnoreNotices makes a driver accept a commit whose wait for the standbys was cancelled.
func IgnoreNotices(d *Driver, pool *pgxpool.Pool) { d.pool = pool }

// MoveUnheard moves a hold in the service to a session with another TTL, as a call does whose answer is lost, and lets
// the driver check holds with an unknown session.
func (d *Driver) MoveUnheard(ctx context.Context, g backend.Grant, ttl time.Duration) error {
	to, err := d.join(ctx, ttl)
	if err != nil {
		return err
	}
	defer to.Leave(1)
	d.mu.Lock()
	from := d.holds[key{g.Name, g.RequestID}].session
	d.mu.Unlock()
	names, ids, tokens := columns([]backend.Grant{g})
	if err := d.write(ctx, d.sql.move, to.id, from.id, names, ids, tokens, d.clockKnown()); err != nil {
		return err
	}
	to.doubted(context.DeadlineExceeded)
	d.checkHolds(ctx, "")
	return d.exec(ctx, d.sql.sweep, to.id, d.known(), false, d.clockKnown())
}
