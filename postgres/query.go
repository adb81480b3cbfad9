package postgres

// The statements. Every verb is one SQL function (migrations/), hence one round trip and one transaction: a client that
// stops between two statements cannot leave a partial verb behind, or keep a row locked.
//
// query sends all of them: it takes a connection of the driver's own pool, bounds the statement, and counts the notices
// that came with it.

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
)

// defaultSchema is the schema for which the migrations and the statements are written; inSchema makes others of it.
const defaultSchema = "fencelock"

// queries are the statements of the driver, one round trip and one transaction each, for one schema.
type queries struct {
	schema string

	// The verbs. acquire and release do one name and may wait for its row; acquireUnder is acquire for a caller with
	// holds, acquireAgain is acquireUnder after a statement without an answer, leave releases the request of a call that
	// has ended, releaseLate forbids unanswered statements, and lapsed drops the minimum of a hold whose session is over.
	// acquireFree and releaseFree take several names, skip names with a locked row, and do not wait; acquireAll acquires
	// all or nothing. renew prolongs a session; compare finds the holds that are not on it; move puts holds on another
	// session; begin makes a session; sweep ends unknown holds; reap ends the sessions of clients that died. poll looks
	// at waits and settle grants to their queues; force ends the holds of a name.
	acquire, acquireUnder, acquireAgain, acquireFree, acquireAll string
	release, releaseLate, releaseFree, leave, lapsed             string
	renew, compare, move, begin, sweep, reap, poll, settle       string
	force                                                        string

	// The read-only statements: look also keeps a name's changes for ten minutes from then on.
	look, holders, queue, use, list, changes, authors string
}

// answerFields are the fields that answer.scan reads.
const answerFields = `state, coalesce(token, 0), coalesce(queued, false), coalesce(min_left, 0), coalesce(holder, ''),
	coalesce(hold_id, ''), coalesce(retry, 0), coalesce(reason, ''), coalesce(wake, '{}'), here,
	coalesce(why, ''), coalesce(by_whom, ''), coalesce(principal, ''), coalesce(name, ''), ` + nonceField + `,
	` + clockField + `, coalesce(cycle_names, '{}'), coalesce(cycle_owners, '{}')`

// clockField is a reading of the server's clock, see serverClock.
const clockField = `(extract(epoch from clock_timestamp()) * 1000000)::bigint`

// nonceField reads a nonce without hyphens, and "" for a hold of an earlier version.
const nonceField = `coalesce(replace(nonce::text, '-', ''), '')`

