package server

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/serverfault"
)

func TestRestartKeepsEverything(t *testing.T) {
	t.Parallel()
	for _, kind := range []replica.Store{replica.StoreWAL, replica.StoreBolt} {
		for _, snapshot := range []bool{false, true} {
			t.Run(string(kind), func(t *testing.T) {
				config := Config{DataDir: t.TempDir(), Store: kind, Listen: freeport.Addresses(t, 1)[0]}
				s := alone(t, config)
				c := dial(t, s.Addr().String())
				session := c.open(time.Minute)
				id, token := c.hold(session, "x")
				if snapshot {
					if err := s.replica.Snapshot(); err != nil {
						t.Fatal(err)
					}
				}
				revision, cluster, node := s.replica.State.Machine.Revision(), s.replica.State.Cluster(), s.replica.ID()
				if err := s.Close(context.Background()); err != nil {
					t.Fatal(err)
				}
				s = alone(t, config)
				if s.replica.State.Machine.Revision() != revision || s.replica.State.Cluster() != cluster ||
					s.replica.ID() != node {
					t.Error("it came back as another")
				}
				if address := s.replica.State.Client(node); address != config.Listen {
					t.Errorf("clients find it at %q", address)
				}
				c = dial(t, s.Addr().String())
				if r := c.call(attachOf(session, "", 0)); len(r.GetSession().GetHolds()) != 1 || !r.Renewed {
					t.Fatalf("attach: %v", r)
				}
				if r := c.call(releaseOf(session, "x", id, token)); r.GetDone() == nil {
					t.Errorf("release: %v", r)
				}
				if _, next := c.hold(session, "x"); next <= token {
					t.Errorf("token %d after %d", next, token)
				}
			})
		}
	}
}

// A member that was away for longer than the log reaches back gets a snapshot.
func TestMemberThatIsFarBehind(t *testing.T) {
	t.Parallel()
	var snapshots atomic.Int64
	c := newCluster(t, 3, func(c *Config) {
		calm(c) // the one with the snapshot is to lead on
		c.Rig = &serverfault.Rig{TrailingEntries: 1}
		c.Store = replica.StoreBolt // raft-wal returns deleted entries while their file exists
		c.Log = slog.New(listening{slog.DiscardHandler, "Installed remote snapshot", &snapshots})
	})
	x := newCaller(t, c.connect)
	away := (c.leader() + 1) % 3
	c.stop(away)
	g := x.lock("x")
	leader := c.servers[c.leader()]
	if err := leader.replica.Snapshot(); err != nil {
		t.Fatal(err)
	}
	x.lock("y")
	c.start(away)
	m := c.servers[away].replica.State.Machine
	eventually(t, "it has caught up", func() bool { return m.Hash() == leader.replica.State.Machine.Hash() })
	if snapshots.Load() == 0 {
		t.Error("it got no snapshot: nothing is shown")
	}
	if h := m.Holder("x").Holders; len(h) != 1 || uint64(h[0].Token) != g.Token {
		t.Errorf("it believes that x is held by %v", h)
	}
	if c.servers[away].replica.State.Cluster() != leader.replica.State.Cluster() {
		t.Error("it does not know the cluster's name")
	}
}

func TestDataDirectoryHasOneUser(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := alone(t, Config{DataDir: dir})
	if _, err := Start(t.Context(), Config{DataDir: dir, Log: quiet(t)}); err == nil ||
		!strings.Contains(err.Error(), "in use") {
		t.Errorf("a second server starts in the same directory: %v", err)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	_, err := Start(t.Context(), Config{DataDir: dir, Store: replica.StoreBolt, Log: quiet(t)})
	if err == nil || !strings.Contains(err.Error(), "wal, not bolt") {
		t.Errorf("another kind of log: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "node-id"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Start(t.Context(), Config{DataDir: dir, Log: quiet(t)}); err == nil {
		t.Error("it starts without a name")
	}
}

func TestConfigThatMakesNoSense(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		setting string
		c       Config
	}{
		{"Store", Config{DataDir: "x", Store: "paper"}},
		{"MinTTL", Config{MinTTL: -1}},
		{"MaxTTL", Config{MaxTTL: time.Second}},
		{"Timing.Heartbeat", Config{Timing: replica.Timing{Heartbeat: time.Millisecond}}},
		{"Timing.Lease", Config{Timing: replica.Timing{Lease: time.Minute}}},
		{"Listen", Config{Listen: "nowhere"}},
		{"Listen", Config{Listen: "0.0.0.0:0"}},
		{"Listen", Config{Listen: ":0"}},
		{"PeerListen", Config{PeerListen: "192.0.2.1:0"}},
		{"Join", Config{Join: []string{"127.0.0.1:1"}}},
		{"Join", Config{PeerListen: "127.0.0.1:1", Join: []string{"x"}}},
		{"Join", Config{PeerListen: "127.0.0.1:1", Join: []string{"127.0.0.1:1", "127.0.0.1:1"}}},
		{"BootstrapExpect", Config{PeerListen: "127.0.0.1:1", Join: []string{"127.0.0.1:2"}, BootstrapExpect: 3}},
	} {
		_, err := Start(t.Context(), x.c)
		var wrong *replica.ConfigError
		if !errors.As(err, &wrong) || wrong.Setting != x.setting {
			t.Errorf("%+v: %v; want that %s is wrong", x.c, err, x.setting)
		}
	}
}
