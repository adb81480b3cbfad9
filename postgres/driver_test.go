package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/postgres"
)

func TestBadArguments(t *testing.T) {
	t.Parallel()
	for what, d := range map[string]*postgres.Driver{
		"nil pool":   postgres.New(nil, nil),
		"bad schema": postgres.New(nil, &postgres.Options{Schema: `x"; drop`}),
		"bad listen": postgres.New(nil, &postgres.Options{Listen: "postgres://u:secret@h:x"}),
	} {
		_, err := d.Acquire(t.Context(), request("x", time.Minute))
		var invalid *backend.InvalidError
		if !errors.As(err, &invalid) || strings.Contains(err.Error(), "%!") || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: acquire = %v, want an *InvalidError", what, err)
		}
		if err := d.Ping(t.Context()); !errors.As(err, &invalid) {
			t.Errorf("%s: ping = %v, want an *InvalidError", what, err)
		}
		if err := d.Close(t.Context()); err != nil {
			t.Errorf("%s: close = %v", what, err)
		}
	}
	if _, err := postgres.Migrations(&postgres.Options{Schema: "1"}); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("Migrations for schema 1 = %v", err)
	}
}

func TestURLs(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	closed := freeport.Addresses(t, 1)[0]
	for url, want := range map[string]struct {
		class error
		text  string
	}{
		"postgres://":                           {backend.ErrInvalidOption, "empty address"},
		"postgres:///db":                        {backend.ErrInvalidOption, "empty address"},
		"postgres://u@h/db?schema=a-b":          {backend.ErrInvalidOption, "schema"},
		"postgres://u@h/db?no-listen=1":         {backend.ErrInvalidOption, "no-listen"},
		"postgres://u@h/db?timeout=5":           {backend.ErrInvalidOption, "timeout"},
		"postgres://u@h/db?schema=a&schema=b":   {backend.ErrInvalidOption, "2 times"},
		"postgres://u@h/db?sslmode=perhaps":     {backend.ErrInvalidOption, "sslmode"},
		"postgres://u:secret@" + closed + "/db": {backend.ErrUnavailable, "refused"},
	} {
		_, err := backend.Open(ctx, url)
		if !errors.Is(err, want.class) || !strings.Contains(err.Error(), want.text) ||
			strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want %v with %q", url, err, want.class, want.text)
		}
	}
}

func TestMigrationsMeet(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for _, schema := range []string{"", "other"} {
				_, err := postgres.Migrate(t.Context(), newPool(t, server.URL()), &postgres.Options{Schema: schema})
				if err != nil {
					t.Errorf("schema %q: %v", schema, err)
				}
			}
		})
	}
	all.Wait()
	// Two schemas are two lock services; the error of a missing schema names the remedy.
	pool := newPool(t, server.URL())
	a, b, none := postgres.New(pool, nil), postgres.New(pool, &postgres.Options{Schema: "other"}),
		postgres.New(pool, &postgres.Options{Schema: "none"})
	for _, d := range []*postgres.Driver{a, b, none} {
		defer closeDriver(t, d)
	}
	take(t, a, "x")
	take(t, b, "x")
	if err := none.Ping(t.Context()); !errors.Is(err, backend.ErrMisconfigured) ||
		!strings.Contains(err.Error(), "migrate") {
		t.Errorf("without a schema: %v", err)
	}
}

