package postgres_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/doctor"
	"github.com/fencelock/fencelock/postgres"
)

// shutDown stops a server with a last checkpoint, as pg_resetwal and a copy of the files need it.
func (n *local) shutDown(t testing.TB) {
	t.Helper()
	_ = n.cmd.Process.Signal(syscall.SIGINT)
	select {
	case <-n.ended:
	case <-soon(t, time.Minute).Done():
		t.Fatal("the server does not shut down")
	}
	n.cmd = nil
}

// The numbers that a token consists of, and those of transactions, come to their ends under a client with a hold.
func TestCountersNearTheirEnd(t *testing.T) {
	t.Parallel()
	first := one(t)
	migrate(t, newPool(t, first.URL()))
	first.service.(*local).shutDown(t)
	for name, test := range map[string]func(*worn, *testing.T){
		"log position": (*worn).logEnds, "timeline": (*worn).timelineEnds, "transactions": (*worn).transactionsWrap,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newLocal(t)
			n.run(t, "/bin/cp", "-a", first.service.(*local).dir, n.dir)
			server := &node{n, t}
			server.start()
			w := &worn{node: server, n: n, clock: &leaping{}}
			w.d = postgres.New(newPool(t, server.URL()), &postgres.Options{Clock: w.clock})
			defer closeDriver(t, w.d)
			r := request("held", 12*time.Hour)
			r.Lost = func(loss backend.Loss) { w.lost.Store(&loss) }
			var err error
			if w.held, err = w.d.Acquire(soon(t, time.Minute), r); err != nil {
				t.Fatal(err)
			}
			w.last = w.held.Token
			test(w, t)
		})
	}
}

// worn is a server whose numbers come to an end.
type worn struct {
	*node
	n     *local
	clock *leaping
	d     *postgres.Driver
	held  backend.Grant
	last  fencing.Token
	lost  atomic.Pointer[backend.Loss]
}

// holds checks that the hold of before goes on.
func (w *worn) holds(t *testing.T) {
	t.Helper()
	if err := renewed(t, w.d, w.held); err != nil {
		t.Errorf("the hold of before: %v", err)
	}
	if loss := w.lost.Load(); loss != nil {
		t.Errorf("the hold of before was lost: %v", loss.Reason)
	}
}

// set changes the numbers in the files of the server.
func (w *worn) set(t *testing.T, args ...string) {
	t.Helper()
	w.n.shutDown(t)
	w.n.run(t, "pg_resetwal", append(args, "-D", w.n.dir)...)
	w.start()
}

// grants acquires until a call is refused, n times at most. Tokens rise.
func (w *worn) grants(t *testing.T, n int, then func()) error {
	t.Helper()
	for ctx := soon(t, time.Minute); n > 0; {
		g, err := w.d.Acquire(ctx, request("x", time.Minute))
		if ctx.Err() == nil && (errors.Is(err, backend.ErrUnavailable) || errors.Is(err, backend.ErrUnknown)) {
			continue // the pool has connections of before the restart
		}
		if err != nil {
			return err
		}
		if g.Token <= w.last || g.Token > fencing.MaxToken {
			t.Errorf("token %v after %v", g.Token, w.last)
		}
		w.last = g.Token
		if err := w.d.Release(ctx, g); err != nil {
			return err
		}
		if n--; then != nil {
			then()
		}
	}
	return nil
}

// logEnds: the log comes to the last position for which a token has bits. From there on nothing is granted. A running client
// cannot distinguish that from a log that went back, and loses its holds.
func (w *worn) logEnds(t *testing.T) {
	w.set(t, "-l", "000000010001FFFF000000FD")
	err := w.grants(t, 20, func() { execute(t, w, `select pg_switch_wal()`) })
	if !errors.Is(err, backend.ErrMisconfigured) && !errors.Is(err, backend.ErrHistoryLost) {
		t.Errorf("beyond the bits of a token: %v, want ErrMisconfigured or ErrHistoryLost", err)
	}
	if position := uint64(w.last) & (1<<43 - 1); w.last>>43 != 1 || position < (1<<43)-(1<<20) {
		t.Errorf("the last token is %v: timeline %d, position %x", w.last, w.last>>43, position)
	}
	fresh := postgres.New(newPool(t, w.URL()), nil)
	defer closeDriver(t, fresh)
	_, err = fresh.Acquire(soon(t, 30*time.Second), request("fresh", time.Minute))
	if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), "pg_current_wal_insert_lsn") {
		t.Errorf("a new client: %v, want ErrMisconfigured that names the position", err)
	}
	var gone *backend.NotHeldError
	if err := renewed(t, w.d, w.held); err != nil && (!errors.As(err, &gone) || gone.Reason != backend.ReasonHistoryLost) {
		t.Errorf("the hold of before: %v", err)
	}
}