// queriesFor writes the statements for a schema. Nulls become zero values here, so that answers scan into plain
// fields.
func queriesFor(schema string) queries {
	in := func(sql string) string { return inSchema(sql, schema) }
	// A request is a row of the table holds without the server's part: token, time and minimum. SQL takes it
	// whole, so that its fields are named in one place.
	const request = `row(%s, %s, %s, %s, %s, %s, %s, %s, 0, null, null, false, %s, null)::fencelock.holds`
	one := fmt.Sprintf(request, "$1::text", "$2::text", "$3::text", "$4::text", "$5::text", "$6::smallint",
		"$7::int", "$8::int", "$9::jsonb")
	each := fmt.Sprintf(request, "u.name", "u.req", "u.hid", "u.ses", "u.own", "u.knd", "u.prm", "u.lim",
		"u.meta::jsonb")
	// several is an array of requests, made of one array for each column: pgx sends such arrays without the schema's
	// types.
	several := func(order string) string {
		return `(select array_agg(` + each + ` order by ` + order + `) from unnest($1::text[], $2::text[],
			$3::text[], $4::text[], $5::text[], $6::int[], $7::int[], $8::int[], $9::text[])
			with ordinality u(name, req, hid, ses, own, knd, prm, lim, meta, i))`
	}
	return queries{
		schema: schema,
		acquire: in(`select ` + answerFields + ` from fencelock.acquire(fencelock.seen(` + one + `, $12::text), $10::boolean,
			nullif($11::bigint, 0) * interval '1 ms')`),
		acquireUnder: in(`select ` + answerFields + ` from fencelock.acquire(fencelock.seen(` + one + `, $12::text), $10::boolean,
			nullif($11::bigint, 0) * interval '1 ms', $13::text[])`),
		acquireAgain: in(`select ` + answerFields + ` from fencelock.acquire_again(fencelock.seen(` + one + `, $12::text),
			$10::boolean, nullif($11::bigint, 0) * interval '1 ms', $13::text[])`),
		acquireFree: in(`select coalesce(places, '{}'), coalesce(tokens, '{}'), coalesce(nonces, '{}')::text[], here
			from fencelock.acquire_free(` +
			several("i") + `)`),
		acquireAll: in(`select ` + answerFields + ` from fencelock.acquire_all(fencelock.seen(` +
			several(`u.name collate "C"`) + `, $11::text),
			nullif($10::bigint, 0) * interval '1 ms')`),
		release: in(`select ` + answerFields + ` from fencelock.release(fencelock.seen($1::text, $5), $2, $3, $4)`),
		releaseLate: in(`select ` + answerFields + ` from fencelock.release(fencelock.seen($1::text, $5), $2, $3, $4)
			where (fencelock.decide(array[$1::text], array[$2::text]) is null) is not null`),
		lapsed: in(`select coalesce(case when exists (select 1 from fencelock.holds h where h.name = $1 and h.request_id = $2
				and not exists (select 1 from fencelock.sessions s where s.id = h.session and s.expires_at > clock_timestamp()))
			then (fencelock.release(fencelock.seen($1::text, $3), $2, 0, false)).wake end, '{}')`),
		leave: in(`select ` + answerFields + ` from fencelock.leave(fencelock.seen($1::text, $4), $2, $3)`),
		releaseFree: in(`select coalesce(places, '{}'), '{}'::bigint[], '{}'::text[], here
			from fencelock.release_free($1::text[], $2::text[], $3::bigint[])`),
		renew: in(`select state, here, ` + clockField + `
			from fencelock.renew(fencelock.seen($1::text, $2), '{}', '{}', '{}')`),
		compare: in(`select exists (select from fencelock.sessions where id = $1), fencelock.durable_position(),
				coalesce(array_agg(u.i), '{}'), coalesce(array_agg(coalesce(h.session, '')), '{}'),
				coalesce(array_agg(coalesce(v.reason, '')), '{}'), coalesce(array_agg(coalesce(v.why, '')), '{}'),
				coalesce(array_agg(coalesce(v.by_whom, '')), '{}'), coalesce(array_agg(coalesce(v.principal, '')), '{}')
			from unnest($2::text[], $3::text[], $4::bigint[]) with ordinality u(name, request_id, token, i)
			left join fencelock.holds h on h.name = u.name and h.request_id = u.request_id and h.token = u.token
			left join fencelock.revoked v on v.name = u.name and v.token = u.token
			where h.name is null or h.session <> $1`),
		move:  in(`select fencelock.move(fencelock.seen($1::text, $6), $2, $3::text[], $4::text[], $5::bigint[])`),
		begin: in(`select fencelock.begin_session($1, $2, $3)`),
		sweep: in(`select fencelock.sweep(fencelock.seen($1::text, $4), $2::text[], $3)`),
		reap:  in(`select fencelock.reap() where fencelock.seen(true, $1)`),
		poll: in(`select i, state, session, token, min_left, due, ahead, here, ` + nonceField + `, ` + clockField + `
			from fencelock.poll($1::text[], $2::text[])`),
		settle: in(`select fencelock.settle_names(fencelock.seen($1::text[], $2))`),
		force: in(`select ` + answerFields + ` from fencelock.force_release(fencelock.seen($1::text, $7), $2, $3, $4,
			nullif($5, '')::uuid, $6)`),
		look: in(`select fencelock.interest($1), (select count(*) from fencelock.waits where name = $1)`),
		queue: in(`select owner, hold_id, kind::int, permits, limit_n from fencelock.waits w
			where name = $1 and exists (select 1 from fencelock.sessions s
				where s.id = w.session and s.expires_at > clock_timestamp())
			order by ticket limit $2`),
		use: in(`select kind, limit_n, owner from (
			select kind, limit_n, owner, 0 as i from fencelock.holds where name = $1
			union all select kind, limit_n, owner, 1 from fencelock.waits where name = $1) u order by i limit 1`),
		holders: in(heldColumns + ` from fencelock.held h where name = $1 order by since`),
		// The waiters are counted once for each name of the page, and not for each of its holders.
		list: in(`with page as (
				select * from fencelock.held where name > $1 and starts_with(name, $2) order by name, since limit $3
			), queues as (
				select w.name as queue, count(*) as waiters from fencelock.waits w
				where w.name in (select p.name from page p) group by w.name
			) ` + heldColumns + `, coalesce(waiters, 0) from page h left join queues on queue = name order by name, since`),
		changes: in(`select compacted, revision, coalesce(wake, '{}'),
			(select coalesce(array_agg(c.type order by c.revision), '{}') from unnest(news) c),
			(select coalesce(array_agg(c.owner order by c.revision), '{}') from unnest(news) c),
			(select coalesce(array_agg(c.kind::int order by c.revision), '{}') from unnest(news) c),
			(select coalesce(array_agg(c.token order by c.revision), '{}') from unnest(news) c),
			(select coalesce(array_agg(c.reason order by c.revision), '{}') from unnest(news) c),
			(select coalesce(array_agg(c.revision order by c.revision), '{}') from unnest(news) c)
			from fencelock.changes_since(fencelock.seen($1::text, $3), $2)`),
		authors: in(`select token, by_whom, principal from fencelock.revoked
			where name = $1 and token = any ($2::bigint[])`),
	}
}

