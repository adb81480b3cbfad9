package replica

// The effect of a log entry: commands for the lock state machine, and facts about the cluster itself. All members
// carry out the same entries, so the state must not depend on the member: not on its clock, its settings or the time
// at which the entry comes.

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/notify"
)

// fact is an agreement of the members about themselves.
type fact struct {
	// Cluster names the cluster, if it has no name yet.
	Cluster string `json:"cluster,omitempty"`
	// Member and its address for clients.
	Member raft.ServerID `json:"member,omitempty"`
	Client string        `json:"client,omitempty"`
	// Approved is a member that may have a vote, by consent of an operator or because it has the key.
	Approved raft.ServerID `json:"approved,omitempty"`
	// Mark: every member takes the hash of its state here. Hash is the leader's hash at an earlier mark.
	Mark bool       `json:"mark,omitempty"`
	Hash *stateHash `json:"hash,omitempty"`
	// Opened: the time in which the cluster served nobody after a restore is over.
	Opened bool `json:"opened,omitempty"`
	// MaxTTL replaces permitted.MaxTTL, and DefaultMaxTTL its own with Cluster.
	MaxTTL        time.Duration `json:"maxTTL,omitempty"`
	DefaultMaxTTL time.Duration `json:"defaultMaxTTL,omitempty"`
	// Started is a member, and Start its start that counts from now on, if that is later than the previous one.
	Started raft.ServerID `json:"started,omitempty"`
	Start   string        `json:"start,omitempty"`
}

// facts are the sum of all facts.
type facts struct {
	// Cluster is the token space. It survives a restore.
	Cluster string                   `json:"cluster"`
	Clients map[raft.ServerID]string `json:"clients"`
	// Approved members have a vote, or get one when they have caught up. Founders of the cluster are not among them.
	Approved map[raft.ServerID]bool `json:"approved,omitempty"`
	// Starts are the processes of members that count: see processes.go.
	Starts map[raft.ServerID]string `json:"starts,omitempty"`
	// Restored is the generation of the cluster: see generation.Of. Empty if it comes from no restore. Members from
	// before the restore belong to another cluster, although it has the same name.
	Restored string `json:"restored,omitempty"`
	// Former are the addresses of the members before the restore.
	Former []string `json:"former,omitempty"`
	// ClosedFor is the time for which the first leader serves nobody, until it says Opened, and UsedTTL the longest
	// TTL in use where the cluster was restored from.
	ClosedFor time.Duration `json:"closedFor,omitempty"`
	UsedTTL   time.Duration `json:"usedTTL,omitempty"`
	permitted
}

// home is the name of the cluster among its members.
func (x *facts) home() string {
	if x.Restored == "" {
		return x.Cluster
	}
	return x.Cluster + "/" + x.Restored
}

// fromBackup reports whether home is the name of a restored cluster.
func fromBackup(home string) bool { return strings.Contains(home, "/") }

// Applied is the result of one log entry.
type Applied struct {
	Stale   bool // no effect: it was decided in another term
	Results []machine.Result
	Notices [][]machine.Notice // one list per command
	Events  []machine.Event    // of all commands; nil unless the machine is followed
}

// FSM applies the log to the lock state machine.
type FSM struct {
	Machine *machine.Machine
	fatal   func(error) // called once, when this replica cannot go on
	changed func()      // called after each entry, must not block

	now func() time.Time // of elapsing time

	silence *silence // observes entries that take too long. May be nil.

	// keep writes the members' name of the cluster beside the data. nil: no data directory.
	keep func(home string) error

	comparison comparison // with the state of the leader

	raised notify.Signal // rings when the feature level has changed

	replaced func(id raft.ServerID, start string) // is called when the start of a member has changed. It must not block.

	commits *commitMark // is raised by applied entries; nil: no mark

	index atomic.Uint64 // of the last entry that was carried out since the start; zero: no entry

	mu     sync.RWMutex // protects the following fields
	clock  Clock        // as set by the last checkpoint
	facts  facts
	kept   string // the home on disk; a starting member knows it before it has read its log
	broken error
}

// NewFSM makes an FSM of a machine that has carried out no entry yet. changed is called after each entry and must not
// block, fatal once, when this replica cannot go on.
func NewFSM(m *machine.Machine, changed func(), fatal func(error)) *FSM {
	return &FSM{
		Machine: m, changed: changed, fatal: fatal, now: time.Now, clock: Clock{from: time.Now()},
		facts: facts{Clients: map[raft.ServerID]string{}}, comparison: comparison{made: notify.New()}, raised: notify.New(),
		replaced: func(raft.ServerID, string) {},
	}
}

