// This file has the driver's API: its options, New, the entry of calls, and Close.
//
// Three things run in the background, each only while it is needed and all of them through gate.Go, so that Close
// waits for them: keepAlive for each session (session.go); pollAll and listenAll, one each for the driver, while there
// are waiters or holders (wait.go, push.go); and short tasks such as notifying others, releasing, and sending calls
// that share a statement. There is no goroutine per hold or waiter.
//
// Driver.mu protects the driver's own record of holds, waiters and sessions. It is held for map operations, never
// during a statement or a callback of the core. The mutexes of kit.Sessions and of together are independent of it: the
// first may be taken while it is held, the second never is.

package postgres

import (
	"context"
	"errors"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/notify"
)

const driverName = "postgres"

const (
	// Description.MinTTL and MaxTTL.
	minTTL = time.Second
	maxTTL = 24 * time.Hour
)

// Options are the settings of New. The zero value, or nil, means defaults. New copies them.
type Options struct {
	// Schema is the schema of the tables and functions that Migrate made: 1 to 40 characters of a–z 0–9 _, not a digit
	// first. Two schemas are two lock services. Default "fencelock".
	Schema string

	// NoListen makes waiters poll, even where LISTEN would work. While its queue moves, the first waiter polls every
	// 25 to 50 ms, and a waiter with n waiters ahead at n times that interval; while the queue does not move, each
	// polls every 0.5 to 1 s. Behind a pooler that does not pass notifications on (PgBouncer in transaction mode) the
	// driver detects that automatically, within 5 s of the first wait.
	NoListen bool

	// Listen is a connection string of the server itself, for the connection that listens, if the pool connects through a
	// pooler that does not pass notifications on. Default: as the pool connects.
	Listen string

	// IgnoreStandbys are names (application_name) of receivers of the server's log that are never promoted, such as
	// pg_receivewal, of at most 63 bytes each. A standby that receives the log, and that no commit waits for, counts as
	// an asynchronous replica, which the correctness tier refuses; receivers with these names do not count, nor do
	// logical replication and base backups. Default: none.
	IgnoreStandbys []string

	// Clock measures validity. Default backend.SystemClock.
	Clock backend.Clock

	// Logger receives messages for operators: that notifications do not arrive, that a server was promoted. Default:
	// no logging.
	Logger *slog.Logger
}

// Driver takes locks in a PostgreSQL database. Make it with New or Open. It implements backend.FencingDriver,
// Inspector, Lister, Watcher, ForceReleaser, MultiAcquirer and Pinger. All methods are safe for concurrent use.
type Driver struct {
	pool  *pgxpool.Pool // the driver's own, see New
	unfit error         // why no call can work: bad arguments of New
	sql   queries
	clock backend.Clock
	log   *slog.Logger

	// id identifies this client: the ids of its sessions and its channel begin with it. It has 64 random bits, so that
	// clients need not know each other.
	id string

	// The result of the last probe, for every call. Written by probes and by the loop that listens.
	described  atomic.Pointer[backend.Description]
	probed     atomic.Bool  // the last probe found the server fit, and no other server has become primary since
	looked     atomic.Int64 // when the last probe began, as an Instant
	noListen   bool
	listenAt   *pgx.ConnConfig // nil: as the pool connects
	unprepared atomic.Bool     // statements are not prepared
	unset      atomic.Bool     // connections are made without ourSettings
	ignored    []string        // Options.IgnoreStandbys
	gate       *kit.Gate
	sessions   *kit.Sessions[time.Duration, *session]

	time serverClock

	// Calls of each verb that come together: see together.go.
	acquires together // calls of Acquire
	releases together // calls of Release

	// Whether notifications arrive. unheard: the last try to listen failed, or has ended. hears: a loop listens, and
	// has heard its own notification. Both are false before the first try.
	unheard atomic.Bool   // notifications do not arrive
	hears   atomic.Bool   // they do, now
	polls   notify.Signal // asks for a look at all waiters

	// mu protects the fields below it, and some of each session and hold.
	mu sync.Mutex

	// This client's holds, waiters, and requests under way. calls counts by request id; a channel in
	// asking is closed when the request has been answered.
	holds   map[key]*hold
	waiters map[string]map[*waiter]struct{} // by hold id
	calls   map[string]int                  // request ids of calls in flight
	asking  map[key]chan struct{}           // requests that were sent; closed when they have been answered

	// The running loops, and the pending notifications: channel and hold id of each, in turn.
	polling bool     // a loop looks at the waiters
	listens bool     // a loop listens
	wakes   []string // to notify: channel and hold id of each
	waking  bool     // a loop notifies

	// The known state of the server: the greatest position that it returned, whether it has lost its history (see saw
	// and learn), and the result of the last probe.
	here  int64 // the greatest position that the server returned
	lost  error // the service lost its history; see saw
	found facts // of the last probe
}