// inSchema writes the default schema's statements for another one. The name has been checked (Options.schema). A
// search_path would be a setting of the connection, which a pooler shares.
func inSchema(sql, schema string) string {
	if schema == defaultSchema {
		return sql
	}
	sql = strings.ReplaceAll(sql, "fencelock.", schema+".")
	return strings.ReplaceAll(sql, "schema if not exists fencelock", "schema if not exists "+schema)
}

// connect makes the driver's pool from the settings of another pool: no connections are kept ready, connecting is
// bounded by callTime, statements are prepared on each new connection, and notices are counted. The hooks of the
// settings are called as before.
func (s *service) connect(config *pgxpool.Config) {
	config = config.Copy()
	s.unprepared.Store(config.ConnConfig.DefaultQueryExecMode != pgx.QueryExecModeCacheStatement)
	// pgx sends UTF-8, which the server would read in its own encoding.
	config.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
	for name, value := range ourSettings {
		if _, set := config.ConnConfig.RuntimeParams[name]; !set {
			config.ConnConfig.RuntimeParams[name] = value
		}
	}
	connecting := config.BeforeConnect
	config.BeforeConnect = func(ctx context.Context, c *pgx.ConnConfig) error {
		if s.unset.Load() {
			for name, value := range ourSettings {
				if c.RuntimeParams[name] == value {
					delete(c.RuntimeParams, name)
				}
			}
		}
		if connecting != nil {
			return connecting(ctx, c)
		}
		return nil
	}
	// The application's settings suit its own load; a second set of idle connections would be too many.
	config.MinConns, config.MinIdleConns = 0, 0
	if t := config.ConnConfig.ConnectTimeout; t <= 0 || t > callTime {
		config.ConnConfig.ConnectTimeout = callTime
	}
	// The pool's own hooks still run: they may set a role, or register types.
	connected := config.AfterConnect
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		if connected != nil {
			if err := connected(ctx, conn); err != nil {
				return err
			}
		}
		return s.prepare(ctx, conn)
	}
	config.ShouldPing = func(ctx context.Context, _ pgxpool.ShouldPingParams) bool { return ctx.Value(once{}) != nil }
	config.PingTimeout = callTime
	told := config.ConnConfig.OnNotice
	config.ConnConfig.OnNotice = func(c *pgconn.PgConn, n *pgconn.Notice) {
		notices(c, 1)
		if told != nil {
			told(c, n)
		}
	}
	if s.pool, s.unfit = pgxpool.NewWithConfig(context.Background(), config); s.unfit == nil {
		s.others = make(chan struct{}, max(1, s.pool.Config().MaxConns-1))
	}
}

// ourSettings are the settings of the driver's connections, regardless of the role's and the database's settings. A
// setting in the connection string takes precedence. A pooler may refuse them: see unsettled.
var ourSettings = map[string]string{
	// The functions look with a new snapshot after they have locked the row of a name.
	"default_transaction_isolation": "read committed",
	// The functions bound their waits themselves, and the driver the statements, by callTime.
	"statement_timeout":                   "0",
	"idle_in_transaction_session_timeout": "0",
	"search_path":                         "pg_catalog",
}

// unsettled reports whether a connection was refused because of ourSettings, as PgBouncer does for settings that its
// ignore_startup_parameters does not list. From then on connections are made without, and the probe looks at the
// isolation.
func (s *service) unsettled(err error) bool {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "08P01" || !strings.Contains(pg.Message, "startup parameter") {
		return false
	}
	s.unset.Store(true)
	return true
}

// once is the context key of calls that are not repeated: they first ping their connection. Other calls fail on an
// ended connection and are sent on another; a ping would cost each of them a round trip.
type once struct{}

// notices adds more to the number of notices of a connection, which one goroutine at a time uses, and returns the
// previous number. The count is kept on the connection, the only argument that pgx passes to the handler.
func notices(c *pgconn.PgConn, more int) int {
	const field = "fencelock notices"
	n, _ := c.CustomData()[field].(int)
	if more > 0 {
		c.CustomData()[field] = n + more
	}
	return n
}

