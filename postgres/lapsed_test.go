package postgres_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/postgres"
)

// A grant whose answer comes after the end of its session did not reach its caller: its minimum hold does not block
// the next try of the same call.
func TestLapsedGrantLeavesNoMinimum(t *testing.T) {
	t.Parallel()
	const patience, ttl = time.Minute, 2 * time.Second
	server := migrated(t)
	admin := newPool(t, server.URL())
	for what, acquire := range map[string]func(context.Context, *postgres.Driver, backend.Request) error{
		"one": func(ctx context.Context, d *postgres.Driver, r backend.Request) error {
			_, err := d.Acquire(ctx, r)
			return err
		},
		"several": func(ctx context.Context, d *postgres.Driver, r backend.Request) error {
			other := request(r.Name+" too", ttl)
			other.MinHold = r.MinHold
			_, err := d.AcquireAll(ctx, []backend.Request{r, other})
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			addr, link := server.NewLink(t)
			d := postgres.New(newPool(t, urlOf(addr)), nil)
			defer closeDriver(t, d)
			if _, err := d.Acquire(soon(t, patience), request("warm "+what, ttl)); err != nil {
				t.Fatal(err)
			}
			link.Hold(fault.Replies)
			r := request(what, ttl)
			r.MinHold = time.Hour
			answered := make(chan error, 1)
			go func() { answered <- acquire(soon(t, patience), d, r) }()
			for lapsed, ctx := false, soon(t, patience); !lapsed; time.Sleep(10 * time.Millisecond) {
				row := admin.QueryRow(ctx, `select exists (select from fencelock.holds h where name = $1 and not exists (
					select from fencelock.sessions where id = h.session and expires_at > clock_timestamp()))`, what)
				if err := row.Scan(&lapsed); err != nil {
					t.Fatal(err)
				}
			}
			link.Pass()
			if err := <-answered; errors.Is(err, backend.ErrHeld) {
				t.Errorf("Acquire meets what it was granted itself: %v", err)
			} else if err != nil {
				t.Errorf("Acquire = %v", err)
			}
		})
	}
}

// A Watch that finds an expired session grants the name to a waiter. The waiter may be answered as soon as the grant
// is visible, so the grant must be durable by then, although other writes of a Watch need not be.
func TestWatchGrantsDurably(t *testing.T) {
	t.Parallel()
	ctx, conn := soon(t, time.Minute), connect(t, migrated(t).URL())
	for _, sql := range []string{
		`select fencelock.begin_session('over', 'nobody', 60000), fencelock.begin_session('lives', 'nobody', 60000)`,
		`insert into fencelock.names (name) values ('x')`,
		`select fencelock.acquire(row('x', 'first', 'h', 'over', 'o', 0, 0, 0, 0, null, null, false, null, null)::fencelock.holds,
			false, null)`,
		`select fencelock.acquire(row('x', 'second', 'h', 'lives', 'o', 0, 0, 0, 0, null, null, false, null, null)::fencelock.holds,
			true, null)`,
		`delete from fencelock.sessions where id = 'over'`,
		`begin`,
		`select fencelock.changes_since('x', 0)`,
	} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	var holder, commit string
	row := conn.QueryRow(ctx, `select session, current_setting('synchronous_commit') from fencelock.holds where name = 'x'`)
	if err := row.Scan(&holder, &commit); err != nil {
		t.Fatal(err)
	}
	if holder != "lives" || commit != "on" {
		t.Errorf("session %q holds, and the commit of the grant has synchronous_commit %s, want on", holder, commit)
	}
}
