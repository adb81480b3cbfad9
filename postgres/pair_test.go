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
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/postgres"
)

// local is a PostgreSQL server as a process, from Debian's programs.
type local struct {
	bin  string
	dir  string
	port int
	who  *syscall.Credential // the server refuses to run as root
	cmd  *exec.Cmd
	log  bytes.Buffer
	env  []string // of the server, in addition to ours

	ended <-chan struct{}
}

func newLocal(t testing.TB) *local {
	t.Helper()
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if len(found) == 0 {
		if os.Getenv("FENCELOCK_REQUIRE") == "all" {
			t.Fatal("a primary with a standby needs the programs of PostgreSQL: install Debian's package postgresql")
		}
		t.Skip("a primary with a standby needs the programs of PostgreSQL: install Debian's package postgresql")
	}
	_, number, _ := net.SplitHostPort(freeport.Addresses(t, 1)[0])
	n := &local{bin: filepath.Dir(found[len(found)-1])}
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
	t.Cleanup(func() { _ = n.Stop(context.Background()) })
	return n
}

func (n *local) run(t testing.TB, program string, args ...string) {
	t.Helper()
	if !filepath.IsAbs(program) {
		program = filepath.Join(n.bin, program)
	}
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.SysProcAttr = filepath.Dir(n.dir), &syscall.SysProcAttr{Credential: n.who}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", program, err, out)
	}
}

func (n *local) Addr() string { return fmt.Sprintf("127.0.0.1:%d", n.port) }
func (n *local) URL() string  { return urlOf(n.Addr()) }

func (n *local) NewLink(t testing.TB) (string, fault.Link) { return linkTo(t, n.Addr()) }

func (n *local) Restart(ctx context.Context) error { return errors.Join(n.Stop(ctx), n.Start(ctx)) }
func (n *local) Pause(context.Context) error       { return n.signal(syscall.SIGSTOP) }
func (n *local) Resume(context.Context) error      { return n.signal(syscall.SIGCONT) }

// signal sends a signal to the server and to all of its processes.
func (n *local) signal(sig syscall.Signal) error {
	server := n.cmd.Process.Pid
	err := syscall.Kill(server, sig) // first, so that it starts no more processes
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range stats {
		text, _ := os.ReadFile(file) // the process may have ended
		_, rest, _ := strings.Cut(string(text), ") ")
		if fields := strings.Fields(rest); len(fields) > 1 && fields[1] == strconv.Itoa(server) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			err = errors.Join(err, syscall.Kill(pid, sig))
		}
	}
	return err
}

// Start runs the server and waits until it answers.
func (n *local) Start(ctx context.Context) error {
	args := []string{"-D", n.dir, "-p", strconv.Itoa(n.port), "-c", "listen_addresses=127.0.0.1", "-c",
		"unix_socket_directories=", "-c", "shared_buffers=32MB", "-c", "max_connections=800"}
	n.cmd = exec.Command(filepath.Join(n.bin, "postgres"), args...)
	n.cmd.Dir, n.cmd.Stderr, n.cmd.Env = filepath.Dir(n.dir), &n.log, append(os.Environ(), n.env...)
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: n.who}
	var err error
	if n.ended, err = launch(n.cmd); err != nil {
		return err
	}
	for {
		conn, err := pgx.Connect(ctx, n.URL())
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-n.ended:
			return fmt.Errorf("PostgreSQL ended: %s", &n.log)
		case <-ctx.Done():
			return err
		}
	}
}

// Stop ends the server and all of its processes immediately, as the loss of the machine would.
func (n *local) Stop(context.Context) error {
	if n.cmd == nil {
		return nil
	}
	_ = n.cmd.Process.Signal(syscall.SIGQUIT) // its processes end without further writes
	<-n.ended
	n.cmd = nil
	return nil
}

// node is a server that can be primary or standby.
type node struct {
	service
	t testing.TB
}

func (n *node) start() { n.t.Helper(); containers.Within(n.Start)(n.t) }
func (n *node) kill()  { n.t.Helper(); containers.Within(n.Stop)(n.t) }