// callTime is the maximum duration of a connection attempt, of an exchange (Patience) and of a background task.
const callTime = 5 * time.Second

// query runs one statement and passes its rows to scan. It does not fail on a pooled connection that has ended
// meanwhile: no request was sent on it, and the pool has or makes another. After a restart of the server all pooled
// connections may have ended, hence as many tries as the pool may have connections. A failure to connect is returned.
//
// A statement that the server cannot execute may not match the version of the schema, which was migrated since the
// last probe. Another probe returns an error with both versions.
func (s *service) query(ctx context.Context, scan func(pgx.Rows) error, sql string, args ...any) error {
	// Each turn takes another connection. A mixed-up statement is retried once, since no statement is prepared after
	// that.
	settled := s.unset.Load()
	for tries := int32(0); ; tries++ {
		err := s.queryOnce(ctx, scan, sql, args...)
		var dial *pgconn.ConnectError
		ended := pgconn.SafeToRetry(err) && !errors.As(err, &dial)
		more := ctx.Err() == nil && tries < s.pool.Stat().MaxConns()
		switch {
		case !settled && s.unsettled(err):
			settled = true // this call is retried once
			continue
		case ended && more, s.mixedUp(err):
			continue
		}
		if code := sqlState(err); strings.HasPrefix(code, "42") && code != "42501" && ctx.Value(probing{}) == nil {
			if found := s.probe(ctx); errors.Is(found, backend.ErrMisconfigured) {
				return found
			}
		}
		if text := remedy(err); text != "" {
			err = fmt.Errorf("%w%s", err, text)
		}
		return err
	}
}

// probing is the context key of the calls of a probe.
type probing struct{}

// queryOnce is query without retries for ended connections and for statements that a pooler mixed up. Waiting for a
// connection has no effect.
//
// A notice during the statement makes its outcome unknown (see errNotice): the statement was answered, but the answer
// cannot be trusted. scan must therefore only store its values, and its caller must check the error first. An error of
// scan means an unexpected server, and also leaves the outcome unknown.
func (s *service) queryOnce(ctx context.Context, scan func(pgx.Rows) error, sql string, args ...any) error {
	if !s.renews(sql) {
		select {
		case s.others <- struct{}{}:
			defer func() { <-s.others }()
		case <-ctx.Done():
			return notSent(ctx.Err())
		}
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return notSent(err)
	}
	defer conn.Release()
	// The connection is ours until it is released, so that a notice between here and the end is this statement's.
	before := notices(conn.Conn().PgConn(), 0)
	// QueryExecModeExec sends the parameters as text in one round trip; pgx still finds a statement that was prepared
	// under its own text.
	rows, err := conn.Query(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...)
	if err != nil {
		return err
	}
	for rows.Next() {
		if err := scan(rows); err != nil {
			rows.Close()
			return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
		}
	}
	// A failed commit shows here too: the statement is its own transaction.
	if err := rows.Err(); err != nil {
		return err
	}
	if notices(conn.Conn().PgConn(), 0) != before {
		return fmt.Errorf("%w: %w", backend.ErrUnknown, errNotice)
	}
	return nil
}

// renews reports whether a statement renews: the others leave a connection to these, if the pool may have two, so that
// no hold expires while they wait.
func (s *service) renews(sql string) bool {
	return sql == s.sql.renew || sql == s.sql.compare || sql == s.sql.move
}

// prepare prepares the frequent statements on a new connection, so that each call stays one round trip. A statement
// that cannot be prepared is sent unprepared, and the call fails with its error: a missing schema should not look like
// a connection that cannot be made.
func (s *service) prepare(ctx context.Context, conn *pgx.Conn) error {
	for _, sql := range []string{
		s.sql.acquire, s.sql.acquireFree, s.sql.release, s.sql.releaseFree, s.sql.renew, s.sql.poll,
	} {
		if s.unprepared.Load() {
			return nil
		}
		if _, err := conn.Prepare(ctx, sql, sql); err != nil && sqlState(err) == "" {
			return err
		} else if err != nil {
			return nil //nolint:nilerr // see above
		}
	}
	return nil
}

// mixedUp reports whether a prepared statement was missing, or there already, because a pooler shares connections: the
// statement was not executed. From then on no statement is prepared, and the pool's connections are replaced.
func (s *service) mixedUp(err error) bool {
	if code := sqlState(err); code != "26000" && code != "42P05" {
		return false
	}
	s.unprepared.Store(true)
	s.pool.Reset()
	return true
}

