package builtin_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// startMembers starts a cluster of n servers in this process.
func startMembers(t *testing.T, n int) []*server.Server {
	t.Helper()
	peers := freeport.Addresses(t, n)
	all := make([]*server.Server, n)
	for i := range all {
		all[i] = startMember(t, peers[i], peers, n)
	}
	within(t, all[0].WaitLeader)
	return all
}

// startMember starts a server that forms a cluster of expect members at the addresses in join, or, if expect is 0,
// joins the cluster of these.
func startMember(t *testing.T, peer string, join []string, expect int) *server.Server {
	t.Helper()
	s, err := server.Start(t.Context(), server.Config{
		DataDir: t.TempDir(), Listen: "127.0.0.1:0", PeerListen: peer, Join: join, BootstrapExpect: expect, Log: quiet(t),
		// A slow heartbeat keeps a busy machine from losing the leader.
		Timing: replica.Timing{Heartbeat: 2 * time.Second}, MinTTL: 10 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return s
}

func soon(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not: %s", what)
		}
	}
}

func TestAdminStatusFindsAllMembers(t *testing.T) {
	t.Parallel()
	servers := startMembers(t, 3)
	admin, err := builtin.OpenAdmin("fencelock://" + servers[0].Addr().String() + ",127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	soon(t, "the first member names the others", func() bool {
		all := admin.Status(t.Context())
		answers := 0
		for _, m := range all {
			switch {
			case m.Address == "127.0.0.1:1":
				if m.Err == nil || !m.Named {
					t.Fatalf("nobody is there: %+v", m)
				}
			case m.Err == nil && m.ClusterId != "" && m.LeaderId != "":
				answers++
				if m.Named != (m.Address == servers[0].Addr().String()) {
					t.Fatalf("named or not: %+v", m)
				}
			}
		}
		return len(all) == 4 && answers == 3
	})
}

func TestAdminChangesMembers(t *testing.T) {
	t.Parallel()
	servers := startMembers(t, 3)
	admin := builtin.NewAdmin([]string{servers[0].Addr().String(), servers[1].Addr().String(), servers[2].Addr().String()}, nil)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	members := func() []*lockpb.Member {
		t.Helper()
		all, err := admin.Members(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return all
	}

	// After the removal of the leader, another member leads.
	var leader string
	soon(t, "one leads", func() bool {
		all := admin.Status(ctx)
		i := slices.IndexFunc(all, func(m builtin.MemberStatus) bool { return m.Err == nil && m.Leader })
		if i >= 0 {
			leader = all[i].NodeId
		}
		return i >= 0
	})
	if err := admin.RemoveMember(ctx, leader); err != nil {
		t.Fatal(err)
	}
	if err := admin.RemoveMember(ctx, leader); !errors.Is(err, builtin.ErrNoMember) {
		t.Errorf("removed again: %v", err)
	}
	if all := members(); len(all) != 2 {
		t.Errorf("members: %v", all)
	}

	// A new member replaces it.
	peer := freeport.Addresses(t, 1)[0]
	startMember(t, peer, []string{peer}, 0)
	added, err := admin.AddMember(ctx, peer)
	if err != nil || added.PeerAddress != peer {
		t.Fatalf("added: %v, %v", added, err)
	}
	soon(t, "the new member votes", func() bool {
		all := members()
		return len(all) == 3 && !slices.ContainsFunc(all, func(m *lockpb.Member) bool { return !m.Voter })
	})
	for address, want := range map[string]error{"127.0.0.1:1": builtin.ErrRefused, "nonsense": backend.ErrInvalidOption} {
		if _, err := admin.AddMember(ctx, address); !errors.Is(err, want) {
			t.Errorf("adding %s: %v; want %v", address, err, want)
		}
	}
}

func TestAdminWithoutAnswer(t *testing.T) {
	t.Parallel()
	admin := builtin.NewAdmin([]string{"127.0.0.1:1"}, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := admin.Members(ctx); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("members: %v", err)
	}
	if err := admin.RemoveMember(ctx, "x"); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("remove: %v", err)
	}
	if err := admin.Backup(ctx, io.Discard); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("backup: %v", err)
	}
	if _, err := admin.StaleLook(ctx, "x"); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("stale look: %v", err)
	}
	if _, err := builtin.OpenAdmin("redis://127.0.0.1"); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("another scheme: %v", err)
	}
}
