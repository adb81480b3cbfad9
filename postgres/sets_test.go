package postgres_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/postgres"
)

// A statement of AcquireAll that the server executes late, after its repetition was answered, changes nothing: it ends
// no hold of the set, and acquires no name that its caller has released or lost.
func TestLateSetChangesNothing(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d, other := postgres.New(newPool(t, server.URL()), nil), postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	defer closeDriver(t, other)
	release := func(t *testing.T, g backend.Grant) {
		t.Helper()
		if err := d.Release(soon(t, time.Minute), g); err != nil {
			t.Fatal(err)
		}
	}
	for what, end := range map[string]func(*testing.T, backend.Grant){
		"released": release,
		"lost": func(t *testing.T, g backend.Grant) {
			if err := other.ForceRelease(soon(t, time.Minute), backend.ForceRequest{Name: g.Name, Reason: "test"}); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			rs := []backend.Request{request(what+"/a", time.Minute), request(what+"/b", time.Minute)}
			grants, err := d.AcquireAll(soon(t, time.Minute), rs)
			if err != nil {
				t.Fatal(err)
			}
			late := lateSet(t, server, what+"/")
			if err := late(); err != nil {
				t.Errorf("repeated while it holds all: %v", err)
			}
			kept := grants[1]
			for _, r := range d.Renew(soon(t, time.Minute), grants) {
				if r.Err != nil {
					t.Errorf("renewal after a repetition: %v", r.Err)
				}
			}
			end(t, grants[0])
			refused := func(when string) {
				t.Helper()
				if err := late(); !isState(err, "FL002") {
					t.Errorf("late, %s: %v, want FL002", when, err)
				}
			}
			refused("with one of two left")
			if err := renewed(t, d, kept); err != nil {
				t.Errorf("the hold that was left: %v", err)
			}
			var held *backend.HeldError
			if _, err := other.Acquire(soon(t, time.Minute), request(kept.Name, time.Minute)); !errors.As(err, &held) {
				t.Errorf("the name that was left = %v, want ErrHeld", err)
			}
			take(t, other, grants[0].Name)
			refused("with one of two left, and one held by another")
			release(t, kept)
			refused("after the end of both")
			take(t, other, kept.Name)
		})
	}
	rs := []backend.Request{request("free/a", time.Minute), request("free/b", time.Minute)}
	grants, err := d.AcquireAll(soon(t, time.Minute), rs)
	if err != nil {
		t.Fatal(err)
	}
	late := lateSet(t, server, "free/")
	for _, g := range grants {
		release(t, g)
	}
	if err := late(); !isState(err, "FL002") {
		t.Errorf("late, with both names free: %v, want FL002", err)
	}
	take(t, other, "free/a")
	take(t, other, "free/b")
}

// lateSet returns a function that sends the statement of AcquireAll that has acquired the names with a prefix.
func lateSet(t *testing.T, server interface{ URL() string }, prefix string) func() error {
	t.Helper()
	conn := connect(t, server.URL())
	if _, err := conn.Exec(soon(t, time.Minute), `create temp table late as
		select row(name, request_id, hold_id, session, owner, kind, permits, limit_n, 0, null, null, false, metadata,
			null)::fencelock.holds as r, name as by_name
		from fencelock.holds where starts_with(name, '`+prefix+`')`); err != nil {
		t.Fatal(err)
	}
	return func() error {
		rows, err := conn.Query(soon(t, time.Minute), `select state from fencelock.acquire_all(
			(select array_agg(r order by by_name) from late), null)`)
		if err == nil {
			_, err = pgx.CollectRows(rows, pgx.RowTo[string])
		}
		return err
	}
}

func isState(err error, code string) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == code
}