// until waits until a query returns true.
func (n *node) until(what string, patience time.Duration, query string) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		var yes bool
		conn, err := pgx.Connect(ctx, n.URL())
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
			n.t.Fatalf("%s: not within %v: %v", what, patience, err)
		}
	}
}

// one starts a server without a standby.
func one(t testing.TB) *node {
	t.Helper()
	n := newLocal(t)
	n.run(t, "initdb", "-D", n.dir, "--auth=trust", "-U", "postgres", "--no-sync")
	server := &node{n, t}
	server.start()
	return server
}

// pair starts a primary with a standby that follows it. With quorum a commit waits for the standby.
func pair(t testing.TB, quorum bool) (primary, standby *node) {
	t.Helper()
	p, s := newLocal(t), newLocal(t)
	primary, standby = &node{p, t}, &node{s, t}
	p.run(t, "initdb", "-D", p.dir, "--auth=trust", "-U", "postgres", "--no-sync")
	primary.start()
	s.run(t, "pg_basebackup", "-h", "127.0.0.1", "-p", strconv.Itoa(p.port), "-U", "postgres", "-D", s.dir, "-R",
		"-X", "stream", "--no-sync")
	standby.start()
	return joined(primary, standby, quorum)
}

// containerPair is pair for containers.
func containerPair(t testing.TB, quorum bool) (primary, standby *node) {
	t.Helper()
	p, s := containers.PostgresPair(t)
	return joined(&node{p, t}, &node{s, t}, quorum)
}

func joined(primary, standby *node, quorum bool) (*node, *node) {
	primary.t.Helper()
	primary.until("the standby follows", 30*time.Second,
		"select count(*) = 1 from pg_stat_replication where state = 'streaming'")
	if quorum {
		primary.set("ANY 1 (*)")
	}
	return primary, standby
}

// set sets the standbys for which a commit waits.
func (n *node) set(synchronous string) {
	n.t.Helper()
	conn := connect(n.t, n.URL())
	for _, sql := range []string{
		"alter system set synchronous_standby_names = '" + synchronous + "'", "select pg_reload_conf()",
	} {
		if _, err := conn.Exec(soon(n.t, 20*time.Second), sql); err != nil {
			n.t.Fatal(err)
		}
	}
	n.until("it has read its settings", 20*time.Second,
		"select current_setting('synchronous_standby_names') = '"+synchronous+"'")
}

// promote makes a standby the primary.
func (n *node) promote() {
	n.t.Helper()
	n.until("it is promoted", 60*time.Second, "select case when pg_is_in_recovery() then pg_promote() else true end")
}

// replicated waits until the standby has all commits.
func (n *node) replicated() {
	n.t.Helper()
	n.until("the standby has everything", 20*time.Second,
		"select bool_and(replay_lsn >= pg_current_wal_lsn()) from pg_stat_replication")
}

