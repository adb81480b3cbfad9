package replica

// A replica as a whole: raft and its parts. From the network upwards these are peerNet, addressed and proof;
// from the disk upwards the stores; on top the FSM.
//
// From Open on the member takes part in elections. Run then finds a cluster for a member without one.

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
	// peerTimeout bounds one message between members, in which a disk may hang for a while.
	peerTimeout = 3 * time.Second
	// snapshotEntries is the number of entries between snapshots, and trailingEntries the number that stay after one
	// for members that are behind. Entries are batches: a snapshot is made of some 100,000 commands under load.
	snapshotEntries  = 8192
	trailingEntries  = 10240
	snapshotInterval = 30 * time.Second
	// eventsKept bounds the events that a member keeps for watchers.
	eventsKept = 16 << 10
)

// ErrNotLeader means that a request was certainly not carried out: this member does not lead.
var ErrNotLeader = errors.New("this member does not lead")

// Config configures a replica. Required fields are so marked.
type Config struct {
	DataDir string // empty with StoreMemory
	Store   Store  // required
	// Moved permits a data directory that is a copy: the original is gone for good.
	Moved bool

	// Listener takes connections of the other members, which find it at Advertise. Nil: there are no others.
	Listener  net.Listener
	Advertise string
	// Client is where clients find this member; empty: nowhere. The others learn it.
	Client string
	// Dial opens connections to the others, which use TLS if that is not nil. Required with Listener.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	TLS  *tls.Config

	// Join are the addresses of the members, JoinKey approves new ones, and BootstrapExpect members make a new
	// cluster.
	Join            []string
	JoinKey         []byte
	BootstrapExpect int

	// MaxTTL is the greatest TTL of a session that this member grants as leader; 0: the cluster's.
	MaxTTL time.Duration

	Timing Timing
	Now    func() time.Time // of elapsing time; required

	// Changed is called after each entry that was carried out. It must not block. Required.
	Changed func()
	// Fatal is called when this member cannot go on. It must not block. Required.
	Fatal func(error)
	// Appended gets the time of each append to the log, with its fsync. May be nil.
	Appended func(time.Duration)
	// Admitted is called when this member, as the leader, has taken in a new or a moved member. approved says
	// that it gets a vote; replaced is the member that it took the place of, if there is one. Nil: nobody asks.
	Admitted func(id, address string, approved bool, replaced string)

	Version string
	Log     *slog.Logger // required

	// Rig, and HangAfter, which replaces the constant, are for tests.
	Rig       *serverfault.Rig // required
	HangAfter time.Duration
	// HealthEvery replaces healthEvery, for tests.
	HealthEvery time.Duration
	// RivalsEvery replaces rivalsEvery, and AskTime startTimeout and rivalTimeout, for tests.
	RivalsEvery, AskTime time.Duration
}

// Replica is one member's copy of the cluster's state, and its place among the members: raft with all its parts. All
// methods are safe for concurrent use.
type Replica struct {
	// State is the state after the log so far.
	State *FSM

	config  Config
	address string // by which the others know this member
	id      raft.ServerID
	start   string // names this process, among all past ones of this member
	raft    *raft.Raft
	proof   *proof
	stores  *stores
	peers   *peerNet             // nil without other members
	serving atomic.Pointer[Term] // nil while this member does not serve
	health  atomic.Pointer[Health]
	dead    chan struct{} // closed once raft has shut down

	unrivalled chan struct{} // see Unrivalled

	admitting sync.Mutex // held from counting the members until one more is added
}

// Open starts a replica, which from now on takes part in elections and talks with the others. The replica owns the
// listener; Open closes it on an error.
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

// openStores opens the data directory, and adopts its identity and state.
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

// begin answers members that start at the same time, and asks the others whether this member may start. It closes no
// part of the replica.
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

// openRaft starts raft over the stores and the transport, which raft closes. On an error openRaft closes the
// transport.
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

// Run makes this member part of a cluster if it is in no cluster, and keeps its log short, until ctx ends. The error
// says why no cluster could be made.
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

// Silent returns the reason why this member keeps silent towards the others; nil while it speaks. A member that is to
// serve asks too: the others elect another leader, but raft does not notice here before the blocked part goes on.
func (r *Replica) Silent() error { return r.stores.silence.reason() }

// Leader returns the leader, as far as this member knows: its id and its address among the members, or "".
func (r *Replica) Leader() (id, address string) {
	a, name := r.raft.LeaderWithID()
	return string(name), string(a)
}

// Elections reports that the leadership may have come to this member, or gone. It keeps the last change only: losing
// and regaining it looks like gaining it.
func (r *Replica) Elections() <-chan bool { return r.raft.LeaderCh() }

// LeadingTerm returns the term in which this member leads, and false if it does not.
func (r *Replica) LeadingTerm() (uint64, bool) {
	// Raft leaves the state of a leader before it takes the next term, and enters it after.
	term := r.raft.CurrentTerm()
	leads := r.raft.State() == raft.Leader
	return term, leads && r.raft.CurrentTerm() == term
}

// LastContact returns the time of this member's last contact with a leader; zero if it had no contact since its start.
func (r *Replica) LastContact() time.Time { return r.raft.LastContact() }

// Status is the progress of this member.
type Status struct {
	Term, LastIndex, CommitIndex uint64
	// Agreed is the index after which this state last matched the leader's, Differs the index after which it did not;
	// zero: never.
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

// LastSnapshot returns when the last snapshot was made and its size in bytes; zero without a snapshot.
func (r *Replica) LastSnapshot() (at time.Time, size int) {
	all, err := r.stores.snapshots.List()
	if err != nil || len(all) == 0 {
		return time.Time{}, 0
	}
	// Raft names a snapshot by its term, its index and the time, in milliseconds.
	if ms, err := strconv.ParseInt(all[0].ID[strings.LastIndexByte(all[0].ID, '-')+1:], 10, 64); err == nil {
		at = time.UnixMilli(ms)
	}
	return at, int(all[0].Size)
}

// Applied returns the index of the last entry that the state machine has carried out; before the first one, the index
// of the state's snapshot. Raft's own number runs ahead of it, and counts entries that the state machine
// does not get.
func (r *Replica) Applied() uint64 {
	if index := r.State.index.Load(); index > 0 {
		return index
	}
	index, _ := strconv.ParseUint(r.raft.Stats()["last_snapshot_index"], 10, 64) // raft writes a number there
	return index
}

// Acknowledged returns the end of the log that was acknowledged to anybody before the call. A member that does not
// lead asks the leader.
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

// Snapshot makes a snapshot of the state, and truncates the log.
func (r *Replica) Snapshot() error { return r.await(r.raft.Snapshot()) }

// landing returns a channel for the future's error: raft forgets entries that were on their way to the state machine
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
