package postgres

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend/kit"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// channel is where this client listens. It has one of its own: a channel for each name would wake everybody who waits.
func (d *Driver) channel() string { return "fencelock_" + d.id }

// wake tells those whose request was granted, or whose hold was taken away, by channel and hold id of each. It is a
// statement of its own, since a notification inside a transaction takes one lock for all databases of the server until
// its commit is on disk; those that come together share one. Whoever waits here is told without the server.
func (d *Driver) wake(pairs []string) {
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i] == d.channel() {
			d.notified(pairs[i+1])
			continue
		}
		d.mu.Lock()
		d.wakes = append(d.wakes, pairs[i], pairs[i+1])
		if !d.waking {
			d.waking = d.gate.Go(d.notifyAll)
		}
		d.mu.Unlock()
	}
}

func (d *Driver) notifyAll(ctx context.Context) {
	for d.notify(ctx) {
	}
}

// notify sends what is to be sent, and is false if that is nothing. What fails is left to the polls of those who wait.
func (d *Driver) notify(ctx context.Context) bool {
	d.mu.Lock()
	pairs := d.wakes
	d.wakes = nil
	if len(pairs) == 0 {
		d.waking = false
		d.mu.Unlock()
		return false
	}
	d.mu.Unlock()
	var channels, payloads []string
	for i := 0; i < len(pairs); i += 2 {
		channels, payloads = append(channels, pairs[i]), append(payloads, pairs[i+1])
	}
	_ = d.query(ctx, func(pgx.Rows) error { return nil },
		`select pg_notify(c, p) from unnest($1::text[], $2::text[]) u(c, p),
		set_config('synchronous_commit', 'off', true)`, channels, payloads)
	return true
}

// notified is what a notification does. It may have got lost, come twice, or mean another client's hold with the same
// id.
func (d *Driver) notified(holdID string) {
	d.mu.Lock()
	waits := len(d.waiters[holdID]) > 0
	for w := range d.waiters[holdID] {
		w.look()
	}
	d.mu.Unlock()
	if !waits {
		d.gate.Go(func(ctx context.Context) { d.checkHolds(ctx, holdID) })
	}
}

// deaf reports whether waiters live on polling alone.
func (d *Driver) deaf() bool { return d.noListen || d.unheard.Load() }

// listen sees to it that a loop listens. The caller holds d.mu.
func (d *Driver) listen() {
	if !d.listens && !d.noListen {
		d.listens = d.gate.Go(d.listenAll)
	}
}

const (
	listenPing     = 5 * time.Second // how long a connection may be silent before it is asked for a sign of life
	listenPatience = 2 * time.Second
)

// listenAll keeps a connection that listens, until Close.
func (d *Driver) listenAll(ctx context.Context) {
	ctx, done := d.gate.Bind(ctx)
	defer done()
	told := false
	for ctx.Err() == nil {
		err := d.listenOnce(ctx)
		d.hears.Store(false)
		d.unheard.Store(true)
		d.described.Store(d.describe(d.facts()))
		if ctx.Err() == nil && !told {
			told = true
			d.log.Warn("fencelock: notifications of PostgreSQL do not arrive; waiters poll", "error", err)
		}
		d.pause(ctx, kit.RetryPause(20*time.Second))
	}
}

// listenOnce listens on a new connection until it fails.
func (d *Driver) listenOnce(ctx context.Context) error {
	config := d.pool.Config().ConnConfig
	if d.listenAt != nil {
		config = d.listenAt.Copy()
	}
	arrived := make(chan struct{}, 1)
	config.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) {
		if n.Payload == "" {
			select {
			case arrived <- struct{}{}:
			default:
			}
			return
		}
		d.notified(n.Payload)
	}
	begin, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	conn, err := pgx.ConnectConfig(begin, config)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if _, err := conn.Exec(begin, "listen "+pgx.Identifier{d.channel()}.Sanitize()); err != nil {
		return err
	}
	// Behind a pooler that hands connections from one transaction to the next nothing arrives, without an error.
	err = d.query(begin, func(pgx.Rows) error { return nil }, `select pg_notify($1::text, '')`, d.channel())
	if err != nil {
		return err
	}
	if err := conn.PgConn().WaitForNotification(begin); err != nil {
		return err
	}
	d.hears.Store(true)
	d.unheard.Store(false)
	d.described.Store(d.describe(d.facts()))
	d.checkHolds(ctx, "") // what came while nobody listened is not repeated
	d.lookAtAll()
	for {
		quiet, cancel := context.WithTimeout(ctx, listenPing)
		err := conn.PgConn().WaitForNotification(quiet)
		silent := quiet.Err() != nil && ctx.Err() == nil
		cancel()
		if err != nil && !silent {
			return err
		}
		if silent {
			alive, cancel := context.WithTimeout(ctx, listenPatience)
			err := conn.Ping(alive)
			cancel()
			if err != nil {
				return err
			}
		}
	}
}