// both returns the URL that finds the primary among the two.
func both(a, b *node) string {
	return fmt.Sprintf("postgres://postgres@%s,%s/postgres?sslmode=disable&target_session_attrs=read-write&connect_timeout=2",
		a.Addr(), b.Addr())
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
		g, err := d.Acquire(ctx, request(name, time.Minute))
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

// A standby that lacks the last grants is promoted, and its clock is an hour ahead. A counter in a row would issue
// their tokens again, and so would a sequence. A hold that the standby has seen continues.
func TestAsynchronousFailover(t *testing.T) {
	t.Parallel()
	primary, standby := pair(t, false)
	migrate(t, newPool(t, primary.URL()))
	execute := func(n *node, sql string) {
		t.Helper()
		if _, err := connect(t, n.URL()).Exec(soon(t, 20*time.Second), sql); err != nil {
			t.Fatal(err)
		}
	}
	execute(primary, `create schema stepping`)
	execute(primary, `create function stepping.clock_timestamp() returns timestamptz language sql volatile as $$
		select pg_catalog.clock_timestamp() + case when pg_is_in_recovery() or pg_walfile_name(pg_current_wal_insert_lsn()) < '00000002'
			then interval '0' else interval '1 hour' end $$`)
	const someWAL = ` as select generate_series(1, 150000) as n`
	execute(primary, `create table written_before`+someWAL) // the checkpoint after the promotion takes a while
	stepping := func() *pgxpool.Pool {
		return newPool(t, both(primary, standby)+"&search_path=stepping,pg_catalog,public")
	}

	type one struct {
		o                   *postgres.Options
		d                   *postgres.Driver
		kept, last, skipped backend.Grant
	}
	all := map[string]*one{}
	mutants := []mutant{asItIs, counter, controlFile, unprolonged}
	for _, m := range mutants {
		o := m.apply(t, primary.URL())
		d := postgres.New(stepping(), o)
		all[m.schema] = &one{o: o, d: d, kept: take(t, d, "kept")}
	}
	d, space := all[asItIs.schema].d, all[asItIs.schema].d.Describe().TokenSpace
	if ex := d.Describe().Exclusion; ex != backend.ExclusionAsyncReplica {
		t.Errorf("the exclusion of an asynchronous pair is %v", ex)
	}
	primary.replicated()
	standby.kill() // from here on it lags by more than the new primary writes before it grants
	execute(primary, `create table written_after`+someWAL)
	for _, one := range all {
		for range 10 {
			one.last = take(t, one.d, "x")
			if err := one.d.Release(soon(t, 20*time.Second), one.last); err != nil {
				t.Fatal(err)
			}
		}
		one.skipped = take(t, one.d, "skipped") // lost in the failover
	}
	primary.kill()
	standby.start()
	standby.promote()

	for _, m := range mutants {
		execute(standby, `update `+m.schema+`.sessions set suspected_at = clock_timestamp() - interval '1 hour'`)
	}
	const rises, lives = "tokens rise across a failover", "holds live on across a failover"
	for _, m := range mutants {
		one := all[m.schema]
		other := postgres.New(stepping(), one.o) // its first call may be the first on the new timeline
		_, err := other.Acquire(soon(t, 20*time.Second), request("kept", time.Minute))
		if errors.Is(err, backend.ErrHeld) {
			err = nil
		} else {
			err = fmt.Errorf("a rival of the hold that the standby had seen: %v, want ErrHeld", err)
		}
		if m.schema == asItIs.schema || m.schema == unprolonged.schema {
			m.caught(t, lives, err)
		}
		err = nil
		if next := take(t, other, "x"); next.Token <= one.last.Token {
			err = fmt.Errorf("after the failover token %v, before it %v", next.Token, one.last.Token)
		}
		if m.schema != unprolonged.schema {
			m.caught(t, rises, err)
		}
		closeDriver(t, other)
	}

	mine := all[asItIs.schema]
	if err := renewed(t, d, mine.kept); err != nil {
		t.Errorf("the hold that the standby had seen did not live on: %v", err)
	}
	rival := take(t, d, "skipped")
	if rival.Token <= mine.skipped.Token {
		t.Errorf("the second holder has token %v, the first %v", rival.Token, mine.skipped.Token)
	}
	if err := renewed(t, d, mine.skipped); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("renewing the hold that the failover forgot = %v, want ErrNotHeld", err)
	}
	if now := d.Describe().TokenSpace; now != space {
		t.Errorf("the token space was %s and is %s", space, now)
	}
	for _, one := range all {
		closeDriver(t, one.d)
	}
}

// A standby is promoted while its primary continues and grants: a guard that has seen the new primary refuses the
// tokens of the old one. After a promotion, a driver examines the standbys of the new server.
func TestTwoPrimaries(t *testing.T) {
	t.Parallel()
	primary, standby := pair(t, false)
	migrate(t, newPool(t, primary.URL()))
	pool := newPool(t, standby.URL())
	old := postgres.New(newPool(t, primary.URL()), nil)
	moves := postgres.New(newPool(t, both(primary, standby)), nil)
	defer closeDriver(t, old)
	defer closeDriver(t, moves)
	take(t, old, "before")
	take(t, moves, "moves before")
	primary.replicated()
	standby.promote()
	next := postgres.New(pool, nil)
	defer closeDriver(t, next)
	newer, older := take(t, next, "x"), take(t, old, "x")
	if older.Token >= newer.Token {
		t.Errorf("the old primary granted token %v, the new one %v", older.Token, newer.Token)
	}
	space := next.Describe().TokenSpace
	if was := old.Describe().TokenSpace; was != space {
		t.Errorf("the token spaces are %s and %s", was, space)
	}
	show := func(g backend.Grant) error {
		claim := fencing.Claim{Resource: "x", Token: g.Token, Space: space}
		return postgres.Tx(soon(t, 20*time.Second), pool, claim, func(context.Context, pgx.Tx) error { return nil })
	}
	if err := show(newer); err != nil {
		t.Error(err)
	}
	if err := show(older); !errors.Is(err, fencing.ErrStale) {
		t.Errorf("the old primary's token: %v, want ErrStale", err)
	}
	primary.kill()
	for ctx := soon(t, 40*time.Second); moves.Describe().Exclusion != backend.ExclusionDurableServer; {
		if ctx.Err() != nil {
			t.Fatalf("on a server without a standby the exclusion is %v", moves.Describe().Exclusion)
		}
		g := take(t, moves, "moves")
		_ = moves.Release(ctx, g)
	}
}

