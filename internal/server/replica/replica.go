package replica

// A replica as a whole: raft and its parts. The network side, from the bottom, has peerNet, addressed and proof. The
// disk side has the stores. The FSM is on top.
//
// From Open on, the member takes part in elections. Run then gets a member without a cluster into a cluster.

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/serverfault"
)

const (
	// peerTimeout is the maximum time for one message between members and its answer, for which a disk may have to write.
	peerTimeout = 3 * time.Second
	// snapshotEntries is the number of entries between snapshots. trailingEntries is the number of entries that stay in
	// the log after a snapshot, for members that are behind. Entries are batches: under load, snapshotEntries entries have
	// some 100,000 commands.
	snapshotEntries  = 8192
	trailingEntries  = 10240
	snapshotInterval = 30 * time.Second
	// eventsKept bounds the events that a member keeps for watchers.
	eventsKept = 16 << 10
)

// ErrNotLeader means that a request certainly had no effect, because this member does not lead.
var ErrNotLeader = errors.New("this member does not lead")

// Config configures a replica. The comments mark required fields.
type Config struct {
	DataDir string // empty with StoreMemory
	Store   Store  // required
	// Moved permits a data directory that is a copy, if the original never starts again.
	Moved bool

	// Listener accepts connections of other members, which dial Advertise. Nil: there are no other members.
	Listener  net.Listener
	Advertise string
	// Client is the address of this member for clients; empty: none. The leader records it in the log.
	Client string
	// Dial opens connections to the other members, which use TLS if TLS is not nil. Dial is required with Listener.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	TLS  *tls.Config

	// Join are the addresses of the members. JoinKey approves new members. BootstrapExpect is the number of members that
	// together create a new cluster; 0: never.
	Join            []string
	JoinKey         []byte
	BootstrapExpect int

	// MaxTTL is the greatest TTL of a session that this member grants as leader; 0: the default of the cluster.
	MaxTTL time.Duration

	Timing Timing
	Now    func() time.Time // a clock for elapsed time; required

	// Changed is called after each applied entry. It must not block. Required.
	Changed func()
	// Fatal is called when this member cannot continue. It must not block. Required.
	Fatal func(error)
	// Appended gets the duration of each append to the log, including its fsync. May be nil.
	Appended func(time.Duration)
	// Admitted is called when this member, as the leader, has admitted a new or moved member. approved reports that the
	// member is approved, or was already a member; replaced is the member that it replaced, or "". May be nil.
	Admitted func(id, address string, approved bool, replaced string)

	Version string
	Log     *slog.Logger // required

	// Rig and HangAfter, which replaces hangAfter, are for tests.
	Rig       *serverfault.Rig // required
	HangAfter time.Duration
	// HealthEvery replaces healthEvery, for tests.
	HealthEvery time.Duration
	// RivalsEvery replaces rivalsEvery, and AskTime startTimeout and rivalTimeout, for tests.
	RivalsEvery, AskTime time.Duration
}

// Replica is one member: its copy of the cluster's state, and raft with all its parts. All methods are safe for
// concurrent use.
type Replica struct {
	// State is the state after all applied entries.
	State *FSM

	config  Config
	address string // of this member, for the others
	id      raft.ServerID
	start   string // identifies this process among all starts of this member
	raft    *raft.Raft
	proof   *proof
	stores  *stores
	peers   *peerNet             // nil without other members
	serving atomic.Pointer[Term] // nil while this member does not serve
	health  atomic.Pointer[Health]
	dead    chan struct{} // closed once raft has shut down

	unrivalled chan struct{} // see Unrivalled

	admitting sync.Mutex // held while a member is admitted
}

