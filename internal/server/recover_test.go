package server

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/server/replica"
)

// Two of three disks are gone. The third is enough to go on: with greater tokens, and without a second holder.
func TestRecover(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, nil)
	x := newCaller(t, c.connect)
	last := x.lock("x").GetToken()
	survivor := (c.leader() + 1) % 3
	index := c.servers[c.leader()].replica.Status().LastIndex
	eventually(t, "the survivor has the hold", func() bool { return c.servers[survivor].replica.Applied() >= index })
	cluster := c.servers[survivor].replica.State.Cluster()
	for i := range c.servers {
		c.stop(i)
	}
	dir := c.configs[survivor].DataDir
	const closed = 300 * time.Millisecond
	r, err := replica.Recover(dir, replica.RestoreOptions{ClosedFor: closed})
	if err != nil || r.Cluster != cluster || r.ClosedFor != closed || r.Revision < last+1<<32 {
		t.Fatalf("recovered: %+v, %v; the last token was %d", r, err, last)
	}
	began := time.Now()
	s := alone(t, Config{DataDir: dir})
	if took := time.Since(began); took < closed {
		t.Errorf("it serves after %v", took)
	}
	y := attach(t, s)
	if _, next := y.hold(y.open(longTTL), "x"); next <= r.Revision {
		t.Errorf("token %d; want one above %d", next, r.Revision)
	}
	if _, err := os.Stat(dir + ".lost"); err != nil {
		t.Error(err)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := replica.Recover(dir, replica.RestoreOptions{}); err == nil {
		t.Error("what an earlier recovery kept is written over")
	}
	if err := os.RemoveAll(dir + ".lost"); err != nil {
		t.Fatal(err)
	}
	if r, err := replica.Recover(dir, replica.RestoreOptions{}); err != nil || r.ClosedFor != DefaultMaxTTL {
		t.Errorf("without a time it is closed for %v, %v; want the longest TTL that there can be", r.ClosedFor, err)
	}
	if s := start(t, Config{DataDir: dir}); s.Leads() {
		t.Error("it serves at once")
	}
	if _, err := replica.Recover(t.TempDir(), replica.RestoreOptions{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an empty directory: %v", err)
	}
}