// timelineEnds: a server is promoted to the timeline 1024, for which a token has no bits.
func (w *worn) timelineEnds(t *testing.T) {
	w.set(t, "-l", "000003FF0000000000000010")
	if err := w.grants(t, 3, nil); err != nil {
		t.Fatalf("on the last timeline: %v", err)
	}
	if w.last>>43 != 1023 {
		t.Errorf("token %v is of timeline %d, want 1023", w.last, w.last>>43)
	}
	w.n.shutDown(t)
	w.n.run(t, "/bin/sh", "-c", fmt.Sprintf(`touch %[1]s/recovery.signal
		printf "%%s\n" "restore_command = 'false'" "recovery_target_action = 'promote'" >> %[1]s/postgresql.auto.conf`, w.n.dir))
	w.start()
	w.until("it is promoted", time.Minute, "select not pg_is_in_recovery()")
	w.clock.ahead.Add(int64(31 * time.Second))
	err := w.grants(t, 1000, nil)
	if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), "timeline") {
		t.Errorf("on timeline 1024: %v, want ErrMisconfigured that names the timeline", err)
	}
	w.holds(t)
}

// transactionsWrap: the numbers of transactions start again, by one of which the driver recognizes a restored dump.
func (w *worn) transactionsWrap(t *testing.T) {
	const last = 1<<32 - 1
	for _, database := range []string{"postgres", "template1"} {
		execute(t, in{w.node, database}, `vacuum freeze`)
	}
	execute(t, w, `alter database template0 allow_connections true`)
	execute(t, in{w.node, "template0"}, `vacuum freeze`)
	status := filepath.Join(w.n.dir, "pg_xact", "0FFF") // of the last transactions
	w.n.run(t, "/bin/sh", "-c", "head -c 262144 /dev/zero > "+status)
	w.set(t, "-x", strconv.Itoa(last-30), "-u", strconv.Itoa(last-1000))
	n := 0
	err := w.grants(t, 40, func() {
		execute(t, w, `select pg_current_xact_id()`)
		if n++; n%10 == 0 {
			w.holds(t)
		}
	})
	if err != nil {
		t.Error(err)
	}
	w.until("the numbers have started again", time.Minute, `select pg_current_xact_id()::text::numeric > 4294967296`)
	execute(t, w, `update fencelock.cluster set names_swept = '-infinity', written = fencelock.this_transaction()`)
	if err := w.grants(t, 3, nil); err != nil { // names are swept, which writes the row
		t.Error(err)
	}
	w.holds(t)
	fresh := postgres.New(newPool(t, w.URL()), nil)
	defer closeDriver(t, fresh)
	if g := take(t, fresh, "fresh"); g.Token <= w.last {
		t.Errorf("token %v after %v", g.Token, w.last)
	}
}

