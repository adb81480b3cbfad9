// This file holds the statements of the driver, and the way in which one is sent. Every verb is one SQL function
// (migrations/), hence one round trip and one transaction: a client that stops between two statements cannot leave
// half of a verb behind, or keep a row locked while it is away.
//
// query is the only door. It takes a connection of the driver's own pool, bounds the statement, and counts the notices
// that came with it; ask, exec and write are query for the three shapes of answers, and saw watches the server's
// position in all of them.

package postgres

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

	// The verbs. acquire and release do one name and may wait for its row; acquireFree and releaseFree do several,
	// those whose rows nobody else has, and wait for none; acquireAll does all or nothing. renew prolongs a session
	// and compares its holds; move puts holds on another session; begin makes a session; sweep ends what nobody knows
	// of; reap ends what clients left that died. poll looks at waits and settle moves their queues on; force takes a
	// name away.
	acquire, acquireFree, acquireAll, release, releaseFree, renew, move, begin, sweep, reap, poll, settle, force string

	// What is only read: look also keeps a name's changes for ten minutes from then on.
	look, holders, list, changes string
}

// answerFields are those that answer.scan reads.
const answerFields = `state, coalesce(token, 0), coalesce(queued, false), coalesce(min_left, 0), coalesce(holder, ''),
	coalesce(hold_id, ''), coalesce(retry, 0), coalesce(reason, ''), coalesce(wake, '{}'), here`

// queriesFor writes the statements for a schema. Nulls become zero values here, so that answers scan into plain
// fields.
func queriesFor(schema string) queries {
	in := func(sql string) string { return inSchema(sql, schema) }
	// A request is a row of the table holds without what the server decides: token, time and minimum. SQL takes it
	// whole, so that its fields are named in one place.
	const request = `row(%s, %s, %s, %s, %s, %s, %s, %s, 0, null, null, false, %s)::fencelock.holds`
	one := fmt.Sprintf(request, "$1::text", "$2::text", "$3::text", "$4::text", "$5::text", "$6::smallint",
		"$7::int", "$8::int", "$9::jsonb")
	each := fmt.Sprintf(request, "u.name", "u.req", "u.hid", "u.ses", "u.own", "u.knd", "u.prm", "u.lim",
		"u.meta::jsonb")
	// several is an array of requests, made of one array for each column: pgx sends those without knowing the schema's
	// types.
	several := func(order string) string {
		return `(select array_agg(` + each + ` order by ` + order + `) from unnest($1::text[], $2::text[],
			$3::text[], $4::text[], $5::text[], $6::int[], $7::int[], $8::int[], $9::text[])
			with ordinality u(name, req, hid, ses, own, knd, prm, lim, meta, i))`
	}
	return queries{
		schema: schema,
		acquire: in(`select ` + answerFields + ` from fencelock.acquire(` + one + `, $10::boolean,
			nullif($11::bigint, 0) * interval '1 ms')`),
		acquireFree: in(`select coalesce(places, '{}'), coalesce(tokens, '{}'), here from fencelock.acquire_free(` +
			several("i") + `)`),
		acquireAll: in(`select ` + answerFields + ` from fencelock.acquire_all(` + several(`u.name collate "C"`) + `,
			nullif($10::bigint, 0) * interval '1 ms')`),
		release: in(`select ` + answerFields + ` from fencelock.release($1, $2, $3, $4)`),
		releaseFree: in(`select coalesce(places, '{}'), '{}'::bigint[], here
			from fencelock.release_free($1::text[], $2::text[], $3::bigint[])`),
		renew: in(`select state, coalesce(gone, '{}'), coalesce(reasons, '{}'), coalesce(moved, '{}'),
				coalesce(sessions, '{}'), here
			from fencelock.renew($1, $2::text[], $3::text[], $4::bigint[])`),
		move:    in(`select fencelock.move($1, $2::text[], $3::text[], $4::bigint[])`),
		begin:   in(`select fencelock.begin_session($1, $2, $3)`),
		sweep:   in(`select fencelock.sweep($1, $2::text[], $3)`),
		reap:    in(`select fencelock.reap()`),
		poll:    in(`select * from fencelock.poll($1::text[], $2::text[])`),
		settle:  in(`select fencelock.settle_names($1::text[])`),
		force:   in(`select ` + answerFields + ` from fencelock.force_release($1, $2)`),
		look:    in(`select fencelock.interest($1), (select count(*) from fencelock.waits where name = $1)`),
		holders: in(heldColumns + ` where name = $1 order by since`),
		list:    in(heldColumns + ` where name > $1 and starts_with(name, $2) order by name, since limit $3`),
		changes: in(`select compacted, revision, coalesce(wake, '{}'),
			(select coalesce(array_agg(c.type order by c.revision), '{}') from unnest(news) c),
			(select coalesce(array_agg(c.owner order by c.revision), '{}') from unnest(news) c),
			(select coalesce(array_agg(c.kind::int order by c.revision), '{}') from unnest(news) c),
			(select coalesce(array_agg(c.token order by c.revision), '{}') from unnest(news) c),
			(select coalesce(array_agg(c.reason order by c.revision), '{}') from unnest(news) c),
			(select coalesce(array_agg(c.revision order by c.revision), '{}') from unnest(news) c)
			from fencelock.changes_since($1, $2)`),
	}
}

