//go:build unix

package main

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// startMembers starts three members in this process, and returns the URL of all, and the members by their addresses. It
// waits until one leads that the others follow.
func startMembers(t *testing.T) (url string, members map[string]*server.Server, all []member) {
	t.Helper()
	peers := freeport.Addresses(t, 3)
	members = map[string]*server.Server{}
	var clients []string
	for _, peer := range peers {
		s, err := server.Start(t.Context(), server.Config{
			DataDir: t.TempDir(), Listen: "127.0.0.1:0", PeerListen: peer, Join: peers, BootstrapExpect: 3,
			Log: slog.New(slog.DiscardHandler),
			// The leader is to stay, also where a busy machine lets a member wait.
			Timing: replica.Timing{Heartbeat: 2 * time.Second}, MinTTL: 10 * time.Second,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close(context.Background()) })
		clients = append(clients, s.Addr().String())
		members[s.Addr().String()] = s
	}
	url = "fencelock://" + strings.Join(clients, ",")
	eventually(t, "a leader that all follow", func() bool {
		p := start(t, "status", "--backend", url, "--json")
		all = objects[member](t, p.output())
		leaders := 0
		for _, m := range all {
			if m.Role == roleLeader {
				leaders++
			} else if m.Role != roleFollower {
				return false
			}
		}
		return len(all) == 3 && leaders == 1
	})
	return url, members, all
}

func TestTransfer(t *testing.T) {
	t.Parallel()
	url, members, all := startMembers(t)
	var leader, other member
	for _, m := range all {
		if m.Role == roleLeader {
			leader = m
		} else {
			other = m
		}
	}
	if next := objects[leads](
		t, succeed(t, "transfer", "--backend", url, "--to", other.NodeID, "--json"),
	); len(next) != 1 || next[0].NodeID != other.NodeID {
		t.Fatalf("%s is to lead: %+v", other.NodeID, next)
	}
	if next := objects[leads](t, succeed(t, "transfer", "--backend", url, "--json")); len(next) != 1 ||
		next[0].NodeID == other.NodeID {
		t.Fatalf("another than %s is to lead: %+v", other.NodeID, next)
	}
	start(t, "transfer", "--backend", url, "--to", "nobody").expectExit(exitRefused, `no member "nobody"`)
	// One member is unreachable.
	if err := members[leader.Address].Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if m.NodeID != leader.NodeID {
			eventually(t, "the other member is well, for itself", func() bool {
				return start(t, "status", "--backend", "fencelock://"+m.Address, "--own").Wait() == nil
			})
		}
	}
	start(t, "status", "--backend", "fencelock://"+other.Address).expectExit(exitUnavailable,
		"has a vote and does not answer")
	start(t, "status", "--backend", url).expectExit(exitUnavailable,
		"2 of 3 members with a vote answer here: the cluster is available but cannot tolerate another failure")
}

func TestTransferWithoutAnother(t *testing.T) {
	start(t, "transfer", "--backend", startServer(t)).expectExit(exitRefused, "no other member with a vote")
}

// A service that accepts connections but does not answer delays a run by at most --wait.
func TestWaitBoundsTheConnection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	start(t, "run", "--backend", "fencelock://"+l.Addr().String(), "--name", "x", "--wait", "300ms", "--", "true").
		expectExit(exitUnavailable,
			`lock "x": the service did not answer within 300ms, so it is unknown whether the lock is held`)
}