// With a quorum no acknowledged change is lost: the hold survives the failover.
func TestHoldSurvivesQuorumFailover(t *testing.T) {
	t.Parallel()
	for name, pair := range map[string]func(testing.TB, bool) (*node, *node){
		"processes": pair, "containers": containerPair,
	} {
		t.Run(name, func(t *testing.T) {
			if name == "containers" {
				testtier.Only(t) // on a slow disk the servers take a minute to start
			}
			t.Parallel()
			primary, standby := pair(t, true)
			holdSurvives(t, primary, standby)
		})
	}
}

func holdSurvives(t *testing.T, primary, standby *node) {
	d := postgres.New(newPool(t, both(primary, standby)), nil)
	other := postgres.New(newPool(t, both(primary, standby)), nil)
	defer closeDriver(t, d)
	defer closeDriver(t, other)
	migrate(t, newPool(t, primary.URL()))
	held := take(t, d, "x")
	if ex := d.Describe().Exclusion; ex != backend.ExclusionQuorum {
		t.Errorf("the exclusion of a synchronous pair is %v", ex)
	}
	primary.kill()
	standby.promote()
	standby.set("") // without a standby it would wait for one indefinitely
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
}

// A commit waits for its standby. If an operator cancels the wait, the server reports a success with a warning, which
// is no success. If the client dies, its request is granted when the standby comes back, and closes the name for one
// TTL.
func TestSynchronousCommitWithoutAStandby(t *testing.T) {
	t.Parallel()
	primary, standby := pair(t, true)
	migrate(t, newPool(t, primary.URL()))
	// A grant waits whatever the role's setting is.
	if _, err := connect(t, primary.URL()).Exec(
		soon(t, 20*time.Second), `alter role postgres set synchronous_commit = off`,
	); err != nil {
		t.Fatal(err)
	}
	d, believer := postgres.New(newPool(t, primary.URL()), nil), postgres.New(newPool(t, primary.URL()), nil)
	postgres.IgnoreNotices(believer, newPool(t, primary.URL()))
	defer closeDriver(t, d)
	defer closeDriver(t, believer)
	for _, each := range []*postgres.Driver{d, believer} {
		if err := each.Release(soon(t, 20*time.Second), take(t, each, "warm")); err != nil {
			t.Fatal(err)
		}
	}
	dying := connect(t, primary.URL())
	if _, err := dying.Exec(
		soon(t, 20*time.Second), `select fencelock.begin_session('dying', 'nobody', 60000)`,
	); err != nil {
		t.Fatal(err)
	}
	standby.kill()
	ctx := soon(t, 60*time.Second)
	ask := func(d *postgres.Driver, name string) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := d.Acquire(ctx, request(name, time.Minute)) // on the existing session
			done <- err
		}()
		return done
	}
	waits := func(n int) string {
		return fmt.Sprintf("select count(*) >= %d from pg_stat_activity where wait_event = 'SyncRep' and query like '%%acquire%%'", n)
	}
	window := stallmeter.Begin()
	defer window.End()
	unknown, believed := ask(d, "x"), ask(believer, "y")
	primary.until("their commits wait", 20*time.Second, waits(2))
	primary.until("they are cancelled", 20*time.Second,
		"select bool_or(pg_cancel_backend(pid)) from pg_stat_activity where wait_event = 'SyncRep' and query like '%acquire%'")
	if err := <-unknown; !errors.Is(err, backend.ErrUnknown) {
		t.Errorf("an acquire whose commit was confirmed by nobody = %v, want ErrUnknown", err)
	}
	if err := <-believed; err != nil {
		window.Errorf(t, 3*time.Second, "a driver that ignores notices: %v; does the notice still come?", err)
	}
	testfindings.Write(t, testfindings.Mutant{What: "postgres: notices of a commit are ignored", Killers: t.Name()})

	go func() {
		_, _ = dying.Exec(context.WithoutCancel(ctx), `select fencelock.acquire(row('z', 'request-by-hand', 'h', 'dying', 'hand', 0, 0, 0, 0,
			null, null, false, null, null)::fencelock.holds, false, null)`)
	}()
	primary.until("its commit waits", 20*time.Second, waits(1))
	_ = dying.PgConn().Conn().Close() // without a message
	standby.start()
	execute(t, primary, `update fencelock.sessions set expires_at = least(expires_at, clock_timestamp() + interval '1 s')
		where id = 'dying'`)
	rival := request("z", time.Minute)
	rival.Wait = true
	if _, err := d.Acquire(ctx, rival); err != nil {
		t.Errorf("the name that a client left behind, which died in its commit: %v", err)
	}
}