// Open starts a replica, which from now on takes part in elections and communicates with the other members. The replica
// owns the listener; Open closes it on an error.
func Open(c Config) (*Replica, error) {
	f := NewFSM(newMachine(), c.Changed, c.Fatal)
	f.comparison.version, f.comparison.log = c.Version, c.Log
	address, peers, t := openTransport(&c, f)
	f.now, f.clock = c.Now, Clock{from: c.Now()}
	r := &Replica{
		State: f, config: c, address: address, peers: peers,
		dead: make(chan struct{}), unrivalled: make(chan struct{}),
	}
	f.replaced = r.replaced
	if err := r.openStores(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	if peers != nil {
		if err := r.begin(); err != nil {
			return nil, errors.Join(err, t.Close(), r.stores.close())
		}
	}
	if err := r.openRaft(t, raftConfig(r.id, &c)); err != nil {
		return nil, err
	}
	if peers != nil {
		peers.now.Store(&speaker{r, r.memberAddresses, r.reply})
	}
	return r, nil
}

// openStores opens the data directory, and takes the id of the member and its state from it.
func (r *Replica) openStores() error {
	c, f := &r.config, r.State
	s, err := openStores(c.Store, c.DataDir, newRaftLog(c.Log), c.Rig, c.Fatal)
	if err != nil {
		return err
	}
	if c.DataDir != "" {
		if err := checkPlace(c.DataDir, c.Moved, c.Log); err != nil {
			return errors.Join(err, s.close())
		}
	}
	if r.start = c.Rig.Start; r.start == "" {
		if r.start, err = nextStart(c.DataDir); err != nil {
			return errors.Join(err, s.close())
		}
	}
	if c.HangAfter != 0 {
		s.silence.hangAfter = c.HangAfter
	}
	f.keep, f.silence, f.commits = s.cluster.write, s.silence, s.commits
	f.mu.Lock()
	f.kept = s.cluster.name
	f.mu.Unlock()
	if s.disk != nil {
		s.disk.appended = c.Appended
	}
	r.stores, r.id = s, s.nodeID
	return nil
}

// begin answers members that start at the same time, and asks the others whether this member may start. On an error the
// caller closes the parts of the replica.
func (r *Replica) begin() error {
	r.peers.now.Store(&speaker{answer: r.early(r.self(), r.stores.known, r.stores.members)})
	r.peers.serve()
	if r.config.Rig.Start != "" {
		return nil
	}
	switch found := r.askBeforeStart(); {
	case found.runs != "":
		return errors.Join(&RunningError{string(r.id), found.runs}, keepNumber(r.config.DataDir, numberOf(r.start)-1))
	case found.known > r.stores.last || found.later != "":
		r.peers.now.Store(&speaker{answer: func(question) answer { return answer{Error: errStarting.Error()} }})
		return r.forget(found)
	}
	return nil
}

// openTransport opens the network to the other members, or a transport without others if there is no listener.
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

// openRaft starts raft with the stores and the transport, which raft closes later. On an error openRaft closes the
// transport and the stores.
func (r *Replica) openRaft(t transport, c *raft.Config) (err error) {
	s := r.stores
	r.proof = newProof(t, s.silence)
	r.proof.known, r.proof.log, r.proof.fatal = s.known, r.config.Log, r.config.Fatal
	r.proof.forgot = r.reconnect
	if r.raft, err = raft.NewRaft(c, r.State, s.log, s.stable, s.snapshots, r.proof); err != nil {
		return errors.Join(fmt.Errorf("raft: %w", err), t.Close(), s.close())
	}
	last := func() (index, term uint64) { index = r.raft.LastIndex(); return index, r.raft.CurrentTerm() }
	r.proof.last.Store(&last)
	return nil
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

// Run gets this member into a cluster if it is not in one, and runs the background tasks of the replica, until ctx
// ends. The error is the reason why no cluster could be created.
func (r *Replica) Run(ctx context.Context) error {
	var compacting sync.WaitGroup
	defer compacting.Wait()
	compacting.Go(func() { r.compact(ctx) })
	compacting.Go(func() { r.keepCommits(ctx) })
	compacting.Go(func() { r.keepUnrivalled(ctx) })
	compacting.Go(func() { r.lookAround(ctx) })
	if err := r.settle(ctx); err != nil && ctx.Err() == nil {
		return fmt.Errorf("no cluster could be made: %w", err)
	}
	return nil
}

// Close stops raft, then closes its parts.
func (r *Replica) Close() error {
	stopping := r.raft.Shutdown()
	err := r.proof.Close() // close first: otherwise messages to members that are down have to time out
	err = errors.Join(err, stopping.Error())
	close(r.dead)
	err = errors.Join(err, r.stores.close())
	if r.peers != nil {
		r.peers.serving.Wait()
	}
	return err
}

// ID returns the id of this member.
func (r *Replica) ID() string { return string(r.id) }

// Silent returns the reason why this member has stopped sending to the others; nil while it sends. A leader must check
// it before it serves clients: the others elect another leader, but raft here notices that only when the blocked part
// continues.
func (r *Replica) Silent() error { return r.stores.silence.reason() }

// Leader returns the leader that this member knows: its id and its address for other members; empty if unknown.
func (r *Replica) Leader() (id, address string) {
	a, name := r.raft.LeaderWithID()
	return string(name), string(a)
}

// Elections returns a channel that reports that this member may have gained or lost the leadership. It keeps only the
// last change: if the member loses and regains the leadership, the channel may report only the gain.
func (r *Replica) Elections() <-chan bool { return r.raft.LeaderCh() }

// LeadingTerm returns the term in which this member leads. It returns false if this member does not lead.
func (r *Replica) LeadingTerm() (uint64, bool) {
	// Raft leaves the leader state before it increments the term, and enters it afterwards.
	term := r.raft.CurrentTerm()
	leads := r.raft.State() == raft.Leader
	return term, leads && r.raft.CurrentTerm() == term
}

// LastContact returns the time of this member's last contact with a leader; zero if it had no contact since its start.
func (r *Replica) LastContact() time.Time { return r.raft.LastContact() }

// Status is the progress of this member.
type Status struct {
	Term, LastIndex, CommitIndex uint64
	// Agreed is the last index at which this state matched the leader's state. Differs is the last index at which it did
	// not. Zero: never.
	Agreed, Differs uint64
	// LogBytes is the size of the log.
	LogBytes int
}

// Status returns the progress of this member.
func (r *Replica) Status() Status {
	s := Status{
		Term: r.raft.CurrentTerm(), LastIndex: r.raft.LastIndex(), CommitIndex: r.raft.CommitIndex(),
		LogBytes: r.stores.sizes.bytes(),
	}
	s.Agreed, s.Differs = r.State.comparison.result()
	return s
}

// LastSnapshot returns the time of the last snapshot and its size in bytes; zero without a snapshot.
func (r *Replica) LastSnapshot() (at time.Time, size int) {
	all, err := r.stores.snapshots.List()
	if err != nil || len(all) == 0 {
		return time.Time{}, 0
	}
	// Raft names a snapshot after its term, its index and the time in milliseconds.
	if ms, err := strconv.ParseInt(all[0].ID[strings.LastIndexByte(all[0].ID, '-')+1:], 10, 64); err == nil {
		at = time.UnixMilli(ms)
	}
	return at, int(all[0].Size)
}

// Applied returns the index of the last entry that the state machine has applied. Before the first entry after a start
// or a restored snapshot, it returns the index of the last snapshot. Raft's own applied index may be ahead, and counts
// entries that the state machine does not get.
func (r *Replica) Applied() uint64 {
	if index := r.State.index.Load(); index > 0 {
		return index
	}
	index, _ := strconv.ParseUint(r.raft.Stats()["last_snapshot_index"], 10, 64) // no error: raft writes a number
	return index
}

// Acknowledged returns the end of the log that a leader has acknowledged to anybody before the call. A member that does
// not lead asks the leader.
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

// Snapshot makes a snapshot of the state, and then truncates the log.
func (r *Replica) Snapshot() error { return r.await(r.raft.Snapshot()) }

// landing returns a channel for the error of a future. When raft shuts down, it drops entries that the state machine
// has not applied and never completes their futures. So callers must not wait for a future alone.
func landing(f raft.Future) <-chan error {
	landed := make(chan error, 1)
	go func() { landed <- f.Error() }()
	return landed
}

// await waits for a future, or for the shutdown of raft.
func (r *Replica) await(f raft.Future) error { return r.awaitLanding(landing(f)) }

func (r *Replica) awaitLanding(landed <-chan error) error {
	select {
	case err := <-landed:
		return err
	case <-r.dead:
		return raft.ErrRaftShutdown
	}
}