// Apply implements raft.FSM. It stops at an entry that is damaged, or unknown to this version: a member that skipped
// it would have another state than the others.
func (f *FSM) Apply(entry *raft.Log) any {
	if err := f.failure(); err != nil {
		return err
	}
	if f.silence != nil {
		f.silence.applying.begin()
		defer f.silence.applying.end()
	}
	if !intact(entry) {
		return f.fail(fmt.Errorf("log entry %d: wrong checksum", entry.Index))
	}
	out, err := f.apply(entry)
	if err != nil {
		return f.fail(fmt.Errorf("log entry %d: %w", entry.Index, err))
	}
	f.index.Store(entry.Index)
	if f.commits != nil {
		f.commits.raise(entry.Index)
	}
	f.changed()
	return out
}

func (f *FSM) apply(entry *raft.Log) (*Applied, error) {
	kind, decided, body, err := readEntry(entry.Data)
	switch {
	case err != nil:
		return nil, err
	case kind != entryBatch && kind != entryFact:
		return nil, fmt.Errorf("kind %d is not known to this version", kind)
	case decided != entry.Term: // see beginEntry
		return &Applied{Stale: true}, nil
	case kind == entryFact:
		return &Applied{}, f.learn(entry.Index, body)
	}
	return f.applyBatch(body)
}

// applyBatch carries out the commands of one entry. An operation that this version does not know stops the member,
// unless the command permits members to skip it.
func (f *FSM) applyBatch(body []byte) (*Applied, error) {
	batch, err := machine.DecodeBatch(body)
	if err != nil {
		return nil, err
	}
	n := len(batch.Commands)
	out := &Applied{Results: make([]machine.Result, n), Notices: make([][]machine.Notice, n)}
	for i := range batch.Commands {
		c := &batch.Commands[i]
		if f.silence != nil {
			f.silence.applying.begin() // the bound is for one command, not for a long entry on a slow machine
		}
		level := f.Machine.Level()
		out.Results[i], out.Notices[i] = f.Machine.Apply(batch.At, c)
		if c.Op == machine.OpRaiseLevel && f.Machine.Level() != level {
			f.raised.Notify()
		}
		if out.Results[i].Code == machine.CodeUnknown && !c.Ignorable {
			return nil, fmt.Errorf("operation %d is not known to this version: %s", c.Op, out.Results[i].Detail)
		}
		if c.Op == machine.OpCheckpoint && out.Results[i].Code == machine.CodeOK {
			f.setClock()
		}
	}
	out.Events = f.Machine.News()
	return out, nil
}

// setClock adopts the last checkpoint, even if it sets the clock back: everything that was timed by it is timed from
// there. It was made before it is known here, so the clock is slow rather than fast.
func (f *FSM) setClock() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clock = Clock{f.Machine.Clock(), f.now()}
}

// ClusterClock returns the clock of the cluster, for a member that is about to lead.
func (f *FSM) ClusterClock() Clock {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.clock
}

// learn adds a fact. A leader repeats a fact if it does not know whether it landed (Term.tell), so a repetition of a
// fact must be harmless.
func (f *FSM) learn(index uint64, body []byte) error {
	var x fact
	if err := json.Unmarshal(body, &x); err != nil {
		return err
	}
	if x.Mark { // before f.mu is taken, which freezing takes too
		f.comparison.mark(index, f.Freeze)
	}
	if x.Hash != nil {
		f.comparison.told(*x.Hash)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.facts.Cluster == "":
		f.facts.Cluster, f.facts.permitted = x.Cluster, permitted{x.MaxTTL, x.DefaultMaxTTL}
	case x.Cluster == "" && x.MaxTTL != 0: // otherwise it is of a leader that did not know the name yet
		f.facts.MaxTTL = x.MaxTTL
	}
	if x.Member != "" {
		f.facts.Clients[x.Member] = x.Client
	}
	if x.Approved != "" {
		if f.facts.Approved == nil {
			f.facts.Approved = map[raft.ServerID]bool{}
		}
		f.facts.Approved[x.Approved] = true
	}
	if x.Started != "" && mayCount(x.Start, f.facts.Starts[x.Started]) {
		if f.facts.Starts == nil {
			f.facts.Starts = map[raft.ServerID]string{}
		}
		f.facts.Starts[x.Started] = x.Start
		f.replaced(x.Started, x.Start)
	}
	if x.Opened {
		f.facts.ClosedFor = 0
	}
	return f.keepHome(f.facts.home())
}

// keepHome records the cluster of this member. The caller holds f.mu.
func (f *FSM) keepHome(home string) error {
	if home == "" || home == f.kept {
		return nil
	}
	if f.kept != "" {
		return fmt.Errorf("the data directory is of cluster %q, its contents of cluster %q", f.kept, home)
	}
	if f.keep != nil {
		if err := f.keep(home); err != nil {
			return fmt.Errorf("storing the name of the cluster: %w", err)
		}
	}
	f.kept = home
	return nil
}

