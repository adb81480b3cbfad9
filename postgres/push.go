// This file notifies clients of grants and losses, and listens for notifications. Each client listens on its own
// channel, over one connection beside the pool; a client that grants a lock or ends a hold notifies the channel of the
// client concerned, with the hold's id. With a channel for each name a release would wake all waiters of the name,
// although only the head of the queue is concerned.
//
// A notification only makes its receiver look. It may get lost, since it is sent after the commit and not with it;
// then the poll of wait.go finds the grant within about a second. It may come twice, or too late; then the look finds
// no change.
//
// Behind a pooler that shares connections, no notification arrives and no error occurs: so the listener first notifies
// itself, and relies on its connection only after that notification arrives. Until then, and whenever the connection
// is lost, the driver declares that its waiters poll, and polls more often while queues move.
//
// The listener is one goroutine for each driver. The first waiter, or the first holder with a callback, starts it, and
// it ends with Close.

package postgres

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/notify"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// channel is this client's own channel: a channel for each name would wake all its waiters.
func (d *Driver) channel() string { return "fencelock_" + d.id }

// wake notifies the owners of granted requests and of ended holds, by channel and hold id of each. It uses a separate
// statement, since a notification inside a transaction takes one lock for all databases of the server until its commit
// is on disk; concurrent ones share one. Waiters and holders in this client are notified without the server. It does
// not block.
func (d *Driver) wake(pairs []string) {
	for i := 0; i+1 < len(pairs); i += 2 {
		// The notification is for this client, and needs no round trip through the database.
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

// notifyAll sends until there are no more notifications. At most one runs: waking is set while it does, and notify
// clears it under d.mu when the list is empty.
func (d *Driver) notifyAll(ctx context.Context) {
	for d.notify(ctx) {
	}
}

// notify sends the pending notifications, and returns false for an empty list. It does not repeat a failed
// notification, since the waiters poll within a second anyway, and a queue of repeated notifications could grow
// without bound while the server is unavailable. The commit is not waited for (synchronous_commit off): it makes no
// change durable.
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
	// The two columns of one statement.
	var channels, payloads []string
	for i := 0; i < len(pairs); i += 2 {
		channels, payloads = append(channels, pairs[i]), append(payloads, pairs[i+1])
	}
	_ = d.query(ctx, func(pgx.Rows) error { return nil },
		`select pg_notify(c, p) from unnest($1::text[], $2::text[]) u(c, p),
		set_config('synchronous_commit', 'off', true)`, channels, payloads)
	return true
}

// notified acts on a notification: the waiters with that hold id look, or, without a waiter, the holds with that id
// are checked. A notification may get lost, come twice, or mean another client's hold with the same id, so it is only
// a hint. It does not block.
func (d *Driver) notified(holdID string) {
	d.mu.Lock()
	// A waiter may leave at any time, hence under the lock.
	waits := len(d.waiters[holdID]) > 0
	for w := range d.waiters[holdID] {
		w.look()
	}
	d.mu.Unlock()
	if !waits {
		d.gate.Go(func(ctx context.Context) { d.checkHolds(ctx, holdID) })
	}
}

// deaf reports whether waiters rely on polling alone.
func (d *Driver) deaf() bool { return d.noListen || d.unheard.Load() }

// listen starts the listening loop, unless it runs. The loop runs until Close. The caller holds d.mu.
func (d *Driver) listen() {
	if !d.listens && !d.noListen {
		d.listens = d.gate.Go(d.listenAll)
	}
}

const (
	// listenPing is the time without notifications after which the listener pings its connection, and listenPatience
	// bounds the wait for the answer: a connection that was cut off would never report an error.
	listenPing     = 5 * time.Second // how long a connection may be silent before it is asked for a sign of life
	listenPatience = 2 * time.Second
)

// listenAll keeps a listening connection until Close, and replaces a lost one after a pause. Describe follows: without
// notifications the driver declares Polling and not CapPushLoss. The warning is logged once for each driver.
func (d *Driver) listenAll(ctx context.Context) {
	ctx, done := d.gate.Bind(ctx)
	defer done()
	// The operator gets one warning, not one per try.
	told := false
	for ctx.Err() == nil {
		err := d.listenOnce(ctx)
		d.hears.Store(false)
		d.unheard.Store(true)
		d.described.Store(d.describe(d.facts()))
		if ctx.Err() == nil && !told {
			told = true
			d.log.Warn("fencelock: PostgreSQL notifications do not arrive; waiters poll instead", "error", err)
		}
		d.pause(ctx, kit.RetryPause(20*time.Second))
	}
}

// listenOnce listens on a new connection until the connection fails, and closes it. Earlier notifications are not
// repeated, so that it first looks at all holds and all waiters. OnNotification runs in this goroutine, within
// WaitForNotification.
func (d *Driver) listenOnce(ctx context.Context) error {
	pool := d.pool.Config()
	config := pool.ConnConfig
	if d.listenAt != nil {
		config = d.listenAt.Copy()
	} else if pool.BeforeConnect != nil { // it may set a short-lived password
		if err := pool.BeforeConnect(ctx, config); err != nil {
			return err
		}
	}
	// An empty payload is the listener's own.
	arrived := notify.New()
	// Called by WaitForNotification and Ping, in this goroutine.
	config.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) {
		if n.Payload == "" {
			arrived.Notify()
			return
		}
		d.notified(n.Payload)
	}
	// begin bounds connecting and the listener's first notification to itself.
	begin, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	conn, err := pgx.ConnectConfig(begin, config)
	if err != nil {
		d.unsettled(err)
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
	// Behind a pooler in transaction mode no notification arrives, without an error. This one is sent over the pool, on
	// the same path as other clients' notifications.
	err = d.query(begin, func(pgx.Rows) error { return nil }, `select pg_notify($1::text, '')`, d.channel())
	if err != nil {
		return err
	}
	if err := conn.PgConn().WaitForNotification(begin); err != nil {
		return err
	}
	// hears is set before the looks below: notifications from here on arrive.
	d.hears.Store(true)
	d.unheard.Store(false)
	d.described.Store(d.describe(d.facts()))
	// Notifications sent before LISTEN are not repeated.
	d.checkHolds(ctx, "")
	d.lookAtAll()
	for {
		// WaitForNotification leaves the connection usable if its context ends before a notification.
		quiet, cancel := context.WithTimeout(ctx, listenPing)
		err := conn.PgConn().WaitForNotification(quiet)
		// A wait without a notification is normal; any other error ends the connection.
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
