package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/postgres"
)

// twoWays is a driver whose connections use a link, or lead directly to the server once direct is set.
type twoWays struct {
	*postgres.Driver
	server service
	link   fault.Link
	direct atomic.Bool
}

func newTwoWays(t *testing.T, server service) *twoWays {
	t.Helper()
	addr, link := server.NewLink(t)
	config, err := pgxpool.ParseConfig(urlOf(server.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 3 // a request that is delayed has one, and closing that takes up to 15 s
	w := &twoWays{server: server, link: link}
	config.ConnConfig.DialFunc = func(ctx context.Context, network, _ string) (net.Conn, error) {
		to := addr
		if w.direct.Load() { // also a request to cancel a statement that was sent over the link
			to = server.Addr()
		}
		return (&net.Dialer{}).DialContext(ctx, network, to)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	w.Driver = postgres.New(pool, &postgres.Options{NoListen: true})
	t.Cleanup(func() { closeDriver(t, w.Driver) })
	return w
}

// late delays the requests of send and lets the driver continue directly. It returns a function that delivers these
// requests and returns when the server has executed them. The driver must have no other call in progress.
func (w *twoWays) late(t *testing.T, send func()) (deliver func()) {
	t.Helper()
	conn := connect(t, w.server.URL())
	var linked []int32
	var before *time.Time
	err := conn.QueryRow(soon(t, time.Minute), `select coalesce(array_agg(pid), '{}'), max(query_start) from pg_stat_activity
		where backend_type = 'client backend' and pid <> pg_backend_pid() and query like '%fencelock.%'`).Scan(&linked, &before)
	if err != nil || len(linked) == 0 {
		t.Fatalf("the driver has the connections %v, %v", linked, err)
	}
	seen := w.link.Seen(fault.Requests)
	w.link.Hold(fault.Requests)
	send()
	if w.link.Seen(fault.Requests) == seen {
		t.Fatal("nothing was sent")
	}
	w.direct.Store(true)
	return func() {
		t.Helper()
		w.link.Pass()
		// The driver has abandoned these connections: they have ended, or are idle after their last statement.
		for ctx, n := soon(t, time.Minute), 1; n > 0; time.Sleep(5 * time.Millisecond) {
			row := conn.QueryRow(ctx, `select count(*) from pg_stat_activity
				where pid = any ($1) and not (state = 'idle' and query_start > $2)`, linked, before)
			if err := row.Scan(&n); err != nil {
				t.Fatalf("%d connections have not carried out their last statement: %v", n, err)
			}
		}
	}
}

// sessionsOf returns the TTLs, in seconds, of the sessions that hold a name.
func sessionsOf(t *testing.T, server interface{ URL() string }, name string) (ttls []int) {
	t.Helper()
	row := connect(t, server.URL()).QueryRow(soon(t, time.Minute), `select
		coalesce(array_agg(extract(epoch from ttl)::int), '{}') from fencelock.holds h join fencelock.sessions s on s.id = h.session where name = $1`, name)
	if err := row.Scan(&ttls); err != nil {
		t.Fatal(err)
	}
	return ttls
}

// An acquire that the server executes late makes no hold after the release of its request, and moves no hold back to
// an earlier session.
func TestLateAcquireChangesNothing(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	for what, c := range map[string]struct {
		wait bool
		// The delayed call, and the calls before its delivery.
		patience time.Duration
		then     func(*testing.T, *twoWays, backend.Request, <-chan backend.Grant)
		want     []int
	}{
		"released by its request":         {patience: 300 * time.Millisecond, then: releaseRequest},
		"a wait, released by its request": {wait: true, patience: 300 * time.Millisecond, then: releaseRequest},
		"repeated and released": {
			patience: time.Minute,
			then: func(t *testing.T, w *twoWays, _ backend.Request, granted <-chan backend.Grant) {
				if err := w.Release(soon(t, time.Minute), <-granted); err != nil {
					t.Error(err)
				}
			},
		},
		"repeated and moved": {
			patience: time.Minute,
			then: func(t *testing.T, w *twoWays, _ backend.Request, granted <-chan backend.Grant) {
				g := <-granted
				g.TTL = time.Hour
				if err := renewed(t, w.Driver, g); err != nil {
					t.Error(err)
				}
			},
			want: []int{3600},
		},
	} {
		t.Run(what, func(t *testing.T) {
			w := newTwoWays(t, server)
			take(t, w.Driver, what+", before")
			r, granted := request(what, time.Minute), make(chan backend.Grant, 1)
			r.Fresh, r.Wait = true, c.wait
			answered := make(chan error, 1)
			deliver := w.late(t, func() {
				seen := w.link.Seen(fault.Requests)
				ctx, cancel := context.WithTimeout(t.Context(), c.patience)
				go func() {
					defer cancel()
					g, err := w.Acquire(ctx, r)
					granted <- g
					answered <- err
				}()
				for ctx := soon(t, time.Minute); w.link.Seen(fault.Requests) == seen; time.Sleep(time.Millisecond) {
					if ctx.Err() != nil {
						t.Fatal("the acquire was not sent")
					}
				}
			})
			if c.patience < time.Minute {
				if err := <-answered; !errors.Is(err, backend.ErrUnknown) {
					t.Fatalf("an acquire without an answer = %v, want ErrUnknown", err)
				}
			}
			c.then(t, w, r, granted)
			deliver()
			if got := sessionsOf(t, server, what); !slices.Equal(got, c.want) {
				t.Errorf("after the late delivery sessions of %v s hold the name, want %v", got, c.want)
			}
		})
	}
}

func releaseRequest(t *testing.T, w *twoWays, r backend.Request, _ <-chan backend.Grant) {
	t.Helper()
	if err := w.Release(soon(t, time.Minute), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
		t.Fatal(err)
	}
}

// A move that the server executes late does not take a hold from the session to which a later renewal has moved it.
func TestLateMoveChangesNothing(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	w := newTwoWays(t, server)
	g := take(t, w.Driver, "moves")
	other := request("other", 2*time.Minute) // makes its session before the move
	if _, err := w.Acquire(soon(t, time.Minute), other); err != nil {
		t.Fatal(err)
	}
	deliver := w.late(t, func() {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		g.TTL = other.TTL
		if err := w.Renew(ctx, []backend.Grant{g})[0].Err; err == nil || errors.Is(err, backend.ErrNotHeld) {
			t.Fatalf("a renewal without an answer = %v, want a fault", err)
		}
	})
	g.TTL = time.Hour
	if err := renewed(t, w.Driver, g); err != nil {
		t.Fatal(err)
	}
	deliver()
	if got := sessionsOf(t, server, "moves"); !slices.Equal(got, []int{3600}) {
		t.Errorf("after the late move sessions of %v s hold the name, want 3600", got)
	}
	if err := w.Release(soon(t, time.Minute), g); err != nil {
		t.Error(err)
	}
}

// The minimum of a hold stays as it was when a renewal for a longer TTL moves the hold to another session: a release
// keeps the name closed for the minimum, and not for the rest of the earlier TTL.
func TestMinimumOfAMovedHold(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d, rival := postgres.New(newPool(t, server.URL()), nil), postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	defer closeDriver(t, rival)
	for _, minimum := range []time.Duration{0, 4 * time.Second} {
		r := request(fmt.Sprint("minimum ", minimum), 30*time.Second)
		r.MinHold = minimum
		g, err := d.Acquire(soon(t, time.Minute), r)
		if err != nil {
			t.Fatal(err)
		}
		g.TTL = time.Minute
		if err := renewed(t, d, g); err != nil {
			t.Fatal(err)
		}
		again, err := d.Acquire(soon(t, time.Minute), r)
		if err != nil || again.MinHoldUntil > g.MinHoldUntil.Add(time.Second) {
			t.Errorf("the repeat of %s has its minimum until %v, %v, want %v", r.Name, again.MinHoldUntil, err, g.MinHoldUntil)
		}
		again.TTL = time.Minute
		if err := renewed(t, d, again); err != nil {
			t.Fatal(err)
		}
		if err := d.Release(soon(t, time.Minute), again); err != nil {
			t.Fatal(err)
		}
		next := request(r.Name, time.Minute)
		next.Wait = true
		if _, err := rival.Acquire(soon(t, 20*time.Second), next); err != nil {
			t.Errorf("%s: after the release and the minimum: %v", r.Name, err)
		}
		if early := g.MinHoldUntil.Sub(d.Describe().Clock.Now()); minimum > 0 && early > 100*time.Millisecond {
			t.Errorf("%s: the name opened %v before the minimum", r.Name, early)
		}
	}
}

// A hold that moves to the session of a longer TTL, and whose client then dies, lasts at least for its earlier
// remaining time, even if the other session would end sooner.
func TestMovedHoldLastsAsBefore(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	ctx, conn := soon(t, time.Minute), connect(t, server.URL())
	for _, sql := range []string{
		`select fencelock.begin_session('short', 'nobody', 60000), fencelock.begin_session('long', 'nobody', 90000)`,
		`select fencelock.acquire(row('x', 'first', 'h', 'short', 'o', 0, 0, 0, 0, null, null, false, null, null)::fencelock.holds,
			false, null)`,
		`update fencelock.sessions set expires_at = clock_timestamp() + interval '45 s' where id = 'long'`,
		`select fencelock.move('long', 'short', '{x}', '{first}', array(select token from fencelock.holds))`,
	} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	var session string
	var left float64
	row := conn.QueryRow(ctx, `select s.id, extract(epoch from expires_at - clock_timestamp())::float8
		from fencelock.holds h join fencelock.sessions s on s.id = h.session`)
	if err := row.Scan(&session, &left); err != nil || session != "long" || left < 46 {
		t.Errorf("the hold is on the session %q for %v s, %v, want the long one for nearly 60", session, left, err)
	}
}

// The end of a wait does not affect another attempt of the same request, by the same client or another one.
func TestEndedWaitSparesItsRepeat(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	w, other := newTwoWays(t, server), postgres.New(newPool(t, server.URL()), nil)
	holder := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, other)
	defer closeDriver(t, holder)
	wait := func(ctx context.Context, d *postgres.Driver, r backend.Request) <-chan backend.Grant {
		granted := make(chan backend.Grant, 1)
		go func() {
			g, err := d.Acquire(ctx, r)
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("the waiter: %v", err)
			}
			granted <- g
		}()
		return granted
	}
	stands := func(name, session string, n int) {
		t.Helper()
		conn, got := connect(t, server.URL()), -1
		for ctx := soon(t, time.Minute); got != n; time.Sleep(5 * time.Millisecond) {
			row := conn.QueryRow(ctx, `select count(*) from fencelock.waits where name = $1 and session <> $2`, name, session)
			if err := row.Scan(&got); err != nil {
				t.Fatalf("%d wait: %v, want %d", got, err, n)
			}
		}
	}
	placeOf := func(name string) (session string) {
		t.Helper()
		row := connect(t, server.URL()).QueryRow(soon(t, time.Minute),
			`select session from fencelock.waits where name = $1 order by ticket`, name)
		if err := row.Scan(&session); err != nil {
			t.Fatal(err)
		}
		return session
	}
	t.Run("of another client", func(t *testing.T) {
		front := take(t, holder, "x")
		r := request("x", time.Minute)
		r.Wait = true
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		first := wait(ctx, w.Driver, r)
		stands("x", "", 1)
		w.link.Hold(fault.Both)
		mine := placeOf("x")
		second := wait(soon(t, time.Minute), other, r)
		stands("x", mine, 1) // the place belongs to the repetition now
		if err := holder.Release(soon(t, time.Minute), front); err != nil {
			t.Fatal(err)
		}
		g := <-second
		leave()
		<-first
		w.link.Pass()
		closeDriver(t, w.Driver) // waits for the remaining work of the first wait
		if err := renewed(t, other, g); err != nil {
			t.Errorf("the hold of the repeat: %v", err)
		}
	})
	t.Run("of the same client", func(t *testing.T) {
		front := take(t, holder, "y")
		r, behind := request("y", time.Minute), request("y", time.Minute)
		r.Wait, behind.Wait = true, true
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		first := wait(ctx, other, r)
		stands("y", "", 1)
		second := wait(soon(t, time.Minute), other, r)
		third := wait(soon(t, time.Minute), holder, behind)
		stands("y", "", 2)
		leave()
		<-first
		if err := holder.Release(soon(t, time.Minute), front); err != nil {
			t.Fatal(err)
		}
		select {
		case g := <-second:
			if err := other.Release(soon(t, time.Minute), g); err != nil {
				t.Error(err)
			}
			<-third
		case <-third:
			t.Error("the repeat lost its place to a later request")
		}
	})
}