// inSchema writes the default schema's statements for another one. The name has been checked (Options.schema). A
// search_path would not do: it is a setting of the connection, which a pooler hands on.
func inSchema(sql, schema string) string {
	if schema == defaultSchema {
		return sql
	}
	sql = strings.ReplaceAll(sql, "fencelock.", schema+".")
	return strings.ReplaceAll(sql, "schema if not exists fencelock", "schema if not exists "+schema)
}

// connect makes the driver's pool out of another one's settings: no connections are kept ready, connecting is bounded
// by callTime, statements are prepared on each new connection, and notices are counted. Hooks that the settings have
// are called as before.
func (d *Driver) connect(config *pgxpool.Config) {
	config = config.Copy()
	d.unprepared.Store(config.ConnConfig.DefaultQueryExecMode != pgx.QueryExecModeCacheStatement)
	// The settings are the application's, for its own load; connections kept ready twice would be too many.
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
		return d.prepare(ctx, conn)
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
	d.pool, d.unfit = pgxpool.NewWithConfig(context.Background(), config)
}

// once is the key of a context whose call is not repeated, so that it asks for a sign of life on its connection first.
// All others find out by failing, and are sent on another connection; asking each time would cost them a round trip.
type once struct{}

// notices counts the notices of a connection, of which one goroutine at a time has the use, and returns how many there
// were before more. The count is kept on the connection, since pgx calls the handler with nothing else.
func notices(c *pgconn.PgConn, more int) int {
	const field = "fencelock notices"
	n, _ := c.CustomData()[field].(int)
	if more > 0 {
		c.CustomData()[field] = n + more
	}
	return n
}

// callTime bounds one statement: a server that says nothing for so long is asked again, on another connection. It is
// longer than the 4 s for which the functions wait for a row (fencelock.be_patient), so that the server gives up first
// and says so.
const callTime = 5 * time.Second

// query runs one statement and gives its rows to scan. A connection that the pool had, and that has ended meanwhile,
// is no reason to fail: nothing was sent on it, and the pool has others or makes one. After a restart of the server
// all of them may be such, hence as many tries as the pool may have connections. A connection that cannot be made is
// an answer.
func (d *Driver) query(ctx context.Context, scan func(pgx.Rows) error, sql string, args ...any) error {
	// Each turn takes another connection. What was mixed up is tried once more, since nothing is prepared after that.
	for tries := int32(0); ; tries++ {
		err := d.queryOnce(ctx, scan, sql, args...)
		var dial *pgconn.ConnectError
		ended := pgconn.SafeToRetry(err) && !errors.As(err, &dial)
		more := ctx.Err() == nil && tries < d.pool.Stat().MaxConns()
		if !(ended && more) && !d.mixedUp(err) {
			return err
		}
	}
}

// queryOnce is query, but for connections that had ended and statements that a pooler mixed up. Waiting for a
// connection is bounded by ctx alone, since nothing has been asked of a server yet; from then on callTime counts.
//
// A notice during the statement makes its outcome unknown (see errNotice): the statement was answered, and the answer
// is not to be believed. scan must therefore only store what it reads, and its caller must look at the error first. An
// error of scan means that the server is not the one that was expected, and leaves the outcome unknown, too.
func (d *Driver) queryOnce(ctx context.Context, scan func(pgx.Rows) error, sql string, args ...any) error {
	conn, err := d.pool.Acquire(ctx)
	if err != nil {
		return notSent(ctx, err)
	}
	defer conn.Release()
	bounded, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	// The connection is ours until it is released, so that a notice between here and the end is this statement's.
	before := notices(conn.Conn().PgConn(), 0)
	// QueryExecModeExec sends the parameters as text in one round trip; a statement that was prepared under its own
	// text is found by pgx all the same.
	rows, err := conn.Query(bounded, sql, append([]any{pgx.QueryExecModeExec}, args...)...)
	if err != nil {
		return callEnded(ctx, err)
	}
	for rows.Next() {
		if err := scan(rows); err != nil {
			rows.Close()
			return fmt.Errorf("%w: %w", backend.ErrUnknown, err)
		}
	}
	// Also a commit that failed shows here: the statement is its own transaction.
	if err := rows.Err(); err != nil {
		return callEnded(ctx, err)
	}
	if notices(conn.Conn().PgConn(), 0) != before {
		return fmt.Errorf("%w: %w", backend.ErrUnknown, errNotice)
	}
	return nil
}