// notSent returns the error of a call that got no connection, and so had no effect. It does not wrap the end of a
// context, after which the outcome would count as unknown.
func notSent(err error) error {
	switch {
	case misconfigured(err):
		return err
	case kit.IsContext(err):
		return fmt.Errorf("%w: no connection: %v", backend.ErrUnavailable, err)
	}
	return fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
}

// answer is the result of a verb's function, the SQL type fencelock.answer.
type answer struct {
	// granted, waiting, held, mismatch, deadlock, no-session, ended, or a state of a later schema.
	state  string
	token  int64
	queued bool

	// Milliseconds, as retry is.
	minLeft        int64
	holder, holdID string
	retry          int64
	reason, why    string // of a lost hold; why is the reason given to ForceRelease
	by, principal  string // the caller of ForceRelease
	wake           []string

	// The conflicting name of a refused set.
	name string

	// The server's position in its history: see saw.
	here int64

	// The nonce of the granted hold; empty if an earlier version made it.
	nonce string

	// The server's clock, in microseconds.
	clock int64

	// The cycle of a request that would deadlock: each name that it would wait for, and its holder or waiter.
	cycleNames, cycleOwners []string
}

// scan reads a row of answerFields.
func (a *answer) scan(rows pgx.Rows) error {
	return rows.Scan(
		&a.state, &a.token, &a.queued, &a.minLeft, &a.holder, &a.holdID, &a.retry, &a.reason, &a.wake, &a.here,
		&a.why, &a.by, &a.principal, &a.name, &a.nonce, &a.clock, &a.cycleNames, &a.cycleOwners,
	)
}

// ask runs a verb, once.
func (s *service) ask(ctx context.Context, sql string, args ...any) (answer, error) {
	var a answer
	began, sent := s.position(), s.clock.Now()
	err := s.query(ctx, a.scan, sql, args...)
	s.wake(a.wake) // even if the answer is in doubt: a needless wake-up does no harm
	if err == nil {
		s.clockWas(sent, a.clock)
		err = s.saw(began, a.here)
	}
	return a, err
}

// exec runs a function that returns the clients to notify.
func (s *service) exec(ctx context.Context, sql string, args ...any) error {
	var wake []string
	err := s.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&wake) }, sql, args...)
	s.wake(wake)
	return err
}

// write runs a function that returns the server's position.
func (s *service) write(ctx context.Context, sql string, args ...any) (here int64, err error) {
	before := s.position()
	if err := s.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&here) }, sql, args...); err != nil {
		return 0, err
	}
	return here, s.saw(before, here)
}

// position returns the greatest position that the server returned. It is read before a request is sent, for saw.
func (s *service) position() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.here
}

// saw records the server's position in its history, up to the part that is on disk. A position before the known one at
// the time of the request means that the server has forgotten acknowledged commits: then every hold is lost, and the
// driver no longer grants. before must be read when the request is sent, since answers overtake each
// other.
//
// This is a second safeguard of the tokens. They rise without it as long as the timeline or the position does. A disk
// that was rolled back to an earlier copy has the same timeline and an earlier position, and would reissue tokens;
// only clients that were running can detect that (TestDiskIsRolledBack).
//
// A later timeline means that another server is primary. Its settings and standbys are probed anew, and every session
// is replaced: see Prove.
func (s *service) saw(before, here int64) error {
	s.mu.Lock()
	if here >= before {
		// The position is of a later timeline, and not the first that the driver has seen.
		if here>>timelineShift > s.here>>timelineShift && s.here != 0 {
			s.fit.Store(false) // it may have other settings, and other standbys
			s.log.Warn("fencelock: another PostgreSQL server is primary", "timeline", here>>timelineShift)
		}
		s.here = max(s.here, here)
		err := s.lost
		s.mu.Unlock()
		return err
	}
	if s.lost == nil {
		s.lost = &backend.HistoryError{
			What: "timeline and log position", Was: showPosition(before), Now: showPosition(here),
		}
	}
	err := s.lost
	s.mu.Unlock()
	return err
}

// history returns the reason why the driver refuses all calls, or nil.
func (s *service) history() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// timelineShift is the number of bits of a position for the log, in units of 64 bytes; the timeline is above them.
const timelineShift = 43

// showPosition writes a position for people: the timeline, and the log's byte in hexadecimal, such as 3/1a2b40. The
// error of a lost history has the known position and the server's.
func showPosition(p int64) string {
	return strconv.FormatInt(p>>timelineShift, 10) + "/" + strconv.FormatInt(p&(1<<timelineShift-1)<<6, 16)
}
