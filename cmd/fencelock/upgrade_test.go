//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/oldversions"
	"github.com/fencelock/fencelock/internal/testtier"
)

// olderVersion is the first commit with servers that speak the protocol of today's clients. It knows the first feature
// level alone, and its log has no checksums.
const olderVersion = "3ca1340c"

// upgrade is a cluster with members of two versions.
type upgrade struct {
	t       *testing.T
	older   string // the program
	dirs    []string
	clients []string
	peers   []string
	servers []*fault.Child
	newer   []bool
}

func (u *upgrade) start(i int) {
	u.t.Helper()
	args := []string{
		"serve", "--data-dir", u.dirs[i], "--listen", u.clients[i], "--peer-listen", u.peers[i],
		"--join", strings.Join(u.peers, ","), "--bootstrap-expect", "3",
	}
	if u.newer[i] {
		u.servers[i] = start(u.t, args...).Child
	} else {
		u.servers[i] = fault.Start(u.t, exec.Command(u.older, args...))
	}
	(&program{u.servers[i], u.t}).await("fencelock: serving clients at ")
}

func (u *upgrade) url() string { return "fencelock://" + strings.Join(u.clients, ",") }

// leader waits until one member leads whom all know, and returns it.
func (u *upgrade) leader() int {
	u.t.Helper()
	leader := -1
	eventually(u.t, "a leader that all follow", func() bool {
		p := start(u.t, "status", "--backend", u.url(), "--json")
		ids := map[string]bool{}
		for _, m := range objects[member](u.t, p.output()) {
			ids[m.LeaderID] = true
			for i, address := range u.clients {
				if m.Address == address && m.Role == roleLeader {
					leader = i
				}
			}
			if m.Role == roleUnreachable || m.Role == roleLeaderless {
				return false
			}
		}
		return len(ids) == 1 && leader >= 0
	})
	return leader
}

// giveRules gives the cluster rules, if it takes them.
func giveRules(t *testing.T, u *upgrade, file string) (out string, err error) {
	t.Helper()
	p := start(t, "rules", "set", file, "--backend", u.url())
	err = p.Wait()
	return p.Stderr(), err
}

