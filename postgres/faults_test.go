package postgres_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/postgres"
)

// A waiter still acquires when its client's listening connection is ended, and losses are pushed again afterwards.
func TestListenerIsEnded(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	a, b := postgres.New(newPool(t, server.URL()), nil), postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, a)
	defer closeDriver(t, b)
	admin := connect(t, server.URL())
	listeners := func() (n int) {
		t.Helper()
		row := admin.QueryRow(soon(t, 20*time.Second),
			`select count(*) from pg_stat_activity where query like 'listen %'`)
		if err := row.Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	listening := func() {
		t.Helper()
		for ctx := soon(t, 30*time.Second); listeners() == 0; time.Sleep(10 * time.Millisecond) {
			if ctx.Err() != nil {
				t.Fatal("nobody listens")
			}
		}
	}
	g := take(t, a, "x")
	lost := make(chan backend.Reason, 4)
	got := make(chan backend.Grant, 1)
	go func() {
		r := request("x", time.Minute)
		r.Wait = true
		r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
		next, err := b.Acquire(soon(t, time.Minute), r)
		if err != nil {
			t.Errorf("the waiter: %v", err)
		}
		got <- next
	}()
	listening()
	execute(t, server, `select pg_terminate_backend(pid) from pg_stat_activity where query like 'listen %'`)
	if err := a.Release(soon(t, 20*time.Second), g); err != nil {
		t.Fatal(err)
	}
	if next := <-got; next.Token <= g.Token {
		t.Errorf("the waiter has token %v after %v", next.Token, g.Token)
	}
	listening()
	if err := a.ForceRelease(soon(t, 20*time.Second), backend.ForceRequest{Name: "x", Reason: "a test"}); err != nil {
		t.Fatal(err)
	}
	select {
	case why := <-lost:
		if why != backend.ReasonForceReleased {
			t.Errorf("the reason is %q", why)
		}
	case <-time.After(20 * time.Second): // its renewals would notice after a third of its minute
		t.Error("the loss was not pushed")
	}
}

// The request that makes a session's row loses its answer and is repeated: grants on the session are not valid for
// longer than the row.
func TestSessionWithUnansweredStart(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	addr, link := server.NewLink(t)
	d := postgres.New(newPool(t, urlOf(addr)), nil)
	defer closeDriver(t, d)
	if err := d.Ping(soon(t, 30*time.Second)); err != nil {
		t.Fatal(err)
	}
	link.Drop(fault.Replies)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	if _, err := d.Acquire(ctx, request("x", time.Minute)); err == nil {
		t.Fatal("an acquire without an answer = nil")
	}
	link.Pass()
	g, err := d.Acquire(soon(t, 30*time.Second), request("y", time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	var left float64 // seconds
	row := connect(t, server.URL()).QueryRow(soon(t, 30*time.Second), `select count(*)::int,
		extract(epoch from min(expires_at) - clock_timestamp())::float8 from fencelock.sessions`)
	var sessions int
	if err := row.Scan(&sessions, &left); err != nil || sessions != 1 {
		t.Fatalf("%d sessions, %v; want one", sessions, err)
	}
	is := d.Describe()
	ends := is.Clock.Now().Add(time.Duration(left * float64(time.Second))) // or earlier
	if believed := g.SentAt.Add(is.Validity(g.TTL)); believed > ends {
		t.Errorf("the hold is believed for %v longer than its session lives", believed.Sub(ends))
	}
}

// The schema is dropped under a holder, and made again: the holder's driver detects the loss of history, and later
// clients get greater tokens.
func TestSchemaIsDropped(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	held := take(t, d, "x")
	execute(t, server, `drop schema fencelock cascade`)
	_, err := d.Acquire(soon(t, 20*time.Second), request("y", time.Minute))
	if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), "migrate") {
		t.Errorf("without the schema: %v, want ErrMisconfigured that names the remedy", err)
	}
	if err := d.Renew(
		soon(t, 20*time.Second), []backend.Grant{held},
	)[0].Err; !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("renewing without the schema: %v, want ErrMisconfigured", err)
	}
	migrate(t, newPool(t, server.URL()))
	if _, err := d.Acquire(
		soon(t, 20*time.Second), request("x", time.Minute),
	); !errors.Is(err, backend.ErrHistoryLost) {
		t.Errorf("the client that lived through it: %v, want ErrHistoryLost", err)
	}
	fresh := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, fresh)
	if next := take(t, fresh, "x"); next.Token <= held.Token {
		t.Errorf("token %v after %v", next.Token, held.Token)
	}
}

