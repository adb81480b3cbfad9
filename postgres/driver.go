package postgres

import (
	"cmp"
	"context"
	"iter"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
)

const driverName = "postgres"

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
// Inspector, Lister, Pager, Watcher, ForceReleaser, MultiAcquirer and Pinger. All methods are safe for concurrent use.
type Driver struct {
	*engine.Driver
	service *service
}

var (
	_ backend.FencingDriver = (*Driver)(nil)
	_ backend.Pinger        = (*Driver)(nil)
	_ backend.Inspector     = (*Driver)(nil)
	_ backend.Pager         = (*Driver)(nil)
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
	if pool == nil {
		return newDriver(nil, kit.InvalidOption("pool", "nil", "it is nil"), o)
	}
	return newDriver(pool.Config(), nil, o)
}

// newDriver returns a driver with connections of these settings, or with the reason why there are none.
func newDriver(config *pgxpool.Config, unfit error, o *Options) *Driver {
	if o == nil {
		o = &Options{}
	}
	schema, err := o.schema()
	s := &service{
		unfit: cmp.Or(unfit, err), sql: queriesFor(schema), // written even for a bad schema, and never sent
		clock: cmp.Or(o.Clock, backend.SystemClock()), log: cmp.Or(o.Logger, slog.New(slog.DiscardHandler)),
		id: backend.NewRequestID()[:16], noListen: o.NoListen, gate: kit.NewGate(), phase: rand.N(restEvery),
		ignored: append([]string{}, o.IgnoreStandbys...), // not nil, which would be null in SQL
		live:    map[*session]struct{}{}, paces: map[string]pace{},
	}
	s.life, s.end = context.WithCancel(context.Background())
	s.acquires, s.releases = engine.NewBatch(mostCalls, s.acquireAll), engine.NewBatch(mostCalls, s.releaseAll)
	s.described.Store(s.describe(facts{})) // before a probe: see exclusionOf
	if o.Listen != "" {
		if s.listenAt, err = pgx.ParseConfig(o.Listen); err != nil {
			s.unfit = kit.InvalidOption("Listen", "…", "pgx cannot read it")
		}
	}
	if s.unfit == nil {
		s.connect(config)
	}
	return &Driver{Driver: engine.New(s), service: s}
}

// IssuesFencingTokens makes the promise of backend.FencingDriver: a token is computed in the step that grants, on a row
// never deleted, from the server's timeline and log position. The package comment names the conditions.
func (d *Driver) IssuesFencingTokens() backend.Driver { return d }

// ListAfter implements backend.Pager.
func (d *Driver) ListAfter(ctx context.Context, prefix, after string) iter.Seq2[backend.State, error] {
	return engine.ListAfter(ctx, d.Driver, prefix, after)
}
