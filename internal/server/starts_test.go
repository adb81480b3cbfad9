package server

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/testtier"
)

// asideOf are the folders in a data directory with what was set aside.
func asideOf(t *testing.T, dir string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "set-aside-*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// rounds executes few rounds of a test, and all if everything is to run, one after the other.
func rounds(t *testing.T, few, all int, round func(t *testing.T, number int)) {
	for i := range testtier.Rounds(few, all) {
		if ok := t.Run(fmt.Sprint(i), func(t *testing.T) { round(t, i) }); !ok {
			return
		}
	}
}

// keepBack copies the data of a running member, once the member has all committed entries: see keepBack.
func (c *cluster) keepBack(i int) (back func()) {
	c.t.Helper()
	eventually(c.t, "the member has all", func() bool {
		return c.servers[i].replica.Applied() >= c.servers[c.leader()].replica.Status().CommitIndex
	})
	return keepBack(c.t, c.configs[i].DataDir)
}

// A member with a reverted disk begins as a new one, if a member that knows better is up: a follower's, of which
// the leader knows, and the leader's, of which the followers know.
func TestRevertedDiskIsANewMember(t *testing.T) {
	t.Parallel()
	rounds(t, 2, 20, func(t *testing.T, round int) {
		what := []string{"follower", "leader"}[round%2]
		c := newCluster(t, 3, calm)
		x := newCaller(t, c.connect)
		x.unlock(x.lock("x"))
		victim := c.leader()
		if what == "follower" {
			victim = (victim + 1) % 3
		}
		back := c.keepBack(victim)
		last := x.lock("x")
		index := c.servers[c.leader()].replica.Status().CommitIndex
		for i, s := range c.servers {
			eventually(t, "all know that it has the entry", func() bool {
				return s.replica.Applied() >= index && (i == victim || what == "follower" && i != c.leader() ||
					s.replica.Knows(c.servers[victim].replica.ID()) >= index)
			})
		}
		before := c.servers[victim].replica.ID()
		c.stop(victim)
		back()
		c.start(victim)
		s := c.servers[victim]
		if s.replica.ID() == before {
			t.Error("it has the name of the member that it was")
		}
		dir := c.configs[victim].DataDir
		if aside := asideOf(t, dir); len(aside) != 1 {
			t.Errorf("set aside: %q", aside)
		} else if id, err := os.ReadFile(filepath.Join(aside[0], "node-id")); string(id) != before+"\n" {
			t.Errorf("set aside: node %q, %v; want %q", id, err, before)
		}
		eventually(t, "the new member has the vote of the one before", func() bool {
			return s.replica.Voters() == 3 && c.servers[c.leader()].replica.Voters() == 3
		})
		if _, err := os.Stat(filepath.Join(dir, "setting-aside")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("setting-aside: %v", err)
		}
		if r := x.must(releaseOf(nil, "x", last.RequestId, last.Token)); r.GetDone() == nil {
			t.Errorf("the hold: %v", r)
		}
		c.stop(victim)
		c.start(victim) // no member has a reason to object
		if got := c.servers[victim].replica.ID(); got != s.replica.ID() || len(asideOf(t, dir)) != 1 {
			t.Errorf("started again it is %s, and was %s", got, s.replica.ID())
		}
	})
}

// Of a member and its copy, the second one does not start, with the key of the cluster or without.
func TestCopyDoesNotRunBesideItsOriginal(t *testing.T) {
	t.Parallel()
	rounds(t, 1, 20, copyBesideOriginal)
}

func copyBesideOriginal(t *testing.T, _ int) {
	c := newCluster(t, 3, nil)
	x := newCaller(t, c.connect)
	x.unlock(x.lock("x"))
	original := (c.leader() + 1) % 3
	eventually(t, "it knows the others", func() bool { return c.servers[original].replica.Voters() == 3 })
	c.stop(original)
	copied := c.configs[original]
	copied.Moved = true
	copyIt := func() {
		copied.DataDir = filepath.Join(t.TempDir(), "copied")
		if err := os.CopyFS(copied.DataDir, withoutSockets{os.DirFS(c.configs[original].DataDir)}); err != nil {
			t.Fatal(err)
		}
	}
	copyIt()
	addresses := freeport.Addresses(t, 2)
	copied.Listen, copied.PeerListen, copied.BootstrapExpect = addresses[0], addresses[1], 0
	refused := func(what string, config Config, at string) {
		t.Helper()
		var running *replica.RunningError
		s, err := Start(t.Context(), config)
		if err == nil {
			_ = s.Close(t.Context())
		}
		if !errors.As(err, &running) || running.Address != at {
			t.Errorf("%s: %v; want that one runs at %s", what, err, at)
		}
	}
	c.start(original)
	refused("the copy, while the original runs", copied, c.configs[original].PeerListen)
	c.stop(original)
	copyIt() // with the entries that the original has acknowledged meanwhile
	s := start(t, copied)
	eventually(t, "the others know where the copy is", func() bool {
		for _, m := range c.servers[c.leader()].replica.Members() {
			if m.ID == s.replica.ID() && m.Address == copied.PeerListen && m.Voter {
				return true
			}
		}
		return false
	})
	refused("the original, while the copy runs", c.configs[original], copied.PeerListen)
	before := s.replica.ID()
	for i, other := range c.servers {
		if i != original {
			eventually(t, "its third start is recorded", func() bool {
				return strings.HasPrefix(other.replica.State.Started(raft.ServerID(before)), "3-")
			})
		}
	}
	closeNow(t, s)
	c.start(original)
	if id := c.servers[original].replica.ID(); id == before || len(asideOf(t, c.configs[original].DataDir)) != 1 {
		t.Errorf("the original, after the copy has counted, starts as %s, and was %s", id, before)
	}
}