// prepare prepares the statements of every day on a new connection, so that each call stays one round trip. What
// cannot be prepared is sent as it is, and the call fails with its error: a schema that is missing should not look
// like a connection that cannot be made.
func (d *Driver) prepare(ctx context.Context, conn *pgx.Conn) error {
	for _, sql := range []string{
		d.sql.acquire, d.sql.acquireFree, d.sql.release, d.sql.releaseFree, d.sql.renew, d.sql.poll,
	} {
		if d.unprepared.Load() {
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

// mixedUp reports whether a prepared statement was missing, or there already, because a pooler hands connections on:
// nothing was executed. From then on nothing is prepared, and the pool's connections are made anew.
func (d *Driver) mixedUp(err error) bool {
	if code := sqlState(err); code != "26000" && code != "42P05" {
		return false
	}
	d.unprepared.Store(true)
	d.pool.Reset()
	return true
}

// notSent is the error of a call for which no connection could be had, so that nothing was done.
func notSent(ctx context.Context, err error) error {
	if ended := ctx.Err(); ended != nil {
		return fmt.Errorf("%w: %w: %w", backend.ErrUnavailable, ended, err)
	}
	if misconfigured(err) {
		return err
	}
	return fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
}

// callEnded tells the end of the caller's context from the end of callTime. Both leave the outcome unknown; the second
// must not say that a context has ended, since the caller's has not.
func callEnded(ctx context.Context, err error) error {
	if ctx.Err() == nil && kit.IsContext(err) {
		return fmt.Errorf("%w: no answer within %v: %v", backend.ErrUnknown, callTime, err)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w: %w", backend.ErrUnknown, ctx.Err(), err)
	}
	return err
}

// answer is what a verb's function returns, the SQL type fencelock.answer.
type answer struct {
	// granted, waiting, held, mismatch, no-session, ended, or what a later schema says.
	state  string
	token  int64
	queued bool

	// Milliseconds, as retry is.
	minLeft        int64
	holder, holdID string
	retry          int64
	reason         string
	wake           []string

	// Where the server is in its history: see saw.
	here int64
}

// scan reads a row of answerFields.
func (a *answer) scan(rows pgx.Rows) error {
	return rows.Scan(
		&a.state, &a.token, &a.queued, &a.minLeft, &a.holder, &a.holdID, &a.retry, &a.reason, &a.wake, &a.here,
	)
}

// ask runs a verb, once.
func (d *Driver) ask(ctx context.Context, sql string, args ...any) (answer, error) {
	var a answer
	began := d.position()
	err := d.query(ctx, a.scan, sql, args...)
	d.wake(a.wake) // also if the answer is in doubt: a wake-up in vain does no harm
	if err == nil {
		err = d.saw(began, a.here)
	}
	return a, err
}

// exec runs a function that returns whom to wake.
func (d *Driver) exec(ctx context.Context, sql string, args ...any) error {
	var wake []string
	err := d.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&wake) }, sql, args...)
	d.wake(wake)
	return err
}

// write runs a function that returns the server's position.
func (d *Driver) write(ctx context.Context, sql string, args ...any) error {
	before := d.position()
	var here int64
	if err := d.query(ctx, func(rows pgx.Rows) error { return rows.Scan(&here) }, sql, args...); err != nil {
		return err
	}
	return d.saw(before, here)
}

// position returns the greatest position that the server told. It is read before a request is sent, for saw.
func (d *Driver) position() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.here
}

// saw takes note of the server's position in its history, of which only what is on disk counts. One that lies before
// what was known when the request was sent means that the server has forgotten what it acknowledged: then every hold
// is lost, and nothing is granted any more. before must be read when the request is sent, since answers overtake each
// other.
//
// This is the net below the tokens. They rise by themselves as long as the timeline or the position does. A disk that
// was rolled back to an earlier copy has the same timeline and an earlier position, and would issue tokens again; only
// those who lived through it can know (TestDiskIsRolledBack).
//
// A later timeline means that another server is primary. Its settings and standbys are probed anew, and every session
// looks for what nobody knows: a standby that lagged brings back what was released since, on sessions that live on.
func (d *Driver) saw(before, here int64) error {
	d.mu.Lock()
	if here >= before {
		// Not the first position of all, and of a later timeline.
		if here>>timelineShift > d.here>>timelineShift && d.here != 0 {
			// A standby that lagged brings back what was released since, on sessions that live on.
			for _, s := range d.sessions.Live() {
				s.doubt = true
			}
			d.probed.Store(false) // it may have other settings, and other standbys
			d.log.Warn("fencelock: another PostgreSQL server is primary", "timeline", here>>timelineShift)
		}
		d.here = max(d.here, here)
		err := d.lost
		d.mu.Unlock()
		return err
	}
	if d.lost == nil {
		d.lost = &backend.HistoryError{
			What: "timeline and log position", Was: showPosition(before), Now: showPosition(here),
		}
	}
	err := d.lost
	d.mu.Unlock()
	d.loseAll(backend.ReasonHistoryLost)
	return err
}

// history returns why the driver does nothing any more, or nil.
func (d *Driver) history() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lost
}

// timelineShift is how many bits of a position are for the log, in units of 64 bytes; the timeline is above them.
const timelineShift = 43

// showPosition writes a position for people: the timeline, and the log's byte in hexadecimal, such as 3/1a2b40. Two of
// them stand in the error of a lost history: what was known, and what the server tells.
func showPosition(p int64) string {
	return strconv.FormatInt(p>>timelineShift, 10) + "/" + strconv.FormatInt(p&(1<<timelineShift-1)<<6, 16)
}
