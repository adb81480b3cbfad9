package postgres

import "github.com/jackc/pgx/v5/pgxpool"

// IgnoreNotices makes a driver accept a commit whose wait for the standbys was cancelled.
func IgnoreNotices(d *Driver, pool *pgxpool.Pool) { d.service.pool = pool }