// TestRollingUpgrade replaces three members of an older version by today's, one by one, and kills the leader before
// each. Clients of today and of the older version are at work. Their work is a file: it shows whether two had the lock
// at a time, and whether tokens fell.
func TestRollingUpgrade(t *testing.T) {
	testtier.Only(t)
	addresses := freeport.Addresses(t, 6)
	u := &upgrade{
		t: t, older: oldversions.Build(t, oldversions.Tree(t, olderVersion), "./cmd/fencelock"), clients: addresses[:3], peers: addresses[3:],
		dirs: []string{t.TempDir(), t.TempDir(), t.TempDir()}, servers: make([]*fault.Child, 3), newer: make([]bool, 3),
	}
	for i := range u.servers {
		u.start(i)
	}
	u.leader()

	const ttl = time.Minute // longer than anything here stands still
	locks, err := fencelock.Open(t.Context(), u.url(), fencelock.Correctness, &fencelock.Options{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	closeLocks := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return locks.Close(ctx)
	}
	t.Cleanup(func() { _ = closeLocks() })
	kept, err := locks.Acquire(t.Context(), "kept")
	if err != nil {
		t.Fatal(err)
	}
	work := filepath.Join(t.TempDir(), "work")
	var cycles, olderCycles atomic.Int64
	ctx, finish := context.WithCancel(t.Context())
	var workers sync.WaitGroup
	stop := func() { finish(); workers.Wait() }
	t.Cleanup(stop)
	note := func(what string, token fencing.Token) error {
		f, err := os.OpenFile(work, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(f, what, uint64(token))
		return errors.Join(err, f.Close())
	}
	for range 3 {
		workers.Go(func() {
			for ctx.Err() == nil {
				lease, err := locks.Acquire(ctx, "shared")
				if err != nil {
					time.Sleep(10 * time.Millisecond) // nobody leads for longer than the driver waits
					continue
				}
				err = errors.Join(note("begin", lease.Token()), note("end", lease.Token()))
				_ = lease.Release(context.WithoutCancel(ctx)) // it may not come to be known; the core goes on
				if err != nil {
					t.Error(err)
					return
				}
				cycles.Add(1)
			}
		})
	}
	workers.Go(func() { // a client of the older version
		for ctx.Err() == nil {
			cmd := exec.Command(u.older, "run", "--backend", u.url(), "--tier", "correctness", "--name", "shared",
				"--ttl", ttl.String(), "--",
				"sh", "-c", `echo begin $FENCELOCK_TOKEN >>"$0"; echo end $FENCELOCK_TOKEN >>"$0"`, work)
			if cmd.Run() == nil { // otherwise nobody led
				olderCycles.Add(1)
			}
		}
	})
	goOn := func(after string) {
		t.Helper()
		were, olderWere := cycles.Load(), olderCycles.Load()
		eventually(t, "clients of both versions go on after "+after, func() bool {
			return cycles.Load() >= were+10 && olderCycles.Load() > olderWere
		})
	}
	goOn("the start")
	rules := fileOf(t, "rules", "allow * acquire,read \"\"\n")
	for i := range u.servers {
		if out, err := giveRules(t, u, rules); err == nil {
			t.Errorf("a cluster with members of an earlier version takes rules: %s", out)
		}
		leader := u.leader()
		if err := u.servers[leader].Kill(); err != nil {
			t.Fatal(err)
		}
		goOn("the leader was killed")
		u.start(leader)
		u.leader()
		if err := u.servers[i].Terminate(); err != nil {
			t.Fatal(err)
		}
		if err := u.servers[i].Wait(); err != nil {
			t.Errorf("member %d ends with %v:\n%s", i, err, u.servers[i].Stderr())
		}
		u.newer[i] = true
		u.start(i)
		u.leader()
		goOn("a member was replaced")
	}
	eventually(t, "the feature level is raised", func() bool {
		return strings.Contains(u.servers[0].Stderr()+u.servers[1].Stderr()+u.servers[2].Stderr(),
			"feature level raised")
	})
	leader := u.leader()
	if err := u.servers[leader].Kill(); err != nil {
		t.Fatal(err)
	}
	goOn("the leader was killed, at the new level")
	eventually(t, "rules are taken", func() bool { _, err := giveRules(t, u, rules); return err == nil })
	goOn("rules were set")
	backup := filepath.Join(t.TempDir(), "locks.backup")
	succeed(t, "backup", backup, "--backend", u.url())
	if text := succeed(t, "restore", backup, "--data-dir", filepath.Join(t.TempDir(), "new")); !strings.Contains(text,
		"refuses clients for 24h0m0s") { // the older version permitted that, and did not log it
		t.Errorf("restore prints:\n%s", text)
	}
	stop()
	if err := kept.Context().Err(); err != nil {
		t.Errorf("the hold that was to be kept: %v", context.Cause(kept.Context()))
	}
	if err := closeLocks(); err != nil {
		t.Errorf("close: %v", err)
	}
	checkWork(t, work)
	t.Logf("%d cycles of clients of today, %d of the older version", cycles.Load(), olderCycles.Load())
}

// checkWork wants each begin followed by its end, and rising tokens.
func checkWork(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	last, violations := uint64(0), 0
	for i := 0; i < len(lines); i += 2 {
		var token, again uint64
		_, err := fmt.Sscanf(strings.Join(lines[i:min(i+2, len(lines))], "\n"), "begin %d\nend %d", &token, &again)
		if err != nil || token != again || token <= last {
			violations++
			t.Errorf("after token %d: %q", last, lines[i:min(i+2, len(lines))])
			if violations > 10 {
				break
			}
		}
		last = token
	}
	t.Logf("%d sections, %d violations", len(lines)/2, violations)
}
