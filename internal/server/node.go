package server

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
)

// Timing is how fast members react to each other. Zero values mean the defaults, which suit members within one region.
type Timing struct {
	// Heartbeat is how long a member hears nothing of its leader before it stands for election. Default 500 ms.
	Heartbeat time.Duration
	// Lease is how long a leader hears nothing of most members before it steps down; at most Heartbeat, the default. A
	// shorter one makes a leader that is cut off send its clients away sooner, and a busy machine change leaders more
	// often. What is promised to clients does not rest on it.
	Lease time.Duration
	// Election is how long a member that stands for election waits for votes before it tries again; at least Heartbeat,
	// the default.
	Election time.Duration
	// Commit is how soon, at the latest, followers learn what is committed when nothing more is written. Default 50 ms.
	Commit time.Duration
}

const (
	defaultHeartbeat = 500 * time.Millisecond
	// peerTimeout bounds one message between members, in which a disk may hang for a while.
	peerTimeout   = 3 * time.Second
	defaultCommit = 50 * time.Millisecond
	// snapshotEntries is how many entries gather before a snapshot, and trailingEntries how many stay after it for
	// members that are behind. Entries are batches: a snapshot is made of some 100,000 commands under load.
	snapshotEntries  = 8192
	trailingEntries  = 10240
	snapshotInterval = 30 * time.Second
)

func (t Timing) withDefaults() Timing {
	if t.Heartbeat == 0 {
		t.Heartbeat = defaultHeartbeat
	}
	if t.Lease == 0 {
		t.Lease = t.Heartbeat
	}
	if t.Election == 0 {
		t.Election = t.Heartbeat
	}
	if t.Commit == 0 {
		t.Commit = defaultCommit
	}
	return t
}

// check returns the first thing that is wrong with t, which has its defaults.
func (t Timing) check(minTTL time.Duration) error {
	const slowest = 10 * time.Second
	switch {
	case t.Heartbeat < 10*time.Millisecond || t.Heartbeat > slowest:
		return &ConfigError{"Timing.Heartbeat", t.Heartbeat.String(), "it is not between 10ms and 10s"}
	case t.Lease < 5*time.Millisecond || t.Lease > t.Heartbeat:
		return &ConfigError{"Timing.Lease", t.Lease.String(), "it is not between 5ms and Heartbeat"}
	case t.Election < t.Heartbeat || t.Election > slowest:
		return &ConfigError{"Timing.Election", t.Election.String(), "it is not between Heartbeat and 10s"}
	case t.Commit < time.Millisecond || t.Commit > t.Heartbeat:
		return &ConfigError{"Timing.Commit", t.Commit.String(), "it is not between 1ms and Heartbeat"}
	}
	// Members wait for up to twice these times, so that not all of them stand at once.
	election := 2 * (t.Heartbeat + t.Election)
	if slow := max(t.Heartbeat, t.Election) > defaultHeartbeat; slow && minTTL < election {
		return &ConfigError{
			"MinTTL", minTTL.String(),
			fmt.Sprintf("with this Timing an election takes up to %v, in which holds with a shorter TTL would be lost", election),
		}
	}
	return nil
}

// node is raft with what belongs to it.
type node struct {
	id     raft.ServerID
	raft   *raft.Raft
	fsm    *fsm
	proof  *proof
	stores *stores
	dead   chan struct{} // closed once raft has shut down
}

// openNode starts raft over the stores and the transport, which it closes with itself, also on an error.
func openNode(s *stores, t transport, f *fsm, c *raft.Config) (*node, error) {
	n := &node{id: s.nodeID, fsm: f, proof: newProof(t, s.watch), stores: s, dead: make(chan struct{})}
	var err error
	n.raft, err = raft.NewRaft(c, f, s.log, s.stable, s.snapshots, n.proof)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("raft: %w", err), t.Close(), s.close())
	}
	return n, nil
}

func raftConfig(id raft.ServerID, of *Config) *raft.Config {
	t, rig := of.Timing.withDefaults(), of.rig()
	c := raft.DefaultConfig()
	c.LocalID = id
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLeaseTimeout = t.Heartbeat, t.Election, t.Lease
	c.CommitTimeout = t.Commit
	c.SnapshotThreshold = cmp.Or(rig.SnapshotEntries, snapshotEntries)
	c.TrailingLogs = cmp.Or(rig.TrailingEntries, trailingEntries)
	c.SnapshotInterval = cmp.Or(rig.SnapshotInterval, snapshotInterval)
	c.NoLegacyTelemetry = true
	c.Logger = newRaftLog(of.Log)
	return c
}

// fresh reports whether this member belongs to no cluster yet.
func (n *node) fresh() bool { return len(n.servers()) == 0 }

// servers is the latest configuration, committed or not.
func (n *node) servers() []raft.Server { return n.raft.GetConfiguration().Configuration().Servers }

// bootstrap makes the servers a cluster. All members that do so do it with the same servers.
func (n *node) bootstrap(servers []raft.Server) error {
	err := n.await(n.raft.BootstrapCluster(raft.Configuration{Servers: servers}))
	if errors.Is(err, raft.ErrCantBootstrap) && !n.fresh() {
		return nil // another member was faster, and has told us
	}
	return err
}

// stand makes this node, which is found at own, stand for election at once: who is alone need not wait for others.
func (n *node) stand(own raft.ServerAddress) {
	if n.raft.State() != raft.Follower {
		return
	}
	header := raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(n.id), Addr: []byte(own)}
	// If it fails, the election comes by itself, later.
	_ = n.proof.TimeoutNow(n.id, own, &raft.TimeoutNowRequest{RPCHeader: header}, &raft.TimeoutNowResponse{})
}

// leadingTerm returns the term in which this node leads, and false if it does not.
func (n *node) leadingTerm() (uint64, bool) {
	// Raft leaves the state of a leader before it takes the next term, and enters it after.
	term := n.raft.CurrentTerm()
	leads := n.raft.State() == raft.Leader
	return term, leads && n.raft.CurrentTerm() == term
}

// close stops raft, then closes what it used.
func (n *node) close() error {
	stopping := n.raft.Shutdown()
	err := n.proof.Close() // before the wait: otherwise messages to members that are gone have to time out
	err = errors.Join(err, stopping.Error())
	close(n.dead)
	return errors.Join(err, n.stores.close())
}

// newMachine returns the state machine of a replica.
func newMachine() *machine.Machine { return machine.New(eventsKept) }

// eventsKept is how many events a member keeps for watchers.
const eventsKept = 16 << 10