var (
	_ backend.FencingDriver = (*Driver)(nil)
	_ backend.Pinger        = (*Driver)(nil)
	_ backend.Inspector     = (*Driver)(nil)
	_ backend.Lister        = (*Driver)(nil)
	_ backend.Watcher       = (*Driver)(nil)
	_ backend.ForceReleaser = (*Driver)(nil)
	_ backend.MultiAcquirer = (*Driver)(nil)
)

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,39}$`)

// schemaSyntax describes the names that schemaName accepts.
const schemaSyntax = "want 1 to 40 characters of a-z 0-9 _, not a digit first"

// schema returns the schema of the tables, or an error for an invalid name. Nil options mean the default. The name is
// put into statements unquoted, so few characters are allowed.
func (o *Options) schema() (string, error) {
	if o == nil || o.Schema == "" {
		return defaultSchema, nil
	}
	if !schemaName.MatchString(o.Schema) {
		return o.Schema, kit.InvalidOption("Schema", strconv.Quote(o.Schema), schemaSyntax)
	}
	return o.Schema, nil
}

// New returns a driver for the database of pool. It does no I/O; problems of the arguments or the server show in Ping
// or in the first call, as an error that wraps backend.ErrInvalidOption or ErrMisconfigured. A nil o means the
// defaults.
//
// The driver opens its own connections with the pool's settings, at most as many as the pool may have and one more to
// listen: a lock must see the notices of the driver's commits, and must not wait behind the application's queries.
// Close closes them, but not pool.
func New(pool *pgxpool.Pool, o *Options) *Driver {
	if o == nil {
		o = &Options{}
	}
	d := &Driver{
		gate: kit.NewGate(), clock: o.Clock, log: o.Logger, noListen: o.NoListen, polls: notify.New(),
		id:    backend.NewRequestID()[:16],
		holds: map[key]*hold{}, waiters: map[string]map[*waiter]struct{}{},
		calls: map[string]int{}, asking: map[key]chan struct{}{},
		// Not nil, which would be null in SQL.
		ignored: append([]string{}, o.IgnoreStandbys...),
	}
	if d.clock == nil {
		d.clock = backend.SystemClock()
	}
	d.sessions = kit.NewSessions[time.Duration, *session](d.clock)
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	// The statements are written even for a bad schema; they are never sent.
	schema, err := o.schema()
	d.sql = queriesFor(schema)
	// acquire_free answers only for the requests that it granted, hence the state.
	d.acquires = together{d: d, one: d.sql.acquire, free: d.sql.acquireFree, columns: requests, done: "granted"}
	d.releases = together{d: d, one: d.sql.release, free: d.sql.releaseFree, columns: func(calls []*call) []any {
		return []any{column[string](calls, 0), column[string](calls, 1), column[int64](calls, 2)}
	}, done: "ended"}
	// The declaration before a probe: see exclusionOf.
	d.described.Store(d.describe(facts{}))
	switch {
	case pool == nil:
		d.unfit = kit.InvalidOption("pool", "nil", "it is nil")
	case err != nil:
		d.unfit = err
	default:
		d.connect(pool.Config())
	}
	if o.Listen != "" {
		if d.listenAt, err = pgx.ParseConfig(o.Listen); err != nil {
			d.unfit = kit.InvalidOption("Listen", "…", "pgx cannot read it")
		}
	}
	return d
}

// IssuesFencingTokens makes the promise of backend.FencingDriver: a token is computed in the step that grants, on a row
// never deleted, from the server's timeline and log position. The package comment names the conditions.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// Describe returns the capabilities of the driver with the current server, without I/O. Exclusion and TokenSpace are
// known after the first Ping or call, and Exclusion may change with each probe; CapPushLoss is set while notifications
// arrive.
func (d *Driver) Describe() backend.Description { return *d.described.Load() }

// begin counts a call in, whatever the state of the server; gate.Leave follows unless it fails.
func (d *Driver) begin(ctx context.Context) error {
	if d.unfit != nil {
		return d.unfit
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return d.gate.Enter()
}

// enterFor is enter for a call on one name.
func (d *Driver) enterFor(ctx context.Context, name string) error {
	if err := backend.ValidateName(name); err != nil {
		return err
	}
	return d.enter(ctx)
}

// enter counts a call in and makes sure that the server is fit: the first call of a driver, and the first after a
// promotion, wait for a probe. Later probes run in the background, one per probeEvery at most, started by the call
// that finds the last probe old. A driver that has lost its history refuses the call here, before it sends anything.
func (d *Driver) enter(ctx context.Context) error {
	if err := d.begin(ctx); err != nil {
		return err
	}
	if err := d.history(); err != nil {
		d.gate.Leave()
		return err
	}
	if !d.probed.Load() {
		if err := d.probe(ctx); err != nil {
			d.gate.Leave()
			return err
		}
	} else if last := d.looked.Load(); d.clock.Now().Sub(backend.Instant(last)) > probeEvery &&
		d.looked.CompareAndSwap(last, int64(d.clock.Now())) {
		// The call that swaps first starts the probe, and itself continues with the last probe's result.
		d.gate.Go(func(ctx context.Context) {
			bounded, cancel := context.WithTimeout(ctx, callTime)
			defer cancel()
			_ = d.probe(bounded) // a later call repeats a failed probe
		})
	}
	return nil
}

// enterHeld is enter for calls about holds that exist. Holds can be kept and released on a server that has become
// unfit, but not after a lost history.
func (d *Driver) enterHeld(ctx context.Context) error {
	err := d.begin(ctx)
	if err != nil {
		return err
	}
	if err = d.history(); err == nil && !d.probed.Load() {
		if err = d.probe(ctx); errors.Is(err, backend.ErrMisconfigured) {
			err = nil
		}
	}
	if err != nil {
		d.gate.Leave()
	}
	return err
}

// probeEvery is the interval at which a driver in use probes the server's settings, besides the first probe and one
// after each promotion. It notices a new standby, or fsync switched off, within this time, whatever the TTL.
const probeEvery = 30 * time.Second

// Close ends waiters with backend.ErrClosed, waits for calls and background work in progress, ends the driver's
// sessions, and closes its connections. Holds that were not released end with their sessions, immediately if the
// server can be reached and after their TTL otherwise; their holders are not notified.
//
// It takes at most 10 s, whatever ctx allows, and returns the first error that kept a session from being ended. A
// second call has no effect and returns nil.
func (d *Driver) Close(ctx context.Context) error {
	if d.unfit != nil || !d.gate.Close() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, closeTime)
	defer cancel()
	err := d.gate.Wait(ctx)
	// Each row is deleted, with the holds on it, so that the names are free immediately.
	for _, s := range d.sessions.Live() {
		if d.sessions.End(s) && err == nil {
			err = s.remove(ctx)
		}
	}
	// Notify the waiters that the end of the sessions has let in: notifyAll no longer runs.
	d.notify(ctx)
	closed := make(chan struct{})
	go func() { // ends with the last connection: each is bounded by the calls above
		d.pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-ctx.Done():
	}
	if err != nil {
		return callError("close", "", err)
	}
	return nil
}

// closeTime bounds Close, whatever its context allows: an unresponsive server must not keep a program from ending, and
// its sessions end after the TTL anyway.
const closeTime = 10 * time.Second

// validate refuses requests that the contract forbids or the tables cannot hold: PostgreSQL stores no NUL in text.
func (d *Driver) validate(rs ...backend.Request) error {
	if err := kit.ValidateSet(d.Describe(), rs); err != nil {
		return err
	}
	for _, r := range rs {
		for k, v := range r.Metadata {
			if strings.ContainsRune(k+v, 0) {
				return kit.InvalidOption("metadata", strconv.Quote(k),
					"key or value contains NUL, which PostgreSQL does not store")
			}
		}
	}
	return nil
}
