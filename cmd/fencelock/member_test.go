//go:build unix

package main

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server"
)

// startMember starts a member in this process that listens for the others at peer. With join it is to be taken in.
func startMember(t *testing.T, peer string, join ...string) *server.Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := server.Start(ctx, server.Config{
		DataDir: t.TempDir(), Listen: "127.0.0.1:0", PeerListen: peer, Join: join, Version: "test",
		Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if len(join) == 0 {
		if err := s.WaitLeader(ctx); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func TestStatus(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	all := objects[member](t, succeed(t, "status", "--backend", url, "--json"))
	if len(all) != 1 {
		t.Fatalf("one member: %+v", all)
	}
	m := all[0]
	if m.Address != strings.TrimPrefix(url, "fencelock://") || m.Role != roleLeader || m.NodeID == "" ||
		m.LeaderID != m.NodeID || m.ClusterID == "" || !m.Durable || m.Version != "test" || m.Term == 0 ||
		m.CommitIndex == 0 || m.AppliedIndex == 0 {
		t.Errorf("status: %+v", m)
	}
	lines := strings.Split(succeed(t, "status", "--backend", url), "\n")
	if len(lines) != 2 || strings.Index(lines[0], "ROLE") != strings.Index(lines[1], roleLeader) {
		t.Errorf("not two aligned lines:\n%s", strings.Join(lines, "\n"))
	}

	p := start(t, "status", "--backend", "fencelock://127.0.0.1:1,"+strings.TrimPrefix(url, "fencelock://"))
	text := p.output()
	lines = strings.Split(text, "\n")
	if len(lines) != 3 || !strings.Contains(lines[1], roleUnreachable) ||
		strings.Index(lines[0], "DURABLE") != strings.Index(lines[2], "yes") {
		t.Errorf("one of two:\n%s", text)
	}
	p.expectExit(exitUnavailable, "127.0.0.1:1: lock service is unavailable")
}

// A member that no cluster has admitted answers, but fails the health check.
func TestStatusOfALeaderlessMember(t *testing.T) {
	t.Parallel()
	peer := freeport.Addresses(t, 1)[0]
	s := startMember(t, peer, peer)
	p := start(t, "status", "--backend", "fencelock://"+s.Addr().String())
	if text := p.output(); !strings.Contains(text, roleLeaderless) {
		t.Errorf("status:\n%s", text)
	}
	p.expectExit(exitUnavailable, "knows no leader")
}

func TestMembers(t *testing.T) {
	peers := freeport.Addresses(t, 2)
	first := startMember(t, peers[0])
	second := startMember(t, peers[1], peers[1])
	t.Setenv("FENCELOCK_BACKEND", "fencelock://"+first.Addr().String())
	list := func() []peer {
		t.Helper()
		return objects[peer](t, succeed(t, "member", "list", "--json"))
	}
	before := list()
	if len(before) != 1 || before[0].PeerAddress != peers[0] || !before[0].Voter || !*before[0].Alive {
		t.Fatalf("members: %+v", before)
	}
	start(t, "member", "remove", before[0].NodeID).expectExit(exitRefused, "last member with a vote")
	start(t, "member", "remove", "nobody").expectExit(exitRefused, "no such member")
	start(t, "member", "add", "127.0.0.1:1").expectExit(exitRefused, "127.0.0.1:1")
	start(t, "member", "add", "nonsense").expectExit(exitUsage, "nonsense")

	third := startMember(t, freeport.Addresses(t, 1)[0], peers[0])
	eventually(t, "a server that asks waits for approval", func() bool {
		all := list()
		return len(all) == 2 && !all[1].Voter && all[1].Waits && strings.Contains(succeed(t, "member", "list"), "waits")
	})
	waits := list()[1].NodeID
	if err := third.Close(t.Context()); err != nil { // it would ask again
		t.Fatal(err)
	}
	succeed(t, "member", "remove", waits)

	added := objects[peer](t, succeed(t, "member", "add", peers[1], "--json"))
	if len(added) != 1 || added[0].PeerAddress != peers[1] || added[0].Alive != nil {
		t.Fatalf("added: %+v", added)
	}
	eventually(t, "the new member votes", func() bool {
		all := list()
		return len(all) == 2 && all[0].Voter && all[1].Voter && *all[1].Alive
	})
	eventually(t, "the status shows both", func() bool {
		p := start(t, "status", "--json")
		all := objects[member](t, p.output())
		p.expectExit(0)
		return len(all) == 2 && all[1].Address == second.Addr().String() && all[1].Role == roleFollower
	})
	if text := succeed(t, "member", "remove", added[0].NodeID); text != "" {
		t.Errorf("removing prints:\n%s", text)
	}
	if text := succeed(t, "member", "list"); !strings.Contains(text, peers[0]) || strings.Contains(text, peers[1]) {
		t.Errorf("members after the removal:\n%s", text)
	}
}

func TestMemberExitCodes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args   []string
		code   int
		stderr string
	}{
		"status with a name": {[]string{"status", "x"}, 64, `"x"`},
		"status of others": {
			[]string{"status", "--backend", "redis://127.0.0.1"}, 64, "not one of fencelock, fencelocks",
		},
		"status without answer": {[]string{"status", "--backend", "fencelock://127.0.0.1:1"}, 69, "127.0.0.1:1"},
		"member without action": {[]string{"member"}, 64, "list, add or remove is missing"},
		"member with another":   {[]string{"member", "walk"}, 64, `"walk": want list, add or remove`},
		"member list of one":    {[]string{"member", "list", "x"}, 64, `"x"`},
		"member add of nothing": {[]string{"member", "add"}, 64, "ADDRESS is missing"},
		"member remove of none": {[]string{"member", "remove"}, 64, "NODE is missing"},
		"member of others": {
			[]string{"member", "list", "--backend", "memory://"}, 64, "not one of fencelock, fencelocks",
		},
		"member with a bad flag": {[]string{"member", "list", "--frobnicate"}, 64, "-frobnicate"},
		"help of status":         {[]string{"help", "status"}, 0, ""},
		"help of member":         {[]string{"help", "member"}, 0, ""},
		"help of member add":     {[]string{"member", "add", "--help"}, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, c.args...)
			p.expectExit(c.code, c.stderr)
			if text := p.Stderr(); c.stderr == "" && text != "" {
				t.Errorf("standard error:\n%s", text)
			}
		})
	}
}
