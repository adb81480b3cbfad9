package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/postgres"
)

// jumping is a server with a clock that can be set.
type jumping interface {
	jump(by string)
	driver() *postgres.Driver
}

// stepping is a server whose functions use a settable clock instead of the system's.
type stepping struct {
	*containers.PostgresServer
	t testing.TB
}

func newStepping(t testing.TB) stepping {
	t.Helper()
	server := stepping{migrated(t), t}
	execute(t, server, `create schema jumping`)
	execute(t, server, `create table jumping.ahead (by interval not null)`)
	execute(t, server, `insert into jumping.ahead values ('0')`)
	execute(t, server, `create function jumping.clock_timestamp() returns timestamptz language plpgsql as $$
		begin return pg_catalog.clock_timestamp() + (select by from jumping.ahead); end $$`)
	return server
}

func (s stepping) jump(by string) {
	s.t.Helper()
	execute(s.t, s, `update jumping.ahead set by = by + $1::text::interval`, by)
}

func (s stepping) pool(addr string) *pgxpool.Pool {
	return newPool(s.t, urlOf(addr)+"&search_path=jumping,pg_catalog,public")
}

func (s stepping) driver() *postgres.Driver { return postgres.New(s.pool(s.Addr()), nil) }

// faked is a server with libfaketime, whose clock can be set like that of its machine.
type faked struct {
	*node
	file  string
	ahead time.Duration
}

func newFaked(t testing.TB) *faked {
	t.Helper()
	libraries, _ := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1")
	if len(libraries) == 0 {
		if os.Getenv("FENCELOCK_REQUIRE") == "all" {
			t.Fatal("a server with a clock that can be set needs libfaketime: install Debian's package faketime")
		}
		t.Skip("a server with a clock that can be set needs libfaketime: install Debian's package faketime")
	}
	n := newLocal(t)
	n.run(t, "initdb", "-D", n.dir, "--auth=trust", "-U", "postgres", "--no-sync")
	f := &faked{node: &node{n, t}, file: filepath.Join(filepath.Dir(n.dir), "clock")}
	f.jump("0s")
	n.env = []string{"LD_PRELOAD=" + libraries[0], "FAKETIME_TIMESTAMP_FILE=" + f.file, "FAKETIME_NO_CACHE=1",
		"FAKETIME_DONT_FAKE_MONOTONIC=1"}
	f.start()
	migrate(t, newPool(t, f.URL()))
	return f
}

func (f *faked) jump(by string) {
	f.t.Helper()
	d, err := time.ParseDuration(by)
	if err != nil {
		f.t.Fatal(err)
	}
	f.ahead += d
	// Replace the file atomically, since the server reads it at any time.
	if err := os.WriteFile(f.file+"-next", fmt.Appendf(nil, "%+d\n", int(f.ahead.Seconds())), 0o644); err != nil {
		f.t.Fatal(err)
	}
	if err := os.Rename(f.file+"-next", f.file); err != nil {
		f.t.Fatal(err)
	}
}

func (f *faked) driver() *postgres.Driver { return postgres.New(newPool(f.t, f.URL()), nil) }

// The server's clock jumps ahead and back under a live holder. A waiter, a client that has seen the clock before, and
// a new client are not granted the name, and the holder keeps it.
func TestClockJumpsUnderAHolder(t *testing.T) {
	t.Parallel()
	t.Run("functions", func(t *testing.T) {
		t.Parallel()
		clockJumps(t, newStepping(t))
	})
	t.Run("machine", func(t *testing.T) {
		testtier.Only(t)
		t.Parallel()
		clockJumps(t, newFaked(t))
	})
}