// fail stops the replica: a replica that skips an entry drifts apart from the others. It does not panic, since the
// surrounding program may have better things to do than to end.
func (f *FSM) fail(err error) error {
	f.mu.Lock()
	f.broken = err
	f.mu.Unlock()
	f.fatal(err)
	return err
}

func (f *FSM) failure() error {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.broken
}

// home returns the members' name of their cluster, empty before its first leader.
func (f *FSM) home() string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return cmp.Or(f.facts.home(), f.kept)
}

// Cluster returns the clients' name of the cluster, the token space; empty before its first leader.
func (f *FSM) Cluster() string {
	name, _, _ := strings.Cut(f.home(), "/")
	return name
}

// History returns the restore from which the cluster comes, or "". See generation.Of.
func (f *FSM) History() string { return historyOf(f.home()) }

// historyOf returns the part of a home that names the restore.
func historyOf(home string) string {
	_, restored, _ := strings.Cut(home, "/")
	return restored
}

// former returns the addresses of the members before the restore.
func (f *FSM) former() []string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.facts.Former
}

// Closed returns the time that a leader has to wait before it serves, and the longest TTL in use in the cluster of
// the backup.
func (f *FSM) Closed() (wait, used time.Duration) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.facts.ClosedFor, f.facts.UsedTTL
}

// Client returns where clients find a member; empty if nowhere, or unknown.
func (f *FSM) Client(id string) string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.facts.Clients[raft.ServerID(id)]
}

// knows reports whether a member's address for clients is known.
func (f *FSM) knows(id raft.ServerID) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	_, known := f.facts.Clients[id]
	return known
}

// approved reports whether a member may have a vote.
func (f *FSM) approved(id raft.ServerID) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.facts.Approved[id]
}

// Started returns the start of a member that counts; empty if it is not recorded.
func (f *FSM) Started(id raft.ServerID) string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.facts.Starts[id]
}

// StoreConfiguration implements raft.ConfigurationStore: the members have changed.
func (f *FSM) StoreConfiguration(index uint64, _ raft.Configuration) { f.index.Store(index) }

// Snapshot implements raft.FSM.
func (f *FSM) Snapshot() (raft.FSMSnapshot, error) {
	frozen, err := f.Freeze()
	if err != nil {
		return nil, err
	}
	return frozen, nil
}

// Freeze returns the present state, unchanged by later entries.
func (f *FSM) Freeze() (*Frozen, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.broken != nil {
		return nil, f.broken
	}
	now := f.facts
	now.Clients, now.Approved, now.Starts = maps.Clone(now.Clients), maps.Clone(now.Approved), maps.Clone(now.Starts)
	return &Frozen{now, f.Machine.Freeze()}, nil
}

// Frozen is a snapshot: the facts as one line of JSON, then the machine's own format.
type Frozen struct {
	facts   facts
	machine *machine.Frozen
}

// maxFacts bounds the line of facts, in bytes.
const maxFacts = 1 << 20

// Persist implements raft.FSMSnapshot.
func (s *Frozen) Persist(sink raft.SnapshotSink) error {
	err := json.NewEncoder(sink).Encode(s.facts)
	if err == nil {
		_, err = s.machine.WriteTo(sink)
	}
	if err != nil {
		return errors.Join(err, sink.Cancel())
	}
	return sink.Close()
}

// Release implements raft.FSMSnapshot.
func (s *Frozen) Release() {}

// Restore implements raft.FSM.
func (f *FSM) Restore(snapshot io.ReadCloser) error {
	defer snapshot.Close()
	line, err := readLine(snapshot)
	if err != nil {
		return fmt.Errorf("facts in the snapshot: %w", err)
	}
	x := facts{Clients: map[raft.ServerID]string{}}
	if err := json.Unmarshal(line, &x); err != nil {
		return fmt.Errorf("facts in the snapshot: %w", err)
	}
	if err := f.become(x, snapshot); err != nil {
		return err
	}
	f.comparison.anew()
	f.index.Store(0) // raft's own is right now
	f.changed()
	return nil
}

// become adopts the state of a snapshot. It checks the cluster first: the state of another one must not replace this
// one.
func (f *FSM) become(x facts, snapshot io.Reader) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.keepHome(x.home()); err != nil {
		return err
	}
	if err := f.Machine.Restore(snapshot); err != nil {
		return err
	}
	f.facts = x
	f.clock = Clock{f.Machine.Clock(), f.now()}
	for id, start := range x.Starts {
		f.replaced(id, start)
	}
	return nil
}

// readLine reads up to a line feed and not further.
func readLine(r io.Reader) ([]byte, error) {
	var line []byte
	for one := make([]byte, 1); len(line) < maxFacts; line = append(line, one[0]) {
		if _, err := io.ReadFull(r, one); err != nil {
			return nil, err
		}
		if one[0] == '\n' {
			return line, nil
		}
	}
	return nil, errors.New("the line has no end")
}
