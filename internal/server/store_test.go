package server

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/port"
)

func TestRestartKeepsEverything(t *testing.T) {
	t.Parallel()
	for _, kind := range []Store{StoreWAL, StoreBolt} {
		for _, snapshot := range []bool{false, true} {
			t.Run(string(kind), func(t *testing.T) {
				config := Config{DataDir: t.TempDir(), Store: kind, Listen: port.Addresses(t, 1)[0]}
				s := alone(t, config)
				c := dial(t, s.Addr().String())
				session := c.open(time.Minute)
				id, token := c.hold(session, "x")
				if snapshot {
					if err := s.node.raft.Snapshot().Error(); err != nil {
						t.Fatal(err)
					}
				}
				revision, cluster, node := s.node.fsm.machine.Revision(), s.node.fsm.cluster(), s.node.id
				if err := s.Close(context.Background()); err != nil {
					t.Fatal(err)
				}
				s = alone(t, config)
				if s.node.fsm.machine.Revision() != revision || s.node.fsm.cluster() != cluster || s.node.id != node {
					t.Error("it came back as another")
				}
				if address, _ := s.node.fsm.client(node); address != config.Listen {
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
	c := newCluster(t, 3, nil)
	x := newCaller(t, c.connect)
	away := (c.leader() + 1) % 3
	c.stop(away)
	g := x.lock("x")
	leader := c.servers[c.leader()]
	keep := leader.node.raft.ReloadableConfig()
	keep.TrailingLogs = 0
	if err := leader.node.raft.ReloadConfig(keep); err != nil {
		t.Fatal(err)
	}
	if err := leader.node.raft.Snapshot().Error(); err != nil {
		t.Fatal(err)
	}
	if first, err := leader.node.stores.log.FirstIndex(); err != nil || first == 1 {
		t.Fatalf("the log still begins at %d: nothing is shown (%v)", first, err)
	}
	x.lock("y")
	c.start(away)
	m := c.servers[away].node.fsm.machine
	eventually(t, "it has caught up", func() bool { return m.Hash() == leader.node.fsm.machine.Hash() })
	if h := m.Holder("x").Holders; len(h) != 1 || uint64(h[0].Token) != g.Token {
		t.Errorf("it believes that x is held by %v", h)
	}
	if c.servers[away].node.fsm.cluster() != leader.node.fsm.cluster() {
		t.Error("it does not know the cluster's name")
	}
}

func TestDataDirectoryHasOneUser(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := alone(t, Config{DataDir: dir})
	if _, err := Start(t.Context(), Config{DataDir: dir, Log: quiet(t)}); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second server starts in the same directory: %v", err)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	_, err := Start(t.Context(), Config{DataDir: dir, Store: StoreBolt, Log: quiet(t)})
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

// What a later version has written stops the server; it does not guess.
func TestUnknownEntryStopsTheServer(t *testing.T) {
	t.Parallel()
	for name, entry := range map[string]func(term uint64) []byte{
		"kind":  func(term uint64) []byte { return beginEntry(99, term) },
		"empty": func(uint64) []byte { return nil },
		"term":  func(uint64) []byte { return []byte{entryBatch, 0x80} },
		"operation": func(term uint64) []byte {
			return encode(term, []proposal{{command: machine.Command{Op: 9999}}}, time.Now())
		},
		"garbage": func(term uint64) []byte { return append(beginEntry(entryBatch, term), 1, 2, 3) },
		"fact":    func(term uint64) []byte { return append(beginEntry(entryFact, term), 'x') },
	} {
		t.Run(name, func(t *testing.T) {
			s := alone(t, Config{})
			c := attach(t, s)
			c.open(time.Minute)
			s.node.raft.Apply(entry(s.node.raft.CurrentTerm()), 0)
			select {
			case <-s.Done():
			case <-time.After(patience):
				t.Fatal("it goes on")
			}
			if s.Err() == nil || !strings.Contains(s.Err().Error(), "log entry") {
				t.Errorf("it says %v", s.Err())
			}
		})
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
		{"Timing.Heartbeat", Config{Timing: Timing{Heartbeat: time.Millisecond}}},
		{"Timing.Lease", Config{Timing: Timing{Lease: time.Minute}}},
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
		var wrong *ConfigError
		if !errors.As(err, &wrong) || wrong.Setting != x.setting {
			t.Errorf("%+v: %v; want that %s is wrong", x.c, err, x.setting)
		}
	}
}

func TestBatchesAreBounded(t *testing.T) {
	t.Parallel()
	small := proposal{command: machine.Command{Op: machine.OpRelease, Name: "x", RequestID: backend.NewRequestID()}}
	large := proposal{command: machine.Command{Op: machine.OpAcquire, Requests: []machine.Request{
		{Metadata: map[string]string{"key": strings.Repeat("x", maxBatchBytes)}},
	}}}
	many := func(x proposal, n int) (all []proposal) {
		for range n {
			all = append(all, x)
		}
		return all
	}
	for _, x := range []struct {
		queue []proposal
		want  int
	}{
		{nil, 0}, {many(small, 3), 3}, {many(small, 2*maxBatch), maxBatch}, {many(large, 3), 1},
		{append(many(small, 5), large), 5},
	} {
		var l lanes
		for _, q := range x.queue {
			l.add(q)
		}
		if got, _ := l.take(); len(got) != x.want || l.queued != len(x.queue)-x.want {
			t.Errorf("%d of %d go into one entry, %d are left; want %d", len(got), len(x.queue), l.queued, x.want)
		}
	}
}
