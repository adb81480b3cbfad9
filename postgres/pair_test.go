package postgres_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/deep"
	"github.com/fencelock/fencelock/internal/port"
	"github.com/fencelock/fencelock/postgres"
)

// node is a PostgreSQL as a process, from Debian's programs, that can be primary or standby.
type node struct {
	t    testing.TB
	bin  string
	dir  string
	port int
	who  *syscall.Credential // it refuses to be run by root
	cmd  *exec.Cmd
	log  *bytes.Buffer
}

func newNode(t testing.TB) *node {
	t.Helper()
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if len(found) == 0 {
		if os.Getenv("FENCELOCK_REQUIRE") == "all" {
			t.Fatal("a primary with a standby needs the programs of PostgreSQL: install Debian's package postgresql")
		}
		t.Skip("a primary with a standby needs the programs of PostgreSQL: install Debian's package postgresql")
	}
	_, number, _ := net.SplitHostPort(port.Addresses(t, 1)[0])
	n := &node{t: t, bin: filepath.Dir(found[len(found)-1]), log: &bytes.Buffer{}}
	n.port, _ = strconv.Atoi(number)
	parent, err := os.MkdirTemp("", "fencelock-postgres")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(parent) })
	n.dir = filepath.Join(parent, "data")
	if os.Geteuid() == 0 {
		u, err := user.Lookup("postgres")
		if err != nil {
			t.Fatal(err)
		}
		uid, _ := strconv.Atoi(u.Uid)
		gid, _ := strconv.Atoi(u.Gid)
		n.who = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		if err := os.Chown(parent, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(n.kill)
	return n
}

func (n *node) run(program string, args ...string) {
	n.t.Helper()
	cmd := exec.Command(filepath.Join(n.bin, program), args...)
	cmd.Dir, cmd.SysProcAttr = filepath.Dir(n.dir), &syscall.SysProcAttr{Credential: n.who}
	if out, err := cmd.CombinedOutput(); err != nil {
		n.t.Fatalf("%s: %v\n%s", program, err, out)
	}
}

func (n *node) url() string { return urlOf(fmt.Sprintf("127.0.0.1:%d", n.port)) }

// start runs the server and waits until it answers.
func (n *node) start(settings ...string) {
	n.t.Helper()
	args := []string{"-D", n.dir, "-p", strconv.Itoa(n.port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=",
		"-c", "shared_buffers=32MB", "-c", "max_connections=200"}
	for _, s := range settings {
		args = append(args, "-c", s)
	}
	n.cmd = exec.Command(filepath.Join(n.bin, "postgres"), args...)
	n.cmd.Dir, n.cmd.Stderr = filepath.Dir(n.dir), n.log
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: n.who, Pdeathsig: syscall.SIGKILL}
	if err := n.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.until("it answers", 30*time.Second, "select true")
}

// until waits until a query answers true.
func (n *node) until(what string, patience time.Duration, query string) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		var yes bool
		conn, err := pgx.Connect(ctx, n.url())
		if err == nil {
			err = conn.QueryRow(ctx, query).Scan(&yes)
			_ = conn.Close(ctx)
		}
		if err == nil && yes {
			return
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			n.t.Fatalf("%s: not within %v: %v\n%s", what, patience, err, n.log)
		}
	}
}

// kill ends the server and all of its processes at once, as the loss of the machine would.
func (n *node) kill() {
	if n.cmd == nil {
		return
	}
	_ = n.cmd.Process.Signal(syscall.SIGQUIT) // its processes end without writing anything more
	_ = n.cmd.Wait()
	n.cmd = nil
}

// pair is a primary with a standby that follows it.
func pair(t testing.TB, settings ...string) (primary, standby *node) {
	t.Helper()
	primary, standby = newNode(t), newNode(t)
	primary.run("initdb", "-D", primary.dir, "--auth=trust", "-U", "postgres", "--no-sync")
	primary.start(settings...)
	standby.run("pg_basebackup", "-h", "127.0.0.1", "-p", strconv.Itoa(primary.port), "-U", "postgres", "-D", standby.dir, "-R", "-X", "stream", "--no-sync")
	standby.start(settings...)
	primary.until("the standby follows", 20*time.Second, "select count(*) = 1 from pg_stat_replication where state = 'streaming'")
	return primary, standby
}

// both is a pool that finds whichever of the two is primary.
func both(t testing.TB, a, b *node) *pgxpool.Pool {
	return newPool(t, fmt.Sprintf("postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/postgres?sslmode=disable&"+
		"target_session_attrs=read-write&connect_timeout=2", a.port, b.port))
}

