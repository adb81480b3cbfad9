package server

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/port"
)

// askedToAdmit has a leader asked to take s in, as s would ask.
func askedToAdmit(t *testing.T, leader, s *Server) (answer, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	own := s.self()
	return s.peers.ask(ctx, leader.PeerAddr(), question{Join: &own})
}

// A member that was removed comes back with its data, at the same address or at another one. It has votes and entries
// that the others may have gone on without: it stays outside until its data is deleted.
func TestFormerMemberIsNotTakenIn(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, nil)
	former := (c.leader() + 1) % 3
	id := string(c.servers[former].node.id)
	eventually(t, "it is a member", func() bool { return voters(c.servers[former].node.servers()) == 3 })
	c.stop(former)
	// Whichever of the two others leads; on a busy machine that may change.
	atLeader := func(do func(leader int) error) (err error) {
		eventually(t, "a leader answers", func() bool {
			err = do(c.leader())
			return status.Code(err) != codes.Unavailable && status.Code(err) != codes.Unknown
		})
		return err
	}
	if err := atLeader(func(leader int) error {
		_, err := operate(t, c.configs[leader].Listen).RemoveMember(t.Context(), &lockpb.RemoveMemberRequest{NodeId: id})
		if status.Code(err) == codes.FailedPrecondition { // the other one is late with its answer
			return status.Error(codes.Unavailable, err.Error())
		}
		return err
	}); err != nil && status.Code(err) != codes.NotFound {
		t.Fatal(err)
	}
	home := c.configs[former].PeerListen
	for _, address := range []string{home, port.Addresses(t, 1)[0]} {
		c.configs[former].PeerListen = address
		c.configs[former].Join, c.configs[former].BootstrapExpect = nil, 0
		c.start(former)
		s := c.servers[former]
		var a answer
		err := atLeader(func(leader int) (err error) {
			if a, err = askedToAdmit(t, c.servers[leader], s); err == nil && !a.Joined && a.Error == "" {
				return status.Error(codes.Unavailable, "it does not lead")
			}
			return err
		})
		if err != nil || a.Joined || !strings.Contains(a.Error, "empty data directory") {
			t.Errorf("it asks at %s and is answered %+v, %v", address, a, err)
		}
		err = atLeader(func(leader int) error {
			_, err := operate(t, c.configs[leader].Listen).add(address)
			if err != nil && strings.Contains(err.Error(), "nobody who could join answers") { // it does not listen yet
				return status.Error(codes.Unavailable, err.Error())
			}
			return err
		})
		expectCode(t, err, codes.FailedPrecondition, "empty data directory")
		c.stop(former)
	}
	if all := c.servers[c.leader()].node.servers(); len(all) != 2 {
		t.Errorf("members: %v", all)
	}

	// Without its data it is welcome.
	c.configs[former].DataDir, c.configs[former].Join = t.TempDir(), []string{c.configs[former].PeerListen}
	c.start(former)
	if err := atLeader(func(leader int) error {
		_, err := operate(t, c.configs[leader].Listen).add(c.configs[former].PeerListen)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it votes", func() bool { return voters(c.servers[c.leader()].node.servers()) == 3 })
}

// One that belongs to another cluster does not take the place of a member that is away.
func TestForeignMemberTakesNobodysPlace(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, nil)
	away := (c.leader() + 1) % 3
	id := c.servers[away].node.id
	c.stop(away)
	foreign := alone(t, Config{DataDir: t.TempDir(), PeerListen: c.configs[away].PeerListen})
	for _, known := range []bool{true, false} {
		if !known { // as it is when it has just been started, and has applied nothing of its log yet
			f := foreign.node.fsm
			f.mu.Lock()
			f.facts.Cluster, f.kept = "", ""
			f.mu.Unlock()
		}
		var a answer
		var err error
		eventually(t, "a leader answers", func() bool {
			a, err = askedToAdmit(t, c.servers[c.leader()], foreign)
			return err != nil || a.Joined || a.Error != ""
		})
		if got := fmt.Sprint(a.Error, err); a.Joined || !strings.Contains(got, "cluster") || strings.Contains(got, "EOF") {
			t.Errorf("it is answered %+v, %v", a, err)
		}
	}
	members := c.servers[c.leader()].node.servers()
	if !slices.ContainsFunc(members, func(m raft.Server) bool { return m.ID == id }) {
		t.Errorf("the member that is away was removed: %v", members)
	}
}

// A member knows of which cluster it is before it has found a leader, and so read its log.
func TestMemberKnowsItsClusterAtOnce(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2, nil)
	eventually(t, "both know the name", func() bool {
		return c.servers[0].node.fsm.cluster() != "" && c.servers[1].node.fsm.cluster() != ""
	})
	want := c.servers[0].node.fsm.cluster()
	for i := range c.servers {
		c.stop(i)
	}
	c.start(0)
	if s := c.servers[0]; s.node.fsm.cluster() != want || s.node.raft.AppliedIndex() != 0 {
		t.Errorf("it believes to be of cluster %q with %d entries read, and is of %q", s.node.fsm.cluster(), s.node.raft.AppliedIndex(), want)
	}
}

func TestContentsOfAnotherClusterAreRefused(t *testing.T) {
	t.Parallel()
	f := newFSM(newMachine(), func() {}, func(error) {})
	f.kept = "ours"
	if err := f.learn(1, []byte(`{"cluster": "theirs"}`)); err == nil || !strings.Contains(err.Error(), "theirs") {
		t.Errorf("an entry: %v", err)
	}
	if err := f.Restore(io.NopCloser(strings.NewReader(`{"cluster": "theirs"}` + "\n"))); err == nil || !strings.Contains(err.Error(), "theirs") {
		t.Errorf("a snapshot: %v", err)
	}
}