func clockJumps(t *testing.T, server jumping) {
	const ttl = 3 * time.Second
	holder, waiting, idle := server.driver(), server.driver(), server.driver()
	for _, d := range []*postgres.Driver{holder, waiting, idle} {
		defer closeDriver(t, d)
	}
	window := stallmeter.Begin()
	defer window.End()
	acquire := func(d *postgres.Driver, name string) (backend.Grant, error) {
		return d.Acquire(soon(t, time.Minute), request(name, ttl))
	}
	held, err := acquire(holder, "x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := acquire(idle, "y"); err != nil {
		t.Fatal(err)
	}
	ctx, giveUp := context.WithCancel(t.Context())
	granted := make(chan error, 1)
	go func() {
		r := request("x", ttl)
		r.Wait = true
		_, err := waiting.Acquire(ctx, r)
		granted <- err
	}()
	for queued := 0; queued == 0; {
		st, err := idle.Look(soon(t, time.Minute), "x")
		if err != nil {
			t.Fatal(err)
		}
		queued = st.Waiters
	}
	jumps := []string{"1h", "-3h"}
	if testtier.Wanted() {
		jumps = append(jumps, "1h", "1h", "24h", "10s", "-24h")
	}
	for _, by := range jumps {
		server.jump(by)
		// Wait until a session without renewals would end, whichever client has noticed first.
		for end := time.Now().Add(ttl/3 + 1200*time.Millisecond); time.Now().Before(end); {
			fresh := server.driver()
			for who, d := range map[string]*postgres.Driver{"a new client": fresh, "a client of before": idle} {
				if _, err := acquire(d, "x"); !errors.Is(err, backend.ErrHeld) {
					window.Errorf(t, time.Second, "%s after a jump by %s: %v, want ErrHeld", who, by, err)
				}
			}
			closeDriver(t, fresh)
			sleepFor(t.Context(), rand.N(200*time.Millisecond))
		}
		if err := renewed(t, holder, held); err != nil {
			window.Errorf(t, time.Second, "the holder after a jump by %s: %v", by, err)
		}
	}
	giveUp()
	if err := <-granted; !errors.Is(err, context.Canceled) {
		window.Errorf(t, time.Second, "the waiter: %v, want its context's error", err)
	}
	if err := holder.Release(soon(t, time.Minute), held); err != nil {
		window.Errorf(t, time.Second, "release: %v", err)
	}
}

// The clock jumps, and a holder is dead: its name becomes free, even if each client asks only once, and the row of a
// session is valid for its TTL at most.
func TestClockJumpsAndTheHolderIsGone(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	for name, by := range map[string]string{"ahead": "1h", "back": "-2h", "not": "0s"} {
		for who, same := range map[string]bool{"one client": true, "a new client each time": false} {
			t.Run(name+"/"+who, func(t *testing.T) {
				if (name == "back") != same {
					testtier.Only(t) // the other ways behave like one of these
				}
				t.Parallel()
				server := newStepping(t)
				addr, link := server.NewLink(t)
				holder, d := postgres.New(server.pool(addr), nil), server.driver()
				defer closeDriver(t, d)
				gone, cancel := context.WithCancel(t.Context())
				cancel()
				defer holder.Close(gone)
				held, err := holder.Acquire(soon(t, time.Minute), request("x", ttl))
				if err != nil {
					t.Fatal(err)
				}
				link.Hold(fault.Both)
				server.jump(by)
				window := stallmeter.Begin()
				defer window.End()
				began := time.Now()
				for ctx := soon(t, time.Minute); ; sleepFor(ctx, 50*time.Millisecond) {
					if !same {
						d = server.driver()
						defer closeDriver(t, d)
					}
					next, err := d.Acquire(ctx, request("x", ttl))
					if err == nil {
						if next.Token <= held.Token {
							t.Errorf("token %v after %v", next.Token, held.Token)
						}
						break
					}
					var late *backend.HeldError
					if !errors.As(err, &late) {
						t.Fatalf("%v, want ErrHeld", err)
					}
					if late.RetryAfter > 2*ttl {
						t.Errorf("the name is closed for another %v", late.RetryAfter)
					}
				}
				if took, most := time.Since(began), ttl+ttl/3+4*time.Second; took > most {
					window.Errorf(t, took-most, "the name of a holder that is gone opened after %v", took)
				}
			})
		}
	}
}
