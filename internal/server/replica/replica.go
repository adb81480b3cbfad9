package replica

// A replica as a whole: raft, and all that it is given. From the network upwards that is peerNet, addressed and proof;
// from the disk upwards the stores; on top the FSM.
//
// From Open on the member takes part in elections. Run then finds a cluster for a member that has none.

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/rig"
)

const (
	// peerTimeout bounds one message between members, in which a disk may hang for a while.
	peerTimeout = 3 * time.Second
	// snapshotEntries is how many entries gather before a snapshot, and trailingEntries how many stay after it for
	// members that are behind. Entries are batches: a snapshot is made of some 100,000 commands under load.
	snapshotEntries  = 8192
	trailingEntries  = 10240
	snapshotInterval = 30 * time.Second
	// eventsKept is how many events a member keeps for watchers.
	eventsKept = 16 << 10
)

// ErrNotLeader is why something was certainly not done: this member does not lead.
var ErrNotLeader = errors.New("this member does not lead")

// Config says what a replica is made of. What is not optional is so marked.
type Config struct {
	DataDir string // empty with StoreMemory
	Store   Store  // required

	// Listener takes connections of the other members, which find it at Advertise. Nil: there are no others.
	Listener  net.Listener
	Advertise string
	// Client is where clients find this member; empty: nowhere. The others are told it.
	Client string
	// Dial opens connections to the others, which are wrapped in TLS if that is not nil. Required with Listener.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	TLS  *tls.Config

	// Join are the addresses of the members, JoinKey approves new ones, and BootstrapExpect is how many make a new
	// cluster.
	Join            []string
	JoinKey         []byte
	BootstrapExpect int

	Timing Timing
	Now    func() time.Time // of elapsing time; required

	// Changed is called after each entry that was carried out. It must not block. Required.
	Changed func()
	// Fatal is called when this member cannot go on. It must not block. Required.
	Fatal func(error)

	Version string
	Log     *slog.Logger // required

	// Rig, and HangAfter, which replaces the constant, are for tests.
	Rig       *rig.Rig // required
	HangAfter time.Duration
}

// Replica is one member's copy of the cluster's state, and its place among the members: raft with all that belongs to
// it. All methods are safe for concurrent use.
type Replica struct {
	// State is what the log has come to here.
	State *FSM

	config  Config
	address string // by which the others know this member
	id      raft.ServerID
	raft    *raft.Raft
	proof   *proof
	stores  *stores
	peers   *peerNet             // nil without other members
	serving atomic.Pointer[Term] // nil while this member does not serve
	dead    chan struct{}        // closed once raft has shut down

	admitting sync.Mutex // held from when the members are counted until one more is taken in
}

// Open starts a replica, which takes part in elections and talks with the others from now on. It closes the listener
// with itself, also on an error.
func Open(c Config) (*Replica, error) {
	f := NewFSM(newMachine(), c.Changed, c.Fatal)
	f.comparison.version, f.comparison.log = c.Version, c.Log
	address, peers, t := openTransport(&c, f)
	s, err := openStores(c.Store, c.DataDir, newRaftLog(c.Log), c.Rig, c.Fatal)
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	f.now, f.clock = c.Now, Clock{from: c.Now()}
	f.keep, f.kept, f.silence = s.cluster.write, s.cluster.name, s.silence
	if c.HangAfter != 0 {
		s.silence.hangAfter = c.HangAfter
	}
	r, err := openRaft(s, t, f, raftConfig(s.nodeID, &c))
	if err != nil {
		return nil, err
	}
	r.config, r.address, r.peers = c, address, peers
	if peers != nil {
		peers.serve(r.id, r.memberAddresses, r.reply)
	}
	return r, nil
}

// openTransport opens the network to the other members, or one without others.
func openTransport(c *Config, f *FSM) (address string, peers *peerNet, t transport) {
	if c.Listener == nil {
		address, t := raft.NewInmemTransport("local")
		t.Connect(address, t)
		return string(address), nil, t
	}
	peers = newPeerNet(c, f.home)
	return c.Advertise, peers, addressed{raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: peers, MaxPool: 3, MaxRPCsInFlight: 1, Timeout: peerTimeout, Logger: newRaftLog(c.Log),
	})}
}

// openRaft starts raft over the stores and the transport, which it closes with itself, also on an error.
func openRaft(s *stores, t transport, f *FSM, c *raft.Config) (*Replica, error) {
	r := &Replica{State: f, id: s.nodeID, proof: newProof(t, s.silence), stores: s, dead: make(chan struct{})}
	var err error
	r.raft, err = raft.NewRaft(c, f, s.log, s.stable, s.snapshots, r.proof)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("raft: %w", err), t.Close(), s.close())
	}
	return r, nil
}

