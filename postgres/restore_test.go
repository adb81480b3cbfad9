package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/postgres"
)

// in is the server with another database.
type in struct {
	*node
	database string
}

func (d in) URL() string { return strings.Replace(d.node.URL(), "/postgres?", "/"+d.database+"?", 1) }

// tool runs a program of PostgreSQL for the database.
func (d in) tool(t testing.TB, program string, args ...string) {
	t.Helper()
	n := d.service.(*local)
	n.run(t, program, append([]string{"-h", "127.0.0.1", "-p", strconv.Itoa(n.port), "-U", "postgres", "-d", d.database},
		args...)...)
}

// A dump from before a hold is restored over it, in each of the usual ways. The holder's driver detects the loss of
// history, and no rival is granted the name while the holder may rely on its hold. Tokens increase.
func TestDumpIsPutBack(t *testing.T) {
	t.Parallel()
	const ttl = 4 * time.Second
	server := one(t)
	for name, restore := range map[string]func(t *testing.T, d in, file string){
		"clean": func(t *testing.T, d in, file string) {
			d.tool(t, "pg_restore", "--clean", "--if-exists", file)
		},
		"in one transaction": func(t *testing.T, d in, file string) {
			d.tool(t, "pg_restore", "--clean", "--if-exists", "--single-transaction", file)
		},
		"data": func(t *testing.T, d in, file string) {
			execute(t, d, `truncate fencelock.migrations, fencelock.cluster, fencelock.names, fencelock.sessions,
				fencelock.holds, fencelock.waits, fencelock.revoked, fencelock.changes, fencelock.fencing_tokens`)
			d.tool(t, "pg_restore", "--data-only", file)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := in{server, strings.ReplaceAll(name, " ", "_")}
			execute(t, server, `create database `+d.database)
			migrate(t, newPool(t, d.URL()))
			holder, rival := postgres.New(newPool(t, d.URL()), nil), postgres.New(newPool(t, d.URL()), nil)
			defer closeDriver(t, holder)
			defer closeDriver(t, rival)
			acquire := func(by *postgres.Driver, r backend.Request) backend.Grant {
				t.Helper()
				g, err := by.Acquire(soon(t, time.Minute), r)
				if err != nil {
					t.Fatal(err)
				}
				return g
			}
			if err := holder.Release(soon(t, time.Minute), acquire(holder, request("warm", ttl))); err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(filepath.Dir(server.service.(*local).dir), d.database+".dump")
			d.tool(t, "pg_dump", "-Fc", "-f", file)
			lost := make(chan backend.Loss, 1)
			r := request("x", ttl)
			r.Lost = func(loss backend.Loss) { lost <- loss }
			held := acquire(holder, r)
			restore(t, d, file)
			// A new client, and a client that asks repeatedly.
			fresh := postgres.New(newPool(t, d.URL()), nil)
			defer closeDriver(t, fresh)
			again := request("x", ttl)
			again.Wait = true
			next := acquire(fresh, again)
			is := holder.Describe()
			if early := held.SentAt.Add(is.Validity(ttl)).Sub(is.Clock.Now()); early > 0 {
				t.Errorf("a rival is granted the name %v before the holder's time is over", early)
			}
			if next.Token <= held.Token {
				t.Errorf("token %v after %v", next.Token, held.Token)
			}
			select {
			case loss := <-lost:
				if loss.Reason != backend.ReasonHistoryLost {
					t.Errorf("the holder lost its hold as %q, want %q", loss.Reason, backend.ReasonHistoryLost)
				}
			case <-soon(t, time.Minute).Done():
				t.Error("the holder gets no loss")
			}
			if _, err := holder.Acquire(soon(t, time.Minute), request("y", ttl)); !errors.Is(err, backend.ErrHistoryLost) {
				t.Errorf("the client that lived through it: %v, want ErrHistoryLost", err)
			}
		})
	}
}