// A disk is rolled back to an earlier copy: the server's timeline is the same, and its log position is below the
// position that the driver has seen. The server could issue tokens again, so the driver makes no further grants, and
// its holds are lost.
func TestDiskIsRolledBack(t *testing.T) {
	t.Parallel()
	n := newLocal(t)
	server := &node{n, t}
	n.run(t, "initdb", "-D", n.dir, "--auth=trust", "-U", "postgres", "--no-sync")
	server.start()
	migrate(t, newPool(t, server.URL()))
	server.kill()
	n.run(t, "/bin/cp", "-a", n.dir, n.dir+"-before")
	server.start()
	d := postgres.New(newPool(t, server.URL()), nil)
	defer closeDriver(t, d)
	lost := make(chan backend.Reason, 4)
	r := request("x", time.Minute)
	r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
	held, err := d.Acquire(soon(t, 20*time.Second), r)
	if err != nil {
		t.Fatal(err)
	}
	execute(t, server, `create table written as select generate_series(1, 20000) as n`) // more log than a recovery writes
	if err := renewed(t, d, held); err != nil {
		t.Fatal(err)
	}
	server.kill()
	n.run(t, "/bin/rm", "-r", n.dir)
	n.run(t, "/bin/mv", n.dir+"-before", n.dir)
	server.start()
	for ctx, err := soon(t, 30*time.Second), error(nil); !errors.Is(err, backend.ErrHistoryLost); sleepFor(ctx, 10*time.Millisecond) {
		if err = d.Renew(ctx, []backend.Grant{held})[0].Err; ctx.Err() != nil {
			t.Fatalf("renewing what an earlier copy of the disk does not have: %v, want ErrHistoryLost", err)
		}
	}
	_, err = d.Acquire(soon(t, 30*time.Second), request("y", time.Minute))
	if !errors.Is(err, backend.ErrHistoryLost) || !strings.Contains(err.Error(), "timeline and log position") {
		t.Errorf("after the disk was rolled back: %v, want ErrHistoryLost that names the position", err)
	}
	select {
	case why := <-lost:
		if why != backend.ReasonHistoryLost {
			t.Errorf("the reason is %q", why)
		}
	case <-time.After(20 * time.Second):
		t.Error("the holder was not notified")
	}
}

// TestConformanceOnAQuorum runs the suite on a primary whose commits wait for a standby.
func TestConformanceOnAQuorum(t *testing.T) {
	testtier.Only(t)
	primary, _ := pair(t, true)
	migrate(t, newPool(t, primary.URL()))
	conformance.Run(t, harness(primary, ways["New"]))
}

func closeDriver(t testing.TB, d backend.Driver) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	_ = d.Close(ctx) // the server may have ended
}
