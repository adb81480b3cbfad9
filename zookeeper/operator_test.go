package zookeeper_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/doctor"
	"github.com/fencelock/fencelock/zookeeper"
)

// TestTransactionsNearTheirEnd begins where the counter in the lower half of a zxid comes to its end, under a client with
// a hold and a waiter. A single server counts on in the upper half; in an ensemble the leader resigns, which TestLeaderDies
// tests.
func TestTransactionsNearTheirEnd(t *testing.T) {
	t.Parallel()
	const end, few = 1 << 32, 60
	server := containers.ZooKeeper(t, countedFrom(end-few, nil))
	d := driver(t, server.Addr())
	r := request("held", false)
	r.Lost = func(loss backend.Loss) { t.Errorf("the hold was lost: %v", loss.Reason) }
	held := take(t, d, r)
	next := make(chan backend.Grant, 1)
	go func() { next <- take(t, d, request("held", true)) }()
	if err := queued(soon(t, 20*time.Second), d, "held"); err != nil {
		t.Fatal(err)
	}
	last := held.Token
	if last >= end {
		t.Fatalf("token %v, want one before the end", last)
	}
	for last < end+few {
		g := take(t, d, request("x", false))
		if g.Token <= last || !g.Token.Exclusive() {
			t.Fatalf("token %v after %v", g.Token, last)
		}
		last = g.Token
		release(t, d, g)
	}
	if renewal := d.Renew(soon(t, 10*time.Second), []backend.Grant{held})[0]; renewal.Err != nil {
		t.Errorf("Renew = %v", renewal.Err)
	}
	release(t, d, held)
	g := <-next
	if g.Token <= held.Token {
		t.Errorf("the waiter got token %v after %v", g.Token, held.Token)
	}
	release(t, d, g)
	if g := take(t, driver(t, server.Addr()), request("held", false)); g.Token <= last {
		t.Errorf("a new client got token %v after %v", g.Token, last)
	}
}

// copyLog copies the snapshots and logs of a stopped server.
func copyLog(t testing.TB, to, from string) {
	t.Helper()
	const log = "version-2"
	to = filepath.Join(to, log)
	if err := errors.Join(os.RemoveAll(to), os.CopyFS(to, os.DirFS(filepath.Join(from, log)))); err != nil {
		t.Fatal(err)
	}
}

// TestDiskOfOneServerReverts restores an earlier state of one server's disk. With a server that was down it makes a
// majority of three: both lack changes that the third server has. A running client detects the loss and gives the ensemble
// another token space.
func TestDiskOfOneServerReverts(t *testing.T) {
	t.Parallel()
	ensemble := containers.ZooKeeperCluster(t, containers.AsProcess())
	all := ensemble.Endpoints()
	early := driver(t, all...)
	before := take(t, early, request("before", false))
	release(t, early, before)
	ctx := soon(t, 2*time.Minute)
	behind, _, err := ensemble.Leader(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	reverted, knows := (behind+1)%containers.Nodes, (behind+2)%containers.Nodes
	act := func(do func(*containers.Server) error, nodes ...int) {
		t.Helper()
		var acting sync.WaitGroup
		for _, i := range nodes {
			acting.Go(func() {
				if err := do(ensemble.Node(i)); err != nil {
					t.Error(err)
				}
			})
		}
		acting.Wait()
	}
	stop := func(s *containers.Server) error { return s.Stop(ctx) }
	start := func(s *containers.Server) error { return s.Start(ctx) }
	folder, backup := ensemble.Node(reverted).Folder(t), t.TempDir()
	act(stop, reverted)
	copyLog(t, backup, folder)
	act(stop, behind)
	// A high epoch stands for many elections before the disk reverts: otherwise the epochs of the next ones, and so tokens,
	// may exceed the lost ones.
	epoch := filepath.Join(folder, "version-2", "acceptedEpoch")
	if err := os.WriteFile(epoch, []byte("9"), 0o600); err != nil {
		t.Fatal(err)
	}
	act(start, reverted)
	d := driver(t, all...)
	lost := make(chan backend.Reason, 4)
	r := request("held", false)
	r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
	for range 20 {
		release(t, d, take(t, d, request("others", false)))
	}
	held := take(t, d, r)
	space := d.Describe().TokenSpace
	act(stop, reverted, knows)
	copyLog(t, folder, backup)
	act(start, reverted, behind)
	lostHistory(t, lost, backend.ReasonHistoryLost, backend.ReasonSessionExpired)
	forgotten(t, d, held, "zxid")
	again := anotherSpace(t, space, all...)
	if again.Token <= before.Token || again.Token >= held.Token {
		t.Errorf("token %v, want one between %v, which the disk knew, and %v, which it forgot", again.Token, before.Token,
			held.Token)
	}
}

// TestCopiedServer copies a server's files, and runs both. No client of one of them can detect it: both grant the same
// tokens of one space. The doctor reports it, and so does a client that moves from the original to the older copy.
func TestCopiedServer(t *testing.T) {
	t.Parallel()
	original := containers.ZooKeeper(t, containers.AsProcess())
	copied := containers.ZooKeeper(t, containers.AsProcess())
	first := driver(t, original.Addr())
	release(t, first, take(t, first, request("before", false)))
	ctx := soon(t, time.Minute)
	for _, s := range []*containers.ZooKeeperServer{original, copied} {
		if err := s.Stop(ctx); err != nil {
			t.Fatal(err)
		}
	}
	copyLog(t, copied.Folder(t), original.Folder(t))
	for _, s := range []*containers.ZooKeeperServer{original, copied} {
		if err := s.Start(ctx); err != nil {
			t.Fatal(err)
		}
	}
	network := &detour{to: original.Addr()}
	d := zookeeper.New([]string{"zookeeper.example:2181"},
		&zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: network.dial})
	t.Cleanup(func() { _ = d.Close(soon(t, 10*time.Second)) })
	lost := make(chan backend.Reason, 4)
	r := request("held", false)
	r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
	newAdmin(t, original.Addr()).advance(t, 100)
	held := take(t, d, r)
	there := driver(t, copied.Addr())
	again := take(t, there, request("held", false))
	if space := there.Describe().TokenSpace; space != d.Describe().TokenSpace || again.Token > held.Token {
		t.Errorf("the copy grants token %v of %s, the original %v of %s: it is no copy", again.Token, space, held.Token,
			d.Describe().TokenSpace)
	}
	report, err := doctor.Examine(ctx, "zk://"+original.Addr()+","+copied.Addr()+"?tick="+containers.ZooKeeperTick.String())
	if err != nil {
		t.Fatal(err)
	}
	if found := strings.Join(report.Diagnose(), "\n"); !strings.Contains(found, "2 servers lead at once") {
		t.Errorf("the doctor says %q, want that two servers lead", found)
	}
	network.replace(copied.Addr())
	lostHistory(t, lost, backend.ReasonHistoryLost, backend.ReasonSessionExpired)
	forgotten(t, d, held, "zxid")
}
