// This file notifies clients of grants and losses, and listens for notifications. Each client listens on its own
// channel, over one connection beside the pool; a client that grants a lock or ends a hold notifies the channel of the
// client concerned, with the hold's id. With a channel for each name a release would wake all waiters of the name,
// although only the head of the queue is concerned.
//
// A notification only makes its receiver ask. It may get lost, since it is sent after the commit and not with it; then
// the check of wait.go finds the grant within about a second.
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
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/notify"
)

// channel is this client's own channel: a channel for each name would wake all its waiters.
func (s *service) channel() string { return "fencelock_" + s.id }

// Listen is engine.Pushes's.
func (s *service) Listen(notify func(engine.Push)) { s.notify = notify }

// wake notifies the owners of granted requests and of ended holds, by channel and hold id of each. Those in this client
// are notified without the server. The others are noted for flush.
func (s *service) wake(pairs []string) {
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i] == s.channel() {
			s.notified(pairs[i+1])
			continue
		}
		s.mu.Lock()
		s.wakes = append(s.wakes, pairs[i], pairs[i+1])
		s.mu.Unlock()
	}
}

// pending reports whether there are notifications for flush.
func (s *service) pending() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.wakes) > 0
}

// flush notifies other clients, unless another exchange does. It uses a separate statement, since a notification inside
// a transaction takes one lock for all databases of the server until its commit is on disk; concurrent ones share one.
//
// It does not repeat a failed notification, since the waiters are checked within a second anyway. The commit is not
// waited for (synchronous_commit off): it makes no change durable.
func (s *service) flush(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.flushing {
		return
	}
	s.flushing = true
	for len(s.wakes) > 0 && ctx.Err() == nil {
		pairs := s.wakes
		s.wakes = nil
		s.mu.Unlock()
		var channels, payloads []string
		for i := 0; i < len(pairs); i += 2 {
			channels, payloads = append(channels, pairs[i]), append(payloads, pairs[i+1])
		}
		_ = s.query(ctx, func(pgx.Rows) error { return nil },
			`select pg_notify(c, p) from unnest($1::text[], $2::text[]) u(c, p),
			set_config('synchronous_commit', 'off', true)`, channels, payloads)
		s.mu.Lock()
	}
	s.flushing = false
}

// notified acts on a notification: the waiters with that hold id ask, and the holds with it are compared. A
// notification may get lost, come twice, or mean another client's hold with the same id, so it is only a hint.
func (s *service) notified(holdID string) {
	for _, own := range s.sessions() {
		for _, requestID := range own.notified(holdID) {
			s.notify(engine.Push{What: engine.PushTurn, RequestID: requestID})
		}
	}
}

// sessions returns the open sessions.
func (s *service) sessions() []*session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.live))
}

// deaf reports whether waiters rely on polling alone.
func (s *service) deaf() bool { return s.noListen || s.unheard.Load() }

// listen starts the goroutine that listens, unless it runs. It runs until Close.
func (s *service) listen() {
	if s.noListen {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.listens {
		s.listens = s.gate.Go(s.listenAll)
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
func (s *service) listenAll(ctx context.Context) {
	ctx, done := s.gate.Bind(ctx)
	defer done()
	// The operator gets one warning, not one per try.
	told := false
	for ctx.Err() == nil {
		err := s.listenOnce(ctx)
		s.hears.Store(false)
		s.unheard.Store(true)
		s.described.Store(s.describe(s.facts()))
		if ctx.Err() == nil && !told {
			told = true
			s.log.Warn("fencelock: PostgreSQL notifications do not arrive; waiters poll instead", "error", err)
		}
		_ = kit.Sleep(ctx, kit.RetryPause(20*time.Second))
	}
}

// listenOnce listens on a new connection until the connection fails, and closes it. Earlier notifications are not
// repeated, so that it first looks at all holds and all waiters. OnNotification runs in this goroutine, within
// WaitForNotification.
func (s *service) listenOnce(ctx context.Context) error {
	pool := s.pool.Config()
	config := pool.ConnConfig
	if s.listenAt != nil {
		config = s.listenAt.Copy()
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
		s.notified(n.Payload)
	}
	// begin bounds connecting and the listener's first notification to itself.
	begin, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	conn, err := pgx.ConnectConfig(begin, config)
	if err != nil {
		s.unsettled(err)
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if _, err := conn.Exec(begin, "listen "+pgx.Identifier{s.channel()}.Sanitize()); err != nil {
		return err
	}
	// Behind a pooler in transaction mode no notification arrives, without an error. This one is sent over the pool, on
	// the same path as other clients' notifications.
	err = s.query(begin, func(pgx.Rows) error { return nil }, `select pg_notify($1::text, '')`, s.channel())
	if err != nil {
		return err
	}
	if err := conn.PgConn().WaitForNotification(begin); err != nil {
		return err
	}
	// hears is set before the looks below: notifications from here on arrive.
	s.hears.Store(true)
	s.unheard.Store(false)
	s.described.Store(s.describe(s.facts()))
	// Notifications sent before LISTEN are not repeated.
	for _, own := range s.sessions() {
		own.suspectAll()
	}
	s.notify(engine.Push{What: engine.PushGap})
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
