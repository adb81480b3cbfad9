package postgres_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/postgres"
)

// mutant is a schema with one fault that other implementations have.
type mutant struct {
	what   string
	schema string
	change [][2]string // replacements in the migrations' text: old, new
}

const (
	counts  = "token = token + 1\n"
	tokenIs = "token = greatest(token + 1, fencelock.position())\n"
)

var (
	asItIs = mutant{what: "nothing", schema: "as_it_is"}

	counter = mutant{
		what: "the token is a counter in the row", schema: "counter", change: [][2]string{{tokenIs, counts}},
	}

	// pg_control_checkpoint returns the previous timeline until the first checkpoint after a promotion.
	controlFile = mutant{what: "the timeline is that of the control file", schema: "control_file", change: [][2]string{{
		"('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint << 43",
		"(select timeline_id from pg_control_checkpoint())::bigint << 43",
	}}}

	rowDeleted = mutant{what: "the row of a name is deleted with its last hold", schema: "row_deleted",
		change: [][2]string{
			{tokenIs, counts},
			{"	a.wake := fencelock.settle(nm);\n\tend if;\n\treturn a;", `	a.wake := fencelock.settle(nm);
			end if;
			delete from fencelock.names where name = nm and not exists (select 1 from fencelock.holds where name = nm);
			return a;`},
		}}

	// The values of an INSERT are computed before it waits for a conflicting row of another transaction.
	inserted = mutant{what: "the token is computed in the INSERT", schema: "inserted", change: [][2]string{
		{tokenIs, "token = token\n"},
		{"insert into fencelock.names (name) values (nm) on conflict do nothing", `insert into fencelock.names (name, token)
			values (nm, fencelock.position()) on conflict do nothing`},
		{"	a.wake := fencelock.settle(nm);\n\tend if;\n\treturn a;", `	a.wake := fencelock.settle(nm);
			end if;
			delete from fencelock.names where name = nm and not exists (select 1 from fencelock.holds where name = nm);
			return a;`},
	}}

	unprolonged = mutant{what: "a promotion prolongs nothing", schema: "unprolonged", change: [][2]string{
		{"renewed_at = clock_timestamp(), suspected_at = null,\n\t\t\texpires_at = clock_timestamp() + ttl;", "ttl = ttl;"},
	}}

	// Data that is read beside an awaited row is as old as the statement.
	unlocked = mutant{what: "calls together look before they have the rows", schema: "unlocked", change: [][2]string{
		{"		for update skip locked) n;\n\twith asked", "		) n;\n\twith asked"},
	}}

	// A jump of the server's clock makes each session look expired.
	firstSight = mutant{what: "a session that looks expired is ended at once", schema: "first_sight",
		change: [][2]string{{"return coalesce(s.expires_at <= now and", "return coalesce(s.expires_at <= now or"}}}

	transactionTime = mutant{what: "time is the start of the transaction", schema: "transaction_time",
		change: [][2]string{
			{"clock_timestamp()", "now()"},
		}}
)

// apply makes the mutant's schema, and returns the options of a driver that uses it.
func (m mutant) apply(t testing.TB, url string) *postgres.Options {
	t.Helper()
	o := &postgres.Options{Schema: m.schema}
	steps, err := postgres.Migrations(o)
	if err != nil {
		t.Fatal(err)
	}
	conn := connect(t, url)
	for _, step := range steps {
		sql := step.SQL
		for _, c := range m.change {
			was, is := strings.ReplaceAll(c[0], "fencelock.", m.schema+"."),
				strings.ReplaceAll(c[1], "fencelock.", m.schema+".")
			if !slices.ContainsFunc(steps, func(s postgres.Migration) bool { return strings.Contains(s.SQL, was) }) {
				t.Fatalf("%s: the migrations do not say %q any more", m.what, was)
			}
			sql = strings.ReplaceAll(sql, was, is)
		}
		if _, err := conn.PgConn().Exec(soon(t, 20*time.Second), sql).ReadAll(); err != nil {
			t.Fatalf("%s: %v", m.what, err)
		}
	}
	return o
}