func migrate(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	if _, err := postgres.Migrate(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
}

func request(name string, ttl time.Duration) backend.Request {
	id := backend.NewRequestID()
	return backend.Request{Name: name, RequestID: id, HoldID: backend.HoldID(id), Owner: "test", TTL: ttl}
}

func soon(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func take(t testing.TB, d backend.Driver, name string) backend.Grant {
	t.Helper()
	ctx := soon(t, 40*time.Second)
	for {
		g, err := d.Acquire(ctx, request(name, 10*time.Second))
		if err == nil {
			return g
		}
		if ctx.Err() != nil {
			t.Fatalf("acquire: %v", err)
		}
		time.Sleep(50 * time.Millisecond) // until the standby is primary, and the pool has found it
	}
}

// renewed renews until there is a definite answer.
func renewed(t testing.TB, d backend.Driver, g backend.Grant) error {
	for ctx := soon(t, 30*time.Second); ; {
		err := d.Renew(ctx, []backend.Grant{g})[0].Err
		if err == nil || errors.Is(err, backend.ErrNotHeld) || ctx.Err() != nil {
			return err
		}
	}
}

func failovers() int {
	if deep.Wanted() {
		return 20
	}
	return 1
}

// A standby that has not seen the last grants is promoted. A counter in a row, or a sequence, would issue their tokens
// again.
func TestTokensRiseAcrossAsynchronousFailover(t *testing.T) {
	for range failovers() {
		primary, standby := pair(t)
		d := postgres.New(both(t, primary, standby), nil)
		migrate(t, newPool(t, primary.url()))
		if err := d.Ping(soon(t, 20*time.Second)); err != nil {
			t.Fatal(err)
		}
		if ex := d.Describe().Exclusion; ex != backend.ExclusionAsyncReplica {
			t.Errorf("the exclusion of an asynchronous pair is %v", ex)
		}
		space := d.Describe().TokenSpace
		primary.until("the standby has the schema", 20*time.Second,
			"select replay_lsn >= pg_current_wal_lsn() from pg_stat_replication")
		standby.kill() // it lags from here on
		var last backend.Grant
		for range 20 {
			last = take(t, d, "x")
			if err := d.Release(soon(t, 20*time.Second), last); err != nil {
				t.Fatal(err)
			}
		}
		held := take(t, d, "held") // forgotten by the failover
		primary.kill()
		standby.start()
		standby.run("pg_ctl", "promote", "-D", standby.dir, "-w")
		next := take(t, d, "x")
		if next.Token <= last.Token {
			t.Errorf("after the failover token %v, before it %v", next.Token, last.Token)
		}
		rival := take(t, d, "held")
		if rival.Token <= held.Token {
			t.Errorf("the second holder has token %v, the first %v", rival.Token, held.Token)
		}
		if err := renewed(t, d, held); !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("renewing the hold that the failover forgot = %v, want ErrNotHeld", err)
		}
		if now := d.Describe().TokenSpace; now != space {
			t.Errorf("the token space was %s and is %s", space, now)
		}
		closeDriver(t, d)
		standby.kill()
	}
}

// With a quorum nothing that was acknowledged is lost: the hold lives on through the failover, and gets its whole TTL.
func TestHoldSurvivesQuorumFailover(t *testing.T) {
	for range failovers() {
		primary, standby := pair(t, "synchronous_standby_names=ANY 1 (*)")
		d := postgres.New(both(t, primary, standby), nil)
		other := postgres.New(both(t, primary, standby), nil)
		migrate(t, newPool(t, primary.url()))
		held := take(t, d, "x")
		if ex := d.Describe().Exclusion; ex != backend.ExclusionQuorum {
			t.Errorf("the exclusion of a synchronous pair is %v", ex)
		}
		primary.kill()
		standby.run("pg_ctl", "promote", "-D", standby.dir, "-w")
		// Alone it would wait for a standby of its own for ever.
		conn, err := pgx.Connect(t.Context(), standby.url())
		if err != nil {
			t.Fatal(err)
		}
		for _, sql := range []string{"alter system set synchronous_standby_names = ''", "select pg_reload_conf()"} {
			if _, err := conn.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
		_ = conn.Close(t.Context())
		standby.kill()
		standby.start() // with what it keeps: its command line would go on to override that
		if err := renewed(t, d, held); err != nil {
			t.Errorf("the hold did not live on: %v", err)
		}
		if _, err := other.Acquire(soon(t, 20*time.Second), request("x", 10*time.Second)); err == nil {
			t.Error("a rival was granted beside it")
		}
		if err := d.Release(soon(t, 20*time.Second), held); err != nil {
			t.Errorf("release: %v", err)
		}
		if next := take(t, other, "x"); next.Token <= held.Token {
			t.Errorf("token %v after %v", next.Token, held.Token)
		}
		closeDriver(t, d)
		closeDriver(t, other)
		standby.kill()
	}
}

// A commit that waits for its standby, and whose wait an operator cancels, is answered as a success with a warning. It is
// none.
func TestCancelledSynchronousCommitIsUnknown(t *testing.T) {
	primary, standby := pair(t, "synchronous_standby_names=ANY 1 (*)")
	d := postgres.New(newPool(t, primary.url()), nil)
	defer closeDriver(t, d)
	migrate(t, newPool(t, primary.url()))
	if err := d.Release(soon(t, 20*time.Second), take(t, d, "warm")); err != nil {
		t.Fatal(err)
	}
	standby.kill()
	done := make(chan error, 1)
	ctx := soon(t, 4*time.Second)
	go func() {
		_, err := d.Acquire(ctx, request("x", 10*time.Second))
		done <- err
	}()
	primary.until("its commit waits", 4*time.Second, "select count(*) > 0 from pg_stat_activity where wait_event = 'SyncRep' and query like '%acquire%'")
	primary.until("it is cancelled", 4*time.Second, "select bool_or(pg_cancel_backend(pid)) from pg_stat_activity where wait_event = 'SyncRep' and query like '%acquire%'")
	if err := <-done; !errors.Is(err, backend.ErrUnknown) {
		t.Errorf("an acquire whose commit was confirmed by nobody = %v, want ErrUnknown", err)
	}
}

func closeDriver(t testing.TB, d backend.Driver) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	_ = d.Close(ctx) // the server may be gone
}