func TestCloseEndsItsSessions(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d := postgres.New(newPool(t, server.URL()), nil)
	for i, ttl := range []time.Duration{2 * time.Second, time.Minute} {
		r := request(fmt.Sprint("x", i), ttl)
		if _, err := d.Acquire(soon(t, 20*time.Second), r); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Close(soon(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), server.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	var left int
	row := conn.QueryRow(t.Context(),
		`select (select count(*) from fencelock.sessions) + (select count(*) from fencelock.holds)`)
	if err := row.Scan(&left); err != nil || left != 0 {
		t.Errorf("after Close %d sessions and holds, %v", left, err)
	}
}

// A renewal for a longer TTL moves a hold to another session; a renewal for a shorter TTL never ends it earlier.
func TestRenewalNeverShortens(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	g, err := d.Acquire(soon(t, 20*time.Second), request("x", 20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	for _, ttl := range []time.Duration{time.Hour, 2 * time.Second} {
		g.TTL = ttl
		if r := d.Renew(soon(t, 20*time.Second), []backend.Grant{g})[0]; r.Err != nil || r.TTL < ttl {
			t.Fatalf("renewal for %v = %+v", ttl, r)
		}
	}
	st, err := d.Look(soon(t, 20*time.Second), "x")
	if err != nil || len(st.Holders) != 1 || st.Holders[0].ExpiresIn < 50*time.Minute {
		t.Errorf("after renewals for an hour and for two seconds: %+v, %v", st, err)
	}
}

func TestTx(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	pool := newPool(t, server.URL())
	execute(t, server, `create table accounts (id text primary key, balance int)`)
	execute(t, server, `insert into accounts values ('42', 100)`)
	execute(t, server, `create trigger fenced after insert or update or delete on accounts
		for each row execute function fencelock.require_guard('accounts/', 'id')`)
	execute(t, server, `create trigger fenced_truncate before truncate on accounts
		for each statement execute function fencelock.require_guard('accounts/', 'id')`)
	debit := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `update accounts set balance = balance - 10 where id = '42'`)
		return err
	}
	balance := func() (n int) {
		if err := pool.QueryRow(t.Context(), `select balance from accounts`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	claim := func(token fencing.Token) fencing.Claim {
		return fencing.Claim{Resource: "accounts/42", Token: token, Space: "here"}
	}
	for _, token := range []fencing.Token{7, 7, 9} {
		if err := postgres.Tx(t.Context(), pool, claim(token), debit); err != nil {
			t.Fatalf("token %v: %v", token, err)
		}
	}
	var stale *fencing.StaleError
	if err := postgres.Tx(t.Context(), pool, claim(8), debit); !errors.As(err, &stale) || stale.Highest != 9 {
		t.Errorf("a stale token: %v, want a *StaleError with 9", err)
	}
	elsewhere := claim(10)
	elsewhere.Space = "there"
	for what, c := range map[string]struct {
		claim fencing.Claim
		want  error
	}{
		"another space": {elsewhere, fencing.ErrSpace},
		"no token":      {claim(0), fencing.ErrNoToken},
		"shared":        {claim(fencing.Token(11).NotExclusive()), fencing.ErrNotExclusive},
	} {
		if err := postgres.Tx(t.Context(), pool, c.claim, debit); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
	// A write without a check is refused, and so is a write after a check of another claim, and a failed section leaves
	// no change.
	var pg *pgconn.PgError
	if _, err := pool.Exec(t.Context(), `update accounts set balance = 0`); !errors.As(err, &pg) || pg.Code != "FL403" {
		t.Errorf("a write that did not ask: %v, want FL403", err)
	}
	if _, err := pool.Exec(t.Context(), `truncate accounts`); !errors.As(err, &pg) || pg.Code != "FL403" {
		t.Errorf("truncate: %v, want FL403", err)
	}
	other := fencing.Claim{Resource: "accounts/43", Token: 1, Space: "here"}
	if err := postgres.Tx(t.Context(), pool, other, debit); !errors.As(err, &pg) || pg.Code != "FL403" {
		t.Errorf("a write to another resource: %v, want FL403", err)
	}
	failed := errors.New("failed")
	err := postgres.Tx(t.Context(), pool, claim(20), func(ctx context.Context, tx pgx.Tx) error {
		return errors.Join(debit(ctx, tx), failed)
	})
	if !errors.Is(err, failed) {
		t.Errorf("a section that fails = %v", err)
	}
	if err := postgres.Tx(t.Context(), pool, claim(12), debit); err != nil {
		t.Errorf("after a section with token 20 was rolled back, token 12: %v", err)
	}
	// The same check in SQL, for programs without pgx.
	inSQL := func(token int) error {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback(t.Context()) }()
		if _, err := tx.Exec(t.Context(), `select fencelock.guard('accounts/42', $1, 'here')`, token); err != nil {
			return err
		}
		return errors.Join(debit(t.Context(), tx), tx.Commit(t.Context()))
	}
	if err := inSQL(13); err != nil {
		t.Errorf("fencelock.guard with token 13: %v", err)
	}
	if err := inSQL(12); !errors.As(err, &pg) || pg.Code != "FL409" || pg.Detail != "13" {
		t.Errorf("fencelock.guard with token 12 after 13: %v, want FL409 with 13", err)
	}
	hold := func(nonce, generation string) error {
		_, err := pool.Exec(t.Context(), `select fencelock.guard('held', 33, 'here', $1, $2)`, generation, nonce)
		return err
	}
	one, two := fencing.NewNonce().String(), fencing.NewNonce().String()
	for _, step := range []struct{ nonce, generation, code string }{
		{"", "0", ""}, {one, "0", ""}, {two, "0", "FL411"}, {"", "0", "FL411"}, {one, "0", ""},
		{one, "1." + one, ""}, {two, "1." + two, "FL410"}, {one, "0", "FL409"}, {one, "1", "FL400"}, {"x", "0", "FL400"},
	} {
		pg = nil
		err := hold(step.nonce, step.generation)
		if errors.As(err, &pg); (err == nil) != (step.code == "") || err != nil && (pg == nil || pg.Code != step.code) {
			t.Errorf("fencelock.guard with the nonce %q and the generation %q: %v, want %q", step.nonce, step.generation, err,
				step.code)
		}
	}
	if n := balance(); n != 50 {
		t.Errorf("the balance is %d after five debits of 10 from 100", n)
	}
}

// leaping is a clock ahead of the system's.
type leaping struct{ ahead atomic.Int64 }

func (c *leaping) Now() backend.Instant {
	return backend.SystemClock().Now().Add(time.Duration(c.ahead.Load()))
}

// A driver in use examines the server's settings every 30 s: it refuses a server that has become unfit, and uses it
// again immediately when it is fit.
func TestSettingsAreLookedAtAgain(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	clock := &leaping{}
	d := postgres.New(newPool(t, server.URL()), &postgres.Options{Clock: clock})
	defer closeDriver(t, d)
	tries := 0
	try := func() error {
		tries++ // each try has its own name, since a release is refused, too
		// Its renewals also examine the settings, but come after the end of the test.
		r := request(fmt.Sprint("x", tries), 12*time.Hour)
		g, err := d.Acquire(soon(t, 20*time.Second), r)
		if err == nil {
			err = d.Release(soon(t, 20*time.Second), g)
		}
		return err
	}
	if err := try(); err != nil {
		t.Fatal(err)
	}
	set := func(value string) {
		t.Helper()
		execute(t, server, `alter system set full_page_writes = `+value)
		execute(t, server, `select pg_reload_conf()`)
		for ctx := soon(t, time.Minute); ; sleepFor(ctx, 20*time.Millisecond) {
			var now string
			if err := connect(t, server.URL()).QueryRow(
				ctx, `select current_setting('full_page_writes')`,
			).Scan(&now); err != nil {
				t.Fatalf("full_page_writes is not %s: %v", value, err)
			}
			if now == value {
				return
			}
		}
	}
	set("off")
	clock.ahead.Add(int64(31 * time.Second))
	for ctx := soon(t, 20*time.Second); ; sleepFor(ctx, 20*time.Millisecond) {
		err := try()
		if errors.Is(err, backend.ErrMisconfigured) && strings.Contains(err.Error(), "full_page_writes") {
			break
		}
		if err != nil || ctx.Err() != nil {
			t.Fatalf("on a server that has become unfit: %v, want ErrMisconfigured", err)
		}
	}
	set("on")
	if err := try(); err != nil {
		t.Errorf("on a server that is fit again: %v", err)
	}
}

// Behind a pooler in transaction mode notifications do not arrive. The driver detects that, reports it, and polls.
func TestBehindATransactionPooler(t *testing.T) {
	t.Parallel()
	pool := newPool(t, urlOf(pooler(t, migrated(t), "transaction")))
	ctx := soon(t, 60*time.Second)
	a, b := postgres.New(pool, nil), postgres.New(pool, nil)
	defer closeDriver(t, a)
	defer closeDriver(t, b)
	g := take(t, a, "x")
	got := make(chan backend.Grant, 1)
	go func() {
		r := request("x", 10*time.Second)
		r.Wait = true
		next, err := b.Acquire(ctx, r)
		if err != nil {
			t.Errorf("the waiter: %v", err)
		}
		got <- next
	}()
	for b.Describe().Capabilities.Has(backend.CapPushLoss) && ctx.Err() == nil {
		time.Sleep(20 * time.Millisecond) // until it has detected that
	}
	if err := a.Release(ctx, g); err != nil {
		t.Fatal(err)
	}
	if next := <-got; next.Token <= g.Token {
		t.Errorf("the waiter has token %v after %v", next.Token, g.Token)
	}
	if desc := b.Describe(); desc.Capabilities.Has(backend.CapPushLoss) || desc.Polling != time.Second {
		t.Errorf("behind the pooler %v and polling every %v are declared", desc.Capabilities, desc.Polling)
	}
}

// When all waiters poll, the end of a long queue polls rarely while its head looks often.
func TestPollIntervalGrowsWithTheQueue(t *testing.T) {
	t.Parallel()
	const n, rounds = 16, 6
	server := migrated(t)
	ctx := soon(t, 60*time.Second)
	holder := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, holder)
	g := take(t, holder, "x")
	type turn struct {
		of int
		g  backend.Grant
	}
	turns := make(chan turn, n)
	drivers, links := make([]*postgres.Driver, n), make([]fault.Link, n)
	var waiting sync.WaitGroup
	ctx, giveUp := context.WithCancel(ctx)
	for i := range n {
		addr, link := server.NewLink(t)
		drivers[i], links[i] = postgres.New(newPool(t, urlOf(addr)), &postgres.Options{NoListen: true}), link
		defer closeDriver(t, drivers[i])
		waiting.Go(func() {
			r := request("x", time.Minute)
			r.Wait = true
			if g, err := drivers[i].Acquire(ctx, r); err == nil {
				turns <- turn{i, g}
			} else if ctx.Err() == nil {
				t.Errorf("waiter %d: %v", i, err)
			}
		})
		for queued := 0; queued <= i && ctx.Err() == nil; {
			if info, err := holder.Look(ctx, "x"); err == nil {
				queued = info.Waiters
			}
		}
	}
	defer func() { // before the drivers are closed
		giveUp()
		waiting.Wait()
	}()
	sent := func(i int) int64 { return links[i].Seen(fault.Requests) }
	far := func() (most int64) {
		for i := n - 4; i < n; i++ {
			most = max(most, sent(i))
		}
		return most
	}
	release := func(d *postgres.Driver, g backend.Grant) turn {
		if err := d.Release(ctx, g); err != nil {
			t.Fatal(err)
		}
		select {
		case next := <-turns:
			return next
		case <-ctx.Done():
			t.Fatal("nobody was granted what was released")
			return turn{}
		}
	}
	window := stallmeter.Begin()
	defer window.End()
	before, near := far(), int64(0) // bytes
	last := release(holder, g)
	for range rounds {
		first := last.of + 1
		so := sent(first)
		for range 2 { // looks
			for now := sent(first); sent(first) == now && ctx.Err() == nil; {
				time.Sleep(time.Millisecond)
			}
		}
		last = release(drivers[last.of], last.g)
		near += sent(first) - so
	}
	seen := far() - before
	if 2*seen > near {
		window.Errorf(t, 200*time.Millisecond, "the first in line sent %d bytes, and one with %d ahead or more %d", near,
			n-rounds-6, seen)
	}
}

// With one connection past the pooler a holder is notified immediately.
func TestListensBesideAPooler(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	pool := newPool(t, urlOf(pooler(t, server, "transaction")))
	d := postgres.New(pool, &postgres.Options{Listen: server.URL()})
	other := postgres.New(pool, &postgres.Options{NoListen: true})
	defer closeDriver(t, d)
	defer closeDriver(t, other)
	lost := make(chan backend.Reason, 1)
	r := request("x", time.Hour)
	r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
	if _, err := d.Acquire(soon(t, 30*time.Second), r); err != nil {
		t.Fatal(err)
	}
	if err := other.ForceRelease(soon(t, 30*time.Second), backend.ForceRequest{Name: "x", Reason: "a test"}); err != nil {
		t.Fatal(err)
	}
	select {
	case why := <-lost:
		if why != backend.ReasonForceReleased {
			t.Errorf("the reason is %q", why)
		}
	case <-time.After(60 * time.Second): // its renewals would notice after a third of its hour
		t.Error("the loss was not pushed")
	}
	if desc := d.Describe(); !desc.Capabilities.Has(backend.CapPushLoss) || desc.Polling != 0 {
		t.Errorf("%v and polling every %v are declared", desc.Capabilities, desc.Polling)
	}
}

// A hold that a call moves to another session, with another TTL, may be on either session during the call, and also
// later if the answer is lost. It is not lost: no check reports its loss, no cleanup deletes it, and its renewals find
// it.
func TestHoldMovesUnheard(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d, rival := postgres.New(newPool(t, server.URL()), nil), postgres.New(newPool(t, server.URL()), nil)
	defer d.Close(t.Context())
	defer rival.Close(t.Context())
	r := request("moves", 30*time.Second)
	r.Lost = func(loss backend.Loss) { t.Errorf("notified of a loss: %s", loss.Reason) }
	g, err := d.Acquire(soon(t, 30*time.Second), r)
	if err != nil {
		t.Fatal(err)
	}
	other := take(t, d, "other") // its session is for a minute
	defer func() {
		if err := d.Release(soon(t, 30*time.Second), other); err != nil {
			t.Error(err)
		}
	}()
	// The move, and a notification of it, as of a call whose answer is lost.
	execute(t, server, `select fencelock.move((select session from fencelock.holds where name = 'other'), session,
		array[name], array[request_id], array[token]) from fencelock.holds where name = 'moves'`)
	execute(t, server, `select pg_notify(channel, $1) from fencelock.sessions`, g.HoldID)
	if _, err := rival.Acquire(
		soon(t, 30*time.Second), request("moves", time.Minute),
	); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("beside a hold that has moved: %v", err)
	}
	for range 2 {
		if renewed := d.Renew(soon(t, 30*time.Second), []backend.Grant{g})[0]; renewed.Err != nil ||
			renewed.TTL < g.TTL {
			t.Errorf("renewed: %+v", renewed)
		}
	}
	if err := d.Release(soon(t, 30*time.Second), g); err != nil {
		t.Error(err)
	}
}

// Concurrent calls of one client share a commit, and each has its own answer: if another client holds a name, or a
// foreign transaction locks its row, only the call for that name is affected.
func TestCallsTogether(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d, rival := postgres.New(newPool(t, server.URL()), nil), postgres.New(newPool(t, server.URL()), nil)
	defer d.Close(t.Context())
	defer rival.Close(t.Context())
	const n = 60
	name := func(i int) string { return fmt.Sprint("x", i) }
	if err := d.Release(soon(t, 30*time.Second), take(t, d, name(1))); err != nil {
		t.Fatal(err)
	}
	take(t, rival, name(0)) // the other names are new
	tx := lockRow(t, server, name(1))
	r := request(name(1), time.Minute)
	kept := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		_, err := d.Acquire(ctx, r)
		kept <- err
	}()
	blocked(t, server.URL(), "acquire")
	grants := make([]backend.Grant, n)
	var all sync.WaitGroup
	for i := range n {
		if i == 1 {
			continue
		}
		all.Go(func() {
			var err error
			grants[i], err = d.Acquire(soon(t, 30*time.Second), request(name(i), time.Minute))
			if i == 0 && !errors.Is(err, backend.ErrHeld) || i > 0 && err != nil {
				t.Errorf("%s: %v", name(i), err)
			}
		})
	}
	all.Wait()
	var commits int
	row := connect(t, server.URL()).QueryRow(t.Context(), `select count(distinct xmin::text) from fencelock.holds`)
	if err := row.Scan(&commits); err != nil || commits >= n-1 {
		t.Errorf("%d commits for %d grants, %v", commits, n-1, err)
	}
	for i := range grants {
		if i < 2 || grants[i].HoldID == "" {
			continue
		}
		all.Go(func() {
			g := grants[i]
			if i%2 == 0 {
				g.Token--
				if err := d.Release(soon(t, 30*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
					t.Errorf("%s: releasing with another token: %v", g.Name, err)
				}
				g.Token++
			}
			if err := d.Release(soon(t, 30*time.Second), g); err != nil {
				t.Errorf("%s: %v", g.Name, err)
			}
		})
	}
	all.Wait()
	cancel()
	if err := <-kept; !errors.Is(err, context.Canceled) {
		t.Errorf("behind somebody's transaction: %v", err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	left, err := leftovers(pooled{server, ""})
	if err != nil || len(left) > 2 {
		t.Errorf("left: %q, %v", left, err)
	}
}
