package replica

// What a log entry does: commands for the lock state machine, and facts about the cluster itself. All members carry out
// the same entries, so nothing of what goes into the state may depend on the member: not on its clock, its settings or
// the time at which the entry comes.

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

	"github.com/fencelock/fencelock/internal/bell"
	"github.com/fencelock/fencelock/internal/machine"
)

// fact is what the members agree on about themselves.
type fact struct {
	// Cluster names the cluster, if it has no name yet.
	Cluster string `json:"cluster,omitempty"`
	// Member and its address for clients.
	Member raft.ServerID `json:"member,omitempty"`
	Client string        `json:"client,omitempty"`
	// Approved is a member that may have a vote, by consent of an operator or because it has the key.
	Approved raft.ServerID `json:"approved,omitempty"`
	// Mark: every member takes the hash of its state here. Hash is the leader's at an earlier one.
	Mark bool       `json:"mark,omitempty"`
	Hash *stateHash `json:"hash,omitempty"`
	// Opened: the time is over in which the cluster served nobody after it was restored.
	Opened bool `json:"opened,omitempty"`
}

// facts are the sum of all.
type facts struct {
	// Cluster is the token space. It survives a restore.
	Cluster string                   `json:"cluster"`
	Clients map[raft.ServerID]string `json:"clients"`
	// Approved members have a vote, or get one when they have caught up. Those who made the cluster are not among them.
	Approved map[raft.ServerID]bool `json:"approved,omitempty"`
	// Restored names the restore of a backup from which this cluster comes; empty if it comes from none. Members of
	// what was there before it belong to another cluster, although it has the same name.
	Restored string `json:"restored,omitempty"`
	// ClosedFor is how long the first leader serves nobody, until it says Opened.
	ClosedFor time.Duration `json:"closedFor,omitempty"`
}

// home is what members call their cluster among themselves.
func (x *facts) home() string {
	if x.Restored == "" {
		return x.Cluster
	}
	return x.Cluster + "/" + x.Restored
}

// fromBackup reports whether that is the name of a cluster that was restored.
func fromBackup(home string) bool { return strings.Contains(home, "/") }

// Applied is what one log entry did.
type Applied struct {
	Stale   bool // nothing: it was decided in another term
	Results []machine.Result
	Notices [][]machine.Notice // one list per command
}

// FSM applies the log to the lock state machine.
type FSM struct {
	Machine *machine.Machine
	fatal   func(error) // called once, when this replica cannot go on
	changed func()      // called after each entry, must not block

	now func() time.Time // of elapsing time

	silence *silence // notices if an entry comes to no end. nil: nobody does

	// keep writes beside the data of which cluster it is, as members call it. nil: nothing is kept.
	keep func(home string) error

	comparison comparison // with the state of the leader

	index atomic.Uint64 // of the last entry that was carried out since the start; zero: none

	mu     sync.RWMutex // protects the following fields
	clock  Clock        // as the last checkpoint set it
	facts  facts
	kept   string // what is there; a member that starts knows it before it has read its log
	broken error
}

// NewFSM makes one of a machine that has carried nothing out yet. changed is called after each entry and must not
// block, fatal once, when this replica cannot go on.
func NewFSM(m *machine.Machine, changed func(), fatal func(error)) *FSM {
	return &FSM{
		Machine: m, changed: changed, fatal: fatal, now: time.Now, clock: Clock{from: time.Now()},
		facts: facts{Clients: map[raft.ServerID]string{}}, comparison: comparison{made: bell.New()},
	}
}

// Apply implements raft.FSM. An entry that is damaged, or unknown to this version, is the last one: a member that
// passed over it would have another state than the others.
func (f *FSM) Apply(entry *raft.Log) any {
	if err := f.failure(); err != nil {
		return err
	}
	if f.silence != nil {
		f.silence.applying.begin()
		defer f.silence.applying.end()
	}
	if !intact(entry) {
		return f.fail(fmt.Errorf("log entry %d: its checksum is another", entry.Index))
	}
	out, err := f.apply(entry)
	if err != nil {
		return f.fail(fmt.Errorf("log entry %d: %w", entry.Index, err))
	}
	f.index.Store(entry.Index)
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
// unless the command says that it may be passed over.
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
			f.silence.applying.begin() // what lasts is one command, not a long entry on a slow machine
		}
		out.Results[i], out.Notices[i] = f.Machine.Apply(batch.At, c)
		if out.Results[i].Code == machine.CodeUnknown && !c.Ignorable {
			return nil, fmt.Errorf("operation %d is not known to this version: %s", c.Op, out.Results[i].Detail)
		}
		if c.Op == machine.OpCheckpoint && out.Results[i].Code == machine.CodeOK {
			f.setClock()
		}
	}
	return out, nil
}

// setClock goes by the last checkpoint, also if it sets the clock back: what was timed by it is timed from there. It
// was made before it is known here, so the clock is slow rather than fast.
func (f *FSM) setClock() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clock = Clock{f.Machine.Clock(), f.now()}
}

// ClusterClock is the clock of the cluster, for a member that is about to lead.
func (f *FSM) ClusterClock() Clock {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.clock
}

// learn adds a fact. A leader tells a fact again if it does not know whether it landed (Term.tell), so every fact must
// be harmless the second time.
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
	if f.facts.Cluster == "" {
		f.facts.Cluster = x.Cluster
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
	if x.Opened {
		f.facts.ClosedFor = 0
	}
	return f.keepHome(f.facts.home())
}

// keepHome writes down of which cluster this member is. The caller holds f.mu.
func (f *FSM) keepHome(home string) error {
	if home == "" || home == f.kept {
		return nil
	}
	if f.kept != "" {
		return fmt.Errorf("the data directory is of cluster %q, its contents of cluster %q", f.kept, home)
	}
	if f.keep != nil {
		if err := f.keep(home); err != nil {
			return fmt.Errorf("writing down the name of the cluster: %w", err)
		}
	}
	f.kept = home
	return nil
}

// fail stops the replica: one that passes over an entry drifts apart from the others. It does not panic, since the
// program around may have better things to do than to end.
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

// home is what members call their cluster, empty before its first leader.
func (f *FSM) home() string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return cmp.Or(f.facts.home(), f.kept)
}

// Cluster is what clients call the cluster, the token space; empty before its first leader.
func (f *FSM) Cluster() string {
	name, _, _ := strings.Cut(f.home(), "/")
	return name
}

// History names the restore from which the cluster comes; empty if it comes from none.
func (f *FSM) History() string {
	_, restored, _ := strings.Cut(f.home(), "/")
	return restored
}

// ClosedFor is how long a leader has to wait before it serves.
func (f *FSM) ClosedFor() time.Duration {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.facts.ClosedFor
}

// Client is where clients find a member; empty if nowhere, or not known.
func (f *FSM) Client(id string) string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.facts.Clients[raft.ServerID(id)]
}

// knows reports whether it is known where clients find a member.
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

// Freeze returns the present state, which stays as it is while the log goes on.
func (f *FSM) Freeze() (*Frozen, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.broken != nil {
		return nil, f.broken
	}
	now := f.facts
	now.Clients, now.Approved = maps.Clone(now.Clients), maps.Clone(now.Approved)
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

// become takes the state of a snapshot over. Of which cluster it is comes first: the state of another one must not take
// the place of this.
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
	return nil
}

// readLine reads up to a line feed and nothing of what follows.
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
