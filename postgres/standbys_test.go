package postgres_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/postgres"
)

// logs are the lines that a driver has logged.
type logs struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logs) has(what string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), what)
}

// receive starts a receiver of a server's log, which runs until the test ends, and waits until the server sends to it.
func receive(t *testing.T, server *node, name, options string, commands ...string) {
	t.Helper()
	ctx := soon(t, time.Minute)
	conn, err := pgconn.Connect(ctx, server.URL()+"&application_name="+name+"&"+options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Conn().Close() })
	for i, command := range commands {
		if i < len(commands)-1 {
			if _, err := conn.Exec(ctx, command).ReadAll(); err != nil {
				t.Fatal(err)
			}
			continue
		}
		conn.Frontend().SendQuery(&pgproto3.Query{String: command})
		if err := conn.Frontend().Flush(); err != nil {
			t.Fatal(err)
		}
		if answer, err := conn.Frontend().Receive(); err != nil {
			t.Fatal(err)
		} else if refusal, ok := answer.(*pgproto3.ErrorResponse); ok {
			t.Fatalf("%s: %s", command, refusal.Message)
		}
	}
	server.until("it receives", time.Minute,
		fmt.Sprintf("select count(*) = 1 from pg_stat_replication where application_name = '%s'", name))
}

// A consumer of changes, a base backup and a receiver with a listed name are no standbys. Any other receiver of the
// log is a standby: a new client is refused the correctness tier, and a client in use logs a warning one probe
// earlier.
func TestWhoCountsAsStandby(t *testing.T) {
	t.Parallel()
	server := one(t)
	migrate(t, newPool(t, server.URL()))
	execute(t, server, `alter system set wal_level = logical`)
	server.kill()
	server.start()
	log := &logs{}
	running := postgres.New(newPool(t, server.URL()), &postgres.Options{Logger: slog.New(slog.NewTextHandler(log, nil))})
	defer closeDriver(t, running)
	expect := func(what string, d *postgres.Driver, want backend.Exclusion) {
		t.Helper()
		if err := d.Ping(soon(t, time.Minute)); err != nil {
			t.Fatal(err)
		}
		if is := d.Describe().Exclusion; is != want {
			t.Errorf("%s: the exclusion is %v, want %v", what, is, want)
		}
	}
	expectNew := func(what string, want backend.Exclusion, ignored ...string) {
		t.Helper()
		d := postgres.New(newPool(t, server.URL()), &postgres.Options{IgnoreStandbys: ignored})
		defer closeDriver(t, d)
		expect(what, d, want)
	}
	expect("alone", running, backend.ExclusionDurableServer)
	execute(t, server, `create publication p for all tables`)
	receive(t, server, "consumer", "replication=database", `CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput`,
		`START_REPLICATION SLOT s LOGICAL 0/0 (proto_version '1', publication_names 'p')`)
	receive(t, server, "backup", "replication=true", `BASE_BACKUP`)
	expectNew("with a consumer of changes and a backup", backend.ExclusionDurableServer)
	receive(t, server, "archive", "replication=true", `START_REPLICATION PHYSICAL 0/1000000`)
	expectNew("with a receiver whose name is listed", backend.ExclusionDurableServer, "archive")
	expectNew("with a receiver", backend.ExclusionAsyncReplica)
	const warning = "the correctness tier refuses this server from the next probe on"
	if log.has(warning) {
		t.Error("a warning without a reason")
	}
	expect("in use, at the first probe", running, backend.ExclusionDurableServer)
	if !log.has(warning) {
		t.Error("no warning at the first probe")
	}
	take(t, running, "x") // listens, and updates its description
	expect("in use, at the second probe", running, backend.ExclusionAsyncReplica)
}