// A server's files are copied, and both servers run. No client of one of them can detect it: both grant tokens of one
// space. The doctor reports it, and so does a client that moves from the original to the older copy.
func TestCopiedServer(t *testing.T) {
	t.Parallel()
	original := one(t)
	n := original.service.(*local)
	migrate(t, newPool(t, original.URL()))
	addr, link := linkTo(t, original.Addr())
	moves := link.(*fault.Proxy)
	n.shutDown(t)
	twin := newLocal(t)
	twin.run(t, "/bin/cp", "-a", n.dir, twin.dir)
	copied := &node{twin, t}
	original.start()
	copied.start()
	here, there := postgres.New(newPool(t, urlOf(addr)), nil), postgres.New(newPool(t, copied.URL()), nil)
	defer closeDriver(t, here)
	defer closeDriver(t, there)
	lost := make(chan backend.Reason, 4)
	r := request("x", time.Minute)
	r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
	execute(t, original, `create table written as select generate_series(1, 20000) as n`)
	held, err := here.Acquire(soon(t, time.Minute), r)
	if err != nil {
		t.Fatal(err)
	}
	again := take(t, there, "x")
	if a, b := here.Describe().TokenSpace, there.Describe().TokenSpace; a != b || again.Token > held.Token {
		t.Errorf("token %v of %s, and of the copy %v of %s: it is no copy", held.Token, a, again.Token, b)
	}
	both := fmt.Sprintf("postgres://postgres@%s,%s/postgres?sslmode=disable", original.Addr(), copied.Addr())
	report, err := doctor.Examine(soon(t, time.Minute), both)
	if err != nil {
		t.Fatal(err)
	}
	if found := strings.Join(report.Diagnose(), "\n"); !strings.Contains(found, "2 servers lead at once") {
		t.Errorf("the doctor says %q, want that two servers lead", found)
	}
	moves.SetUpstream(copied.Addr())
	moves.Reset()
	losesHistory(t, here, held, lost)
}

// losesHistory waits until a driver reports the loss of history, as the reason of its hold's loss, too.
func losesHistory(t *testing.T, d *postgres.Driver, held backend.Grant, lost <-chan backend.Reason) {
	t.Helper()
	for ctx, err := soon(t, 30*time.Second), error(nil); !errors.Is(err, backend.ErrHistoryLost); sleepFor(ctx, 10*time.Millisecond) {
		if err = d.Renew(ctx, []backend.Grant{held})[0].Err; ctx.Err() != nil {
			t.Fatalf("Renew = %v, want ErrHistoryLost", err)
		}
	}
	if _, err := d.Acquire(soon(t, 30*time.Second), request("y", time.Minute)); !errors.Is(err, backend.ErrHistoryLost) {
		t.Errorf("Acquire = %v, want ErrHistoryLost", err)
	}
	select {
	case why := <-lost:
		if why != backend.ReasonHistoryLost {
			t.Errorf("the reason is %q", why)
		}
	case <-soon(t, 20*time.Second).Done():
		t.Error("the holder was not notified")
	}
}

// The disk of the synchronous standby reverts to an earlier state, and the standby is promoted: it lacks changes that the
// quorum had acknowledged. That looks like any promotion, so a rival may be granted a lock beside its holder, whose next
// renewal fails. Tokens rise.
func TestRevertedStandbyIsPromoted(t *testing.T) {
	t.Parallel()
	primary, standby := pair(t, true)
	n := standby.service.(*local)
	migrate(t, newPool(t, primary.URL()))
	d := postgres.New(newPool(t, both(primary, standby)), nil)
	defer closeDriver(t, d)
	take(t, d, "before")
	primary.replicated()
	n.shutDown(t)
	n.run(t, "/bin/cp", "-a", n.dir, n.dir+"-before")
	standby.start()
	primary.until("the standby follows", 30*time.Second,
		"select count(*) = 1 from pg_stat_replication where state = 'streaming'")
	held := take(t, d, "x")
	primary.replicated()
	primary.kill()
	n.shutDown(t)
	if err := os.RemoveAll(n.dir); err != nil {
		t.Fatal(err)
	}
	n.run(t, "/bin/mv", n.dir+"-before", n.dir)
	standby.start()
	standby.promote()
	standby.set("")
	rival := postgres.New(newPool(t, standby.URL()), nil)
	defer closeDriver(t, rival)
	if next := take(t, rival, "x"); next.Token <= held.Token {
		t.Errorf("token %v after %v", next.Token, held.Token)
	}
	if a, b := d.Describe().TokenSpace, rival.Describe().TokenSpace; a != b {
		t.Errorf("the token spaces are %s and %s", a, b)
	}
	var gone *backend.NotHeldError
	if err := renewed(t, d, held); !errors.As(err, &gone) || gone.Reason != backend.ReasonEvicted {
		t.Errorf("renewing what the standby forgot: %v, want a NotHeldError with %q", err, backend.ReasonEvicted)
	}
}
