package server

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// preface returns the first bytes of a connection to a member: its kind, raft ('r') or a question ('q'), the cluster
// of the dialler, and the intended member.
func preface(kind byte, home, member string) []byte {
	p := append([]byte("FLP1"), kind, byte(len(home)), byte(len(member)))
	return append(append(p, home...), member...)
}

// homeOf returns the name of s's cluster among its members.
func homeOf(s *Server) string {
	home, restored := s.replica.State.Cluster(), s.replica.State.History()
	if restored != "" {
		home += "/" + restored
	}
	return home
}

// answer is the reply of one member to another.
type answer struct {
	ID     string
	Joined bool
	Error  string
}

// askedToAdmit has a leader asked to take s in, as s would ask.
func askedToAdmit(t *testing.T, leader, s *Server) (a answer, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, err := s.config.PeerDial(ctx, leader.PeerAddr())
	if err != nil {
		return a, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	if s.config.PeerTLS != nil {
		config := s.config.PeerTLS.Clone()
		config.ServerName, _, _ = net.SplitHostPort(leader.PeerAddr())
		conn = tls.Client(conn, config)
	}
	if _, err := conn.Write(preface('q', homeOf(s), "")); err != nil {
		return a, err
	}
	question := map[string]any{"join": map[string]any{
		"id": s.replica.ID(), "peer": s.PeerAddr(), "client": s.advertise, "level": machine.MaxLevel,
	}}
	if err := json.NewEncoder(conn).Encode(question); err != nil {
		return a, err
	}
	if err := json.NewDecoder(conn).Decode(&a); err != nil {
		return a, err
	}
	if a.ID == "" {
		return a, errors.New(a.Error) // it was turned away
	}
	return a, nil
}

// A member that was removed comes back with its data, at the same address or at another one. It has votes and entries
// that the others may have gone on without: it stays outside until its data is deleted.
func TestFormerMemberIsNotTakenIn(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, nil)
	former := (c.leader() + 1) % 3
	id := c.servers[former].replica.ID()
	eventually(t, "it is a member", func() bool { return c.servers[former].replica.Voters() == 3 })
	c.stop(former)
	// Whichever of the two others leads; on a busy machine that may change.
	atLeader := func(do func(leader int, o operator) error) (err error) {
		eventually(t, "a leader answers", func() bool {
			leader := c.leader()
			operateOnce(t, c.configs[leader].adminListen(), func(o operator) { err = do(leader, o) })
			return status.Code(err) != codes.Unavailable && status.Code(err) != codes.Unknown
		})
		return err
	}
	if err := atLeader(func(_ int, o operator) error {
		_, err := o.RemoveMember(t.Context(), &lockpb.RemoveMemberRequest{NodeId: id})
		if status.Code(err) == codes.FailedPrecondition { // the other one is late with its answer
			return status.Error(codes.Unavailable, err.Error())
		}
		return err
	}); err != nil && status.Code(err) != codes.NotFound {
		t.Fatal(err)
	}
	home := c.configs[former].PeerListen
	for _, address := range []string{home, freeport.Addresses(t, 1)[0]} {
		c.configs[former].PeerListen = address
		c.configs[former].Join, c.configs[former].BootstrapExpect = nil, 0
		c.start(former)
		s := c.servers[former]
		var a answer
		err := atLeader(func(leader int, _ operator) (err error) {
			if a, err = askedToAdmit(t, c.servers[leader], s); err == nil && !a.Joined && a.Error == "" {
				return status.Error(codes.Unavailable, "it does not lead")
			}
			return err
		})
		if err != nil || a.Joined || !strings.Contains(a.Error, "empty data directory") {
			t.Errorf("it asks at %s and is answered %+v, %v", address, a, err)
		}
		err = atLeader(func(_ int, o operator) error {
			_, err := o.add(address)
			if err != nil && strings.Contains(err.Error(), "nobody who could join answers") { // it does not listen yet
				return status.Error(codes.Unavailable, err.Error())
			}
			return err
		})
		expectCode(t, err, codes.FailedPrecondition, "empty data directory")
		c.stop(former)
	}
	if all := c.servers[c.leader()].replica.Members(); len(all) != 2 {
		t.Errorf("members: %v", all)
	}

	// Without its data it is welcome.
	c.configs[former].DataDir, c.configs[former].Join = t.TempDir(), []string{c.configs[former].PeerListen}
	c.start(former)
	if err := atLeader(func(_ int, o operator) error {
		_, err := o.add(c.configs[former].PeerListen)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it votes", func() bool { return c.servers[c.leader()].replica.Voters() == 3 })
}

// nameless is the data directory of a member of a cluster of two, who does not know the cluster's name before it has
// read its log.
func nameless(t *testing.T) string {
	t.Helper()
	c := newCluster(t, 2, nil)
	dir := c.configs[0].DataDir
	file := filepath.Join(dir, "cluster-id")
	eventually(t, "the member has heard of its cluster", func() bool {
		_, err := os.Stat(file)
		return err == nil
	})
	for i := range c.servers {
		c.stop(i)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	return dir
}

// A server of another cluster does not take the place of a member that is away.
func TestForeignMemberReplacesNoMember(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, nil)
	away := (c.leader() + 1) % 3
	id := c.servers[away].replica.ID()
	c.stop(away)
	at := c.configs[away].PeerListen
	for _, known := range []bool{true, false} {
		var foreign *Server
		if known {
			foreign = alone(t, Config{DataDir: t.TempDir(), PeerListen: at})
		} else { // without a leader the server has applied no entry of its log
			foreign = start(t, Config{DataDir: nameless(t), PeerListen: at})
		}
		var a answer
		var err error
		eventually(t, "a leader answers", func() bool {
			a, err = askedToAdmit(t, c.servers[c.leader()], foreign)
			return err != nil || a.Joined || a.Error != ""
		})
		if got := fmt.Sprint(a.Error, err); a.Joined || !strings.Contains(got, "cluster") ||
			strings.Contains(got, "EOF") {
			t.Errorf("it is answered %+v, %v", a, err)
		}
		if err := foreign.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	members := c.servers[c.leader()].replica.Members()
	if !slices.ContainsFunc(members, func(m replica.Member) bool { return m.ID == id }) {
		t.Errorf("the member that is away was removed: %v", members)
	}
}

// A member knows of which cluster it is before it has found a leader, and so read its log. The snapshot that it took
// when the feature level rose says so too, and is deleted first.
func TestMemberReportsItsClusterImmediately(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2, nil)
	eventually(t, "both know the name", func() bool {
		return c.servers[0].replica.State.Cluster() != "" && c.servers[1].replica.State.Cluster() != ""
	})
	want := c.servers[0].replica.State.Cluster()
	for i := range c.servers {
		c.stop(i)
	}
	if err := os.RemoveAll(filepath.Join(c.configs[0].DataDir, "snapshots")); err != nil {
		t.Fatal(err)
	}
	c.start(0)
	if r := c.servers[0].replica; r.State.Cluster() != want || r.Applied() != 0 {
		t.Errorf("it believes to be of cluster %q with %d entries read, and is of %q", r.State.Cluster(), r.Applied(), want)
	}
}