// A client that is cut off while it waits for a row leaves no waiting statement in the server, however long a foreign
// transaction locks the row. A client that keeps waiting is granted the lock when the transaction ends.
func TestDisconnectedClientLeavesNoWaitingStatement(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	addr, link := server.NewLink(t)
	cutOff, waiting := postgres.New(newPool(t, urlOf(addr)), nil), postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, cutOff)
	defer closeDriver(t, waiting)
	for _, d := range []*postgres.Driver{cutOff, waiting} {
		if err := d.Release(soon(t, 30*time.Second), take(t, d, "x")); err != nil {
			t.Fatal(err)
		}
	}
	tx := lockRow(t, server, "x")
	ask := func(ctx context.Context, d *postgres.Driver) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := d.Acquire(ctx, request("x", time.Minute))
			done <- err
		}()
		return done
	}
	ctx, hangUp := context.WithCancel(t.Context())
	defer hangUp()
	gone := ask(ctx, cutOff)
	blocked(t, server.URL(), "acquire")
	link.Hold(fault.Both) // the cancel request does not arrive either
	hangUp()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("the caller who hung up: %v, want its context's error", err)
	}
	for ctx := soon(t, time.Minute); waits(t, server.URL(), "acquire"); sleepFor(ctx, 20*time.Millisecond) {
		if ctx.Err() != nil {
			t.Fatal("what a client asked for that was cut off waits on in the server")
		}
	}
	link.Pass()
	patient := ask(soon(t, 2*time.Minute), waiting)
	blocked(t, server.URL(), "acquire")
	admin, since := connect(t, server.URL()), time.Time{}
	for ctx, began := soon(t, time.Minute), since; since.IsZero() ||
		!began.After(since); sleepFor(ctx, 20*time.Millisecond) {
		row := admin.QueryRow(ctx, `select coalesce(max(query_start), '0001-01-01 00:00+00') from pg_stat_activity
			where wait_event_type = 'Lock' and query like '%acquire%' and pid <> pg_backend_pid()`)
		if err := row.Scan(&began); err != nil {
			t.Fatalf("the caller who stays does not ask again: %v", err)
		}
		if since.IsZero() {
			since = began
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-patient; err != nil {
		t.Errorf("the caller who stayed: %v", err)
	}
}

// One foreign transaction locks the row of a name, and another one keeps an old snapshot: calls end with their
// contexts, other names are free, and all names work afterwards.
func TestForeignTransactions(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	if err := d.Release(soon(t, 20*time.Second), take(t, d, "x")); err != nil {
		t.Fatal(err)
	}
	old := connect(t, server.URL())
	if _, err := old.Exec(
		t.Context(), `begin isolation level repeatable read; select * from fencelock.names`,
	); err != nil {
		t.Fatal(err)
	}
	tx := lockRow(t, server, "x")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	r := request("x", time.Minute)
	if _, err := d.Acquire(ctx, r); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("behind somebody's transaction: %v, want the context's error", err)
	}
	take(t, d, "y")
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.Release(soon(t, 20*time.Second), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("giving back what the request left: %v", err)
	}
	take(t, d, "x")
}

// Calls that wait for a foreign transaction take no connection from renewals.
func TestRenewalPassesWaitingCalls(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	g := take(t, d, "renewed")
	if err := d.Release(soon(t, 30*time.Second), take(t, d, "locked")); err != nil {
		t.Fatal(err)
	}
	tx := lockRow(t, server, "locked")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var calls sync.WaitGroup
	for range 20 {
		calls.Go(func() {
			if _, err := d.Acquire(ctx, request("locked", time.Minute)); !errors.Is(err, context.Canceled) {
				t.Errorf("behind a foreign transaction: %v", err)
			}
		})
	}
	blocked(t, server.URL(), "acquire")
	for began := time.Now(); time.Since(began) < time.Second; {
		if r := d.Renew(soon(t, 3*time.Second), []backend.Grant{g})[0]; r.Err != nil {
			t.Fatalf("a renewal beside calls that wait: %v", r.Err)
		}
	}
	cancel()
	calls.Wait()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// lockRow locks the row of a name in a foreign transaction, and returns that.
func lockRow(t testing.TB, server interface{ URL() string }, name string) pgx.Tx {
	t.Helper()
	tx, err := connect(t, server.URL()).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `select 1 from fencelock.names where name = $1 for update`, name); err != nil {
		t.Fatal(err)
	}
	return tx
}