func connect(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(soon(t, 20*time.Second), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// patient is connect for statements that may have to wait longer for a row than the driver's statements do.
func patient(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	conn := connect(t, url)
	if _, err := conn.Exec(soon(t, 20*time.Second), `set lock_timeout = '1min'`); err != nil {
		t.Fatal(err)
	}
	return conn
}

// caught fails the test unless err, the result of a check of m, is an error for a mutant, and nil for asItIs.
func (m mutant) caught(t testing.TB, by string, err error) {
	t.Helper()
	switch {
	case len(m.change) == 0 && err != nil:
		t.Errorf("%s: %v", by, err)
	case len(m.change) > 0 && err == nil:
		t.Errorf("%s: %s did not show", m.what, by)
	case len(m.change) > 0:
		t.Logf("%s: %v", m.what, err)
		testfindings.Write(t, testfindings.Mutant{What: "postgres: " + m.what, Killers: by})
	}
}

// TestMutants shows that the tests below, and a clause, fail for schemas with one fault.
func TestMutants(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	for name, c := range map[string]struct {
		mutant mutant
		test   func(*testing.T, *containers.PostgresServer, *postgres.Options) error
	}{
		"F1":                                {rowDeleted, f1},
		"token is computed behind the wait": {inserted, tokenBehindTheWait},
		"rows are had before they are seen": {unlocked, grantedTogether},
		"time passes in a transaction":      {transactionTime, timePasses},
		"clock jumps":                       {firstSight, clockJumped},
	} {
		t.Run(name, func(t *testing.T) {
			for _, m := range []mutant{asItIs, c.mutant} {
				m.schema += "_" + strings.ToLower(name[:2])
				m.caught(t, name, c.test(t, server, m.apply(t, server.URL())))
			}
		})
	}
}

// f1 is the clause: if a row is deleted, the counter in it is lost.
func f1(t *testing.T, server *containers.PostgresServer, o *postgres.Options) error {
	h := harness(server, nil)
	h.New = func(t testing.TB) backend.Driver { return postgres.New(newPool(t, server.URL()), o) }
	for _, r := range conformance.Check(t, h, "F1") {
		if r.Outcome != conformance.Passed {
			return errors.New(r.Messages[0])
		}
	}
	return nil
}

// tokenBehindTheWait: a token must be computed from data that is read after the wait for the row of the name.
func tokenBehindTheWait(t *testing.T, server *containers.PostgresServer, o *postgres.Options) error {
	d := postgres.New(newPool(t, server.URL()), o)
	defer closeDriver(t, d)
	if err := d.Ping(soon(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	conn := connect(t, server.URL())
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	in := func(sql string, args ...any) (token int64) {
		t.Helper()
		row := tx.QueryRow(soon(t, 20*time.Second), strings.ReplaceAll(sql, "fencelock.", o.Schema+"."), args...)
		if err := row.Scan(&token); err != nil {
			t.Fatal(err)
		}
		return token
	}
	acquire := func() int64 {
		return in(`select token from fencelock.acquire(row('x', 'request-by-hand', 'h', 'by-hand', 'hand', 0, 0, 0, 0, null, null,
			false, null, null)::fencelock.holds, false, null)`)
	}
	release := func() {
		in(`select coalesce(token, 0) from fencelock.release('x', 'request-by-hand', 0, false)`)
	}
	execute(t, server, strings.ReplaceAll(`select fencelock.begin_session('by-hand', 'nobody', 60000)`, "fencelock.",
		o.Schema+"."))
	acquire() // from here on this transaction has the row
	got := make(chan error, 1)
	var g backend.Grant
	go func() {
		var err error
		g, err = d.Acquire(t.Context(), request("x", 20*time.Second))
		got <- err
	}()
	blocked(t, server.URL(), "acquire")
	release()
	last := acquire() // the last grant before the other one
	release()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	if int64(g.Token) <= last {
		return errors.New("a token is not greater than that of the hold before, which was granted while it waited for the row")
	}
	return nil
}

// grantedTogether: calls that share a statement are not granted a name that another transaction is granting.
func grantedTogether(t *testing.T, server *containers.PostgresServer, o *postgres.Options) error {
	in := func(sql string) string { return strings.ReplaceAll(sql, "fencelock.", o.Schema+".") }
	const hold = `row('x', 'request-' || $1, 'h', $1, 'hand', 0, 0, 0, 0, null, null, false, null, null)::fencelock.holds`
	keeper, asker := connect(t, server.URL()), patient(t, server.URL())
	for _, session := range []string{"keeper", "asker"} {
		if _, err := asker.Exec(
			t.Context(), in(`select fencelock.begin_session($1, 'nobody', 60000)`), session,
		); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := asker.Exec(t.Context(), in(`insert into fencelock.names (name) values ('x')`)); err != nil {
		t.Fatal(err)
	}
	tx, err := keeper.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var state string
	row := tx.QueryRow(soon(t, 20*time.Second),
		in(`select state from fencelock.acquire(`+hold+`, false, null)`), "keeper")
	if err := row.Scan(&state); err != nil || state != "granted" {
		t.Fatal(state, err)
	}
	granted := make(chan int, 1)
	go func() {
		var n int
		row := asker.QueryRow(soon(t, 60*time.Second),
			in(`select coalesce(cardinality(places), 0) from fencelock.acquire_free(array[`+hold+`])`),
			"asker")
		if err := row.Scan(&n); err != nil {
			t.Error(err)
		}
		granted <- n
	}()
	n := -1
	for n < 0 && !waits(t, server.URL(), "acquire_free") {
		select {
		case n = <-granted:
		case <-time.After(10 * time.Millisecond):
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n < 0 {
		n = <-granted
	}
	if n > 0 {
		return errors.New("a second holder was granted")
	}
	return nil
}

// blocked waits until a statement with the text waits for a lock.
func blocked(t testing.TB, url, text string) {
	t.Helper()
	for ctx := soon(t, 20*time.Second); !waits(t, url, text); time.Sleep(10 * time.Millisecond) {
		if ctx.Err() != nil {
			t.Fatalf("nothing with %q waits for a lock", text)
		}
	}
}

// waits reports whether a statement with the text waits for a lock.
func waits(t testing.TB, url, text string) (yes bool) {
	t.Helper()
	ctx := soon(t, 20*time.Second)
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	row := conn.QueryRow(ctx, `select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock' and query like '%' || $1 || '%'
		and pid <> pg_backend_pid()`, text)
	if err := row.Scan(&yes); err != nil {
		t.Fatal(err)
	}
	return yes
}

// clockJumped: a new client does not end a session that looks expired.
func clockJumped(t *testing.T, server *containers.PostgresServer, o *postgres.Options) error {
	in := func(sql string) string { return strings.ReplaceAll(sql, "fencelock.", o.Schema+".") }
	for _, sql := range []string{
		`select fencelock.begin_session('holder', 'nobody', 60000)`,
		`select fencelock.acquire(row('x', 'request-by-hand', 'h', 'holder', 'hand', 0, 0, 0, 0, null, null, false, null,
			null)::fencelock.holds, false, null)`,
		`update fencelock.sessions set renewed_at = renewed_at - interval '1 hour',
			expires_at = expires_at - interval '1 hour'`,
	} {
		execute(t, server, in(sql))
	}
	d := postgres.New(newPool(t, server.URL()), o)
	defer closeDriver(t, d)
	switch _, err := d.Acquire(soon(t, 20*time.Second), request("x", time.Minute)); {
	case err == nil:
		return errors.New("a new client is granted the lock of a session that it has not watched")
	case !errors.Is(err, backend.ErrHeld):
		t.Fatal(err)
	}
	return nil
}

// vouches is the argument of fencelock.seen of a caller that has seen the server's clock run evenly from 1970 to 2255.
const vouches = "1 9000000000000000 0"

// timePasses: a session that expires while its request waits for the row of the name gets no grant.
func timePasses(t *testing.T, server *containers.PostgresServer, o *postgres.Options) error {
	in := func(sql string) string { return strings.ReplaceAll(sql, "fencelock.", o.Schema+".") }
	keeper, asker := connect(t, server.URL()), patient(t, server.URL())
	if _, err := asker.Exec(t.Context(), in(`insert into fencelock.names (name) values ('x')`)); err != nil {
		t.Fatal(err)
	}
	tx, err := keeper.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), in(`select 1 from fencelock.names for update`)); err != nil {
		t.Fatal(err)
	}
	if _, err := asker.Exec(t.Context(), in(`select fencelock.begin_session('s', 'nobody', 60000)`)); err != nil {
		t.Fatal(err)
	}
	state := make(chan string, 1)
	go func() {
		var s string
		row := asker.QueryRow(t.Context(), in(`select state from fencelock.acquire(fencelock.seen(row('x',
			'request-by-hand', 'h', 's', 'hand', 0, 0, 0, 0, null, null, false, null, null)::fencelock.holds, '`+vouches+`'), false, null)`))
		if err := row.Scan(&s); err != nil {
			s = err.Error()
		}
		state <- s
	}()
	blocked(t, server.URL(), o.Schema+".acquire")
	if _, err := tx.Exec(t.Context(), in(
		`update fencelock.sessions set expires_at = pg_catalog.clock_timestamp() where id = 's'`,
	)); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	switch s := <-state; s {
	case "no-session":
		return nil
	case "granted":
		return errors.New("a session whose time was over was granted a lock")
	default:
		t.Fatal(s)
	}
	return nil
}