// An operator declares a restored server: its clients get the loss of history, and no lock is granted for the longest
// TTL, unless the operator knows that no client relies on an earlier hold.
func TestRestoredDatabaseIsOpened(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d, before := postgres.New(newPool(t, server.URL()), nil), postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	defer closeDriver(t, before)
	if _, err := before.Acquire(soon(t, 30*time.Second), request("x", 24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	execute(t, server, `select fencelock.restored()`)
	_, err := d.Acquire(soon(t, 30*time.Second), request("x", time.Minute))
	var held *backend.HeldError
	if !errors.As(err, &held) || held.Holder != "" || held.RetryAfter < 23*time.Hour {
		t.Fatalf("after a restore, with a TTL of a day in use: %v, want a HeldError for a day", err)
	}
	if err := before.Ping(soon(t, 30*time.Second)); !errors.Is(err, backend.ErrHistoryLost) {
		t.Errorf("a client of before: %v, want ErrHistoryLost", err)
	}
	execute(t, server, `select fencelock.open()`)
	take(t, d, "x")
}

// Commands that rewrite the tables are no restore.
func TestTablesAreRewritten(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	g := take(t, d, "x")
	for _, sql := range []string{
		`vacuum freeze fencelock.cluster`, `vacuum full fencelock.cluster`, `cluster fencelock.cluster using cluster_pkey`, `reindex schema fencelock`,
	} {
		execute(t, server, sql)
		if err := renewed(t, d, g); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
}

// A server is restored from one backup twice, each time to the same timeline: the tokens of the second server are
// above those of the first.
func TestBackupIsRestoredTwice(t *testing.T) {
	t.Parallel()
	server := one(t)
	n := server.service.(*local)
	migrate(t, newPool(t, server.URL()))
	grant := func(server *node) backend.Grant {
		d := postgres.New(newPool(t, server.URL()), nil)
		defer closeDriver(t, d)
		return take(t, d, "x")
	}
	last := grant(server)
	n.run(t, "pg_basebackup", "-h", "127.0.0.1", "-p", strconv.Itoa(n.port), "-U", "postgres", "-D", n.dir+"-backup",
		"-X", "stream", "--no-sync")
	for i := range 2 {
		restored := newLocal(t)
		restored.run(t, "/bin/cp", "-a", n.dir+"-backup", restored.dir)
		restored.run(t, "/bin/sh", "-c", fmt.Sprintf(`touch %[1]s/recovery.signal
			printf "%%s\n" "restore_command = 'false'" "recovery_target_action = 'promote'" >> %[1]s/postgresql.auto.conf`, restored.dir))
		server := &node{restored, t}
		server.start()
		server.until("it is restored", time.Minute, "select not pg_is_in_recovery()")
		if i == 0 { // more than the second server writes
			execute(t, server, `create table written as select generate_series(1, 20000) as n`)
		}
		g := grant(server)
		if g.Token <= last.Token {
			t.Errorf("restore %d grants token %v, and %v was granted before", i+1, g.Token, last.Token)
		}
		last = g
		server.kill()
	}
}

// However old a backup is, and on whichever timeline, a token has 43 bits for the log position, with room for more.
func TestTokenKeepsItsBits(t *testing.T) {
	t.Parallel()
	conn := connect(t, migrated(t).URL())
	ages := []string{"null", "'0'", "'1 ms'", "'1 s'", "'1 hour'", "'1 day'", "'99 days'", "'100 days'", "'1 year'",
		"'5 years'", "'200 years'"}
	for _, age := range ages {
		row := conn.QueryRow(soon(t, 30*time.Second), `
			select bool_and(shift >= 0 and (timeline << 43 | (pos + shift)) >> 43 = timeline
					and (pos + shift + 4294967295 < 1::bigint << 43 or shift = 0)),
				bool_and(shift >= least(extract(epoch from `+age+`::interval) * 1024000, 4398046511104) or pos >> 41 > 0)
			from generate_series(1, 1023) timeline_n, lateral (select timeline_n::bigint as timeline) l,
				unnest(array[0, 1, 1000000, 1::bigint << 32, 1::bigint << 40, (1::bigint << 41) - 1, 1::bigint << 42,
					(1::bigint << 43) - (1::bigint << 32), (1::bigint << 43) - 1]) pos,
				lateral (select fencelock.shift_for(`+age+`::interval, pos) as shift) s`)
		var fits, above bool
		if err := row.Scan(&fits, &above); err != nil || !fits || !above {
			t.Errorf("age %s: within the bits: %v, above what a server grants in it: %v, %v", age, fits, above, err)
		}
	}
}

// The name of an old token is deleted, and the next one is greater. A name in use stays.
func TestUnusedNamesAreDeleted(t *testing.T) {
	t.Parallel()
	server := migrated(t)
	d := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	tokens := map[string]backend.Grant{}
	for _, name := range []string{"old", "ahead", "held", "waits", "recent"} {
		tokens[name] = take(t, d, name)
		if name != "held" && name != "waits" {
			if err := d.Release(soon(t, 30*time.Second), tokens[name]); err != nil {
				t.Fatal(err)
			}
		}
	}
	execute(t, server, `update fencelock.names set used_at = used_at - interval '25 hours' where name <> 'recent'`)
	execute(t, server, `update fencelock.names set token = fencelock.position() + 1000000 where name = 'ahead'`)
	tx, err := connect(t, server.URL()).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	reap := func() (names []string) {
		t.Helper()
		execute(t, server, `update fencelock.cluster set names_swept = '-infinity', written = fencelock.this_transaction()`)
		execute(t, server, `select fencelock.reap()`)
		row := connect(t, server.URL()).QueryRow(soon(t, 30*time.Second),
			`select array_agg(name order by name) from fencelock.names`)
		if err := row.Scan(&names); err != nil {
			t.Fatal(err)
		}
		return names
	}
	if _, err := tx.Exec(t.Context(), `select 1 from fencelock.names where name = 'old' for update`); err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(reap()), "[ahead held old recent waits]"; got != want {
		t.Errorf("while a call has the row of a name: %s, want %s", got, want)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(reap()), "[ahead held recent waits]"; got != want {
		t.Errorf("left: %s, want %s", got, want)
	}
	if next := take(t, d, "old"); next.Token <= tokens["old"].Token {
		t.Errorf("token %v after %v", next.Token, tokens["old"].Token)
	}
}