func raftConfig(id raft.ServerID, of *Config) *raft.Config {
	t := of.Timing.WithDefaults()
	c := raft.DefaultConfig()
	c.LocalID = id
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLeaseTimeout = t.Heartbeat, t.Election, t.Lease
	c.CommitTimeout = t.Commit
	c.SnapshotThreshold = cmp.Or(of.Rig.SnapshotEntries, snapshotEntries)
	c.TrailingLogs = cmp.Or(of.Rig.TrailingEntries, trailingEntries)
	c.SnapshotInterval = cmp.Or(of.Rig.SnapshotInterval, snapshotInterval)
	c.NoLegacyTelemetry = true
	c.Logger = newRaftLog(of.Log)
	return c
}

// newMachine returns the state machine of a replica.
func newMachine() *machine.Machine { return machine.New(eventsKept) }

// Run makes this member part of a cluster if it is in none, and keeps its log short, until ctx ends. The error is why
// no cluster could be made.
func (r *Replica) Run(ctx context.Context) error {
	var compacting sync.WaitGroup
	defer compacting.Wait()
	compacting.Go(func() { r.compact(ctx) })
	if err := r.settle(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("no cluster could be made: %w", err)
	}
	return nil
}

// Close stops raft, then closes what it used.
func (r *Replica) Close() error {
	stopping := r.raft.Shutdown()
	err := r.proof.Close() // before the wait: otherwise messages to members that are gone have to time out
	err = errors.Join(err, stopping.Error())
	close(r.dead)
	err = errors.Join(err, r.stores.close())
	if r.peers != nil {
		r.peers.serving.Wait()
	}
	return err
}

// ID names this member.
func (r *Replica) ID() string { return string(r.id) }

// Silent is why this member keeps silent towards the others; nil while it speaks. One that is to serve asks too: the
// others elect another leader, but raft does not notice here before what stands still goes on.
func (r *Replica) Silent() error { return r.stores.silence.reason() }

// Leader is who leads, as far as this member knows: the name and the address among the members, or nothing.
func (r *Replica) Leader() (id, address string) {
	a, name := r.raft.LeaderWithID()
	return string(name), string(a)
}

// Elections tells that the leadership may have come to this member, or gone. It keeps the last change only: losing it
// and winning it again looks like winning it.
func (r *Replica) Elections() <-chan bool { return r.raft.LeaderCh() }

// LeadingTerm returns the term in which this member leads, and false if it does not.
func (r *Replica) LeadingTerm() (uint64, bool) {
	// Raft leaves the state of a leader before it takes the next term, and enters it after.
	term := r.raft.CurrentTerm()
	leads := r.raft.State() == raft.Leader
	return term, leads && r.raft.CurrentTerm() == term
}

// LastContact is when this member heard of a leader last; zero if it did not since it was started.
func (r *Replica) LastContact() time.Time { return r.raft.LastContact() }

// Status is how far this member is.
type Status struct {
	Term, LastIndex, CommitIndex uint64
	// Agreed is the index after which this state was last compared with the leader's and the same, Differs the one
	// after which it was not; zero: never.
	Agreed, Differs uint64
	// LogBytes is how large the log is.
	LogBytes int
}

// Status returns how far this member is.
func (r *Replica) Status() Status {
	s := Status{
		Term: r.raft.CurrentTerm(), LastIndex: r.raft.LastIndex(), CommitIndex: r.raft.CommitIndex(),
		LogBytes: r.stores.sizes.bytes(),
	}
	s.Agreed, s.Differs = r.State.comparison.result()
	return s
}

// Applied is how far this member has carried the log out. Raft's own number runs ahead of the state machine; before the
// first entry, the state comes from a snapshot.
func (r *Replica) Applied() uint64 {
	applied := r.raft.AppliedIndex()
	if index := r.State.index.Load(); index > 0 {
		return min(applied, index)
	}
	return applied
}

// Acknowledged is how far the log goes of what was acknowledged to anybody before the call. A member that does not lead
// asks the leader.
func (r *Replica) Acknowledged(ctx context.Context) (uint64, error) {
	if t := r.serving.Load(); t != nil {
		return t.acknowledged(ctx)
	}
	id, address := r.Leader()
	if r.peers == nil || address == "" || id == r.ID() {
		return 0, ErrNotLeader
	}
	a, err := r.peers.ask(ctx, address, question{Index: true})
	switch {
	case err != nil:
		return 0, fmt.Errorf("the leader at %s: %w", address, err)
	case a.Index == 0:
		return 0, ErrNotLeader
	}
	return a.Index, nil
}

// Snapshot makes a snapshot of the state, after which the log begins later.
func (r *Replica) Snapshot() error { return r.await(r.raft.Snapshot()) }

// landing has the future's error, once there is one: raft forgets entries that were on their way to the state machine
// when it shut down, so nobody may wait for a future alone.
func landing(f raft.Future) <-chan error {
	landed := make(chan error, 1)
	go func() { landed <- f.Error() }()
	return landed
}

// await waits for a future, or for the end of raft.
func (r *Replica) await(f raft.Future) error { return r.awaitLanding(landing(f)) }

func (r *Replica) awaitLanding(landed <-chan error) error {
	select {
	case err := <-landed:
		return err
	case <-r.dead:
		return raft.ErrRaftShutdown
	}
}
