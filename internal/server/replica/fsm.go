package replica

// The effect of log entries: commands for the lock state machine, and facts about the cluster itself. All members apply
// the same entries, so the state must not depend on the member: not on its clock, its settings, or the time at which an
// entry arrives.

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

// fact is an entry about the cluster and its members.
type fact struct {
	// Cluster is the name of the cluster, if the cluster has no name yet.
	Cluster string `json:"cluster,omitempty"`
	// Member is a member, and Client its address for clients.
	Member raft.ServerID `json:"member,omitempty"`
	Client string        `json:"client,omitempty"`
	// Approved is a member that may have a vote, because an operator approved it or because it has the key.
	Approved raft.ServerID `json:"approved,omitempty"`
	// Mark makes every member compute the hash of its state. Hash is the leader's hash at an earlier mark.
	Mark bool       `json:"mark,omitempty"`
	Hash *stateHash `json:"hash,omitempty"`
	// Opened ends the time after a restore in which the cluster does not serve clients.
	Opened bool `json:"opened,omitempty"`
	// MaxTTL replaces permitted.MaxTTL. DefaultMaxTTL replaces permitted.DefaultMaxTTL, only together with Cluster.
	MaxTTL        time.Duration `json:"maxTTL,omitempty"`
	DefaultMaxTTL time.Duration `json:"defaultMaxTTL,omitempty"`
	// Started is a member, and Start the start of it that counts from now on, if it is later than the recorded start.
	Started raft.ServerID `json:"started,omitempty"`
	Start   string        `json:"start,omitempty"`
	// Leader is the start of the leader that proposes the fact; empty in facts of earlier versions.
	Leader string `json:"leader,omitempty"`
}

// facts is the result of all facts.
type facts struct {
	// Cluster is the token space. It survives a restore.
	Cluster string                   `json:"cluster"`
	Clients map[raft.ServerID]string `json:"clients"`
	// Approved members have a vote, or get a vote when they have caught up. The founders of the cluster are not included.
	Approved map[raft.ServerID]bool `json:"approved,omitempty"`
	// Starts has the start that counts for each member: see processes.go.
	Starts map[raft.ServerID]string `json:"starts,omitempty"`
	// Led is the leader of the last term with a fact that names its leader.
	Led ledTerm `json:"led,omitzero"`
	// Restored is the generation of the cluster: see generation.Of. It is empty if the cluster was never restored. Members
	// from before the restore belong to another cluster, although it has the same name.
	Restored string `json:"restored,omitempty"`
	// Former are the addresses of the members before the restore.
	Former []string `json:"former,omitempty"`
	// ClosedFor is the time for which a leader must not serve clients after a restore, until a fact has Opened. UsedTTL is
	// the longest TTL in use in the data that the cluster was restored from.
	ClosedFor time.Duration `json:"closedFor,omitempty"`
	UsedTTL   time.Duration `json:"usedTTL,omitempty"`
	permitted
}

// ledTerm is a term, and the start of the process that led in it.
type ledTerm struct {
	Term  uint64 `json:"term"`
	Start string `json:"start"`
}

// home returns the name of the cluster among its members: the token space and, after a restore, the generation.
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
	Stale   bool // the entry had no effect: it was decided in another term
	Results []machine.Result
	Notices [][]machine.Notice // one list for each command
	Events  []machine.Event    // of all commands; nil unless the machine records events
}

// FSM applies the log to the lock state machine.
type FSM struct {
	Machine *machine.Machine
	fatal   func(error) // called once, when this replica cannot continue
	changed func()      // called after each entry; must not block

	now func() time.Time // a clock for elapsed time

	silence *silence // observes the duration of commands. May be nil.

	// keep stores home in the data directory. Nil: no data directory.
	keep func(home string) error

	comparison comparison // with the leader's state

	raised notify.Signal // notified when the feature level has changed

	replaced func(id raft.ServerID, start string) // called when the start of a member has changed; must not block

	commits *commitMark // raised by applied entries; nil: no mark

	index atomic.Uint64 // the last entry applied since the start; zero: none

	mu     sync.RWMutex // protects the following fields
	clock  Clock        // set by the last checkpoint
	facts  facts
	kept   string // the stored home; a starting member knows it before it applies its log
	broken error
}

// NewFSM returns an FSM for a machine that has not applied any entries. changed is called after each entry and must not
// block. fatal is called once, when this replica cannot continue.
func NewFSM(m *machine.Machine, changed func(), fatal func(error)) *FSM {
	return &FSM{
		Machine: m, changed: changed, fatal: fatal, now: time.Now, clock: Clock{from: time.Now()},
		facts: facts{Clients: map[raft.ServerID]string{}}, comparison: comparison{made: notify.New()}, raised: notify.New(),
		replaced: func(raft.ServerID, string) {},
	}
}

// Apply implements raft.FSM. It stops the replica at an entry that is damaged, or that this version does not know: a
// member that skipped the entry would have another state than the others.
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
		return &Applied{}, f.learn(entry, body)
	}
	return f.applyBatch(body)
}

// applyBatch applies the commands of one entry. An operation that this version does not know stops the member, unless
// the command is Ignorable.
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
			f.silence.applying.begin() // the limit is for one command, not for a long entry on a slow machine
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

// setClock sets the clock to the last checkpoint, even if that sets the clock back: the deadlines in the log are
// relative to checkpoints. A member applies a checkpoint after the leader made it, so the clock may be slow but not
// fast.
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

// learn applies a fact. A leader retries a fact with an unknown outcome (Term.tell), so facts must be idempotent.
func (f *FSM) learn(entry *raft.Log, body []byte) error {
	var x fact
	if err := json.Unmarshal(body, &x); err != nil {
		return err
	}
	if err := f.leads(ledTerm{entry.Term, x.Leader}); err != nil {
		return err
	}
	if x.Mark { // before f.mu is locked, since Freeze locks it too
		f.comparison.mark(entry.Index, f.Freeze)
	}
	if x.Hash != nil {
		f.comparison.told(*x.Hash)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.facts.Cluster == "":
		f.facts.Cluster, f.facts.permitted = x.Cluster, permitted{x.MaxTTL, x.DefaultMaxTTL}
	case x.Cluster == "" && x.MaxTTL != 0: // otherwise the leader did not know the name yet
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

// leads records the leader of a term. It returns an error if another process led in that term: raft compares only terms
// and indexes, and takes the entries of the two leaders for the same.
func (f *FSM) leads(x ledTerm) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if before := f.facts.Led; before.Term == x.Term && before.Start != x.Start && before.Start != "" && x.Start != "" {
		return fmt.Errorf("term %d has two leaders, start %s in the entries before and start %s here: %s",
			x.Term, before.Start, x.Start, adviceOnHistories)
	}
	if x.Start != "" {
		f.facts.Led = x
	}
	return nil
}

// keepHome stores the cluster of this member, or returns an error if the stored cluster is another one. The caller
// holds f.mu.
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

// fail stops the replica: a replica that skips an entry would diverge from the others. It does not panic, since the
// program may have other work to do.
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

// home returns the name of the cluster among its members; empty before its first leader.
func (f *FSM) home() string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return cmp.Or(f.facts.home(), f.kept)
}

// Cluster returns the name of the cluster for clients, the token space; empty before its first leader.
func (f *FSM) Cluster() string {
	name, _, _ := strings.Cut(f.home(), "/")
	return name
}

// History returns the restore that the cluster comes from, or "". See generation.Of.
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

// Closed returns the time that a leader must wait before it serves clients, and the longest TTL in use in the restored
// data.
func (f *FSM) Closed() (wait, used time.Duration) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.facts.ClosedFor, f.facts.UsedTTL
}

// Client returns the address of a member for clients; empty if the member has no such address, or if it is unknown.
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

// Started returns the start that counts for a member; empty without a record.
func (f *FSM) Started(id raft.ServerID) string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.facts.Starts[id]
}

// StoreConfiguration implements raft.ConfigurationStore. It only records the index.
func (f *FSM) StoreConfiguration(index uint64, _ raft.Configuration) { f.index.Store(index) }

// Snapshot implements raft.FSM.
func (f *FSM) Snapshot() (raft.FSMSnapshot, error) {
	frozen, err := f.Freeze()
	if err != nil {
		return nil, err
	}
	return frozen, nil
}

// Freeze returns a copy of the current state, which later entries do not change.
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

// Frozen is a snapshot: the facts as one line of JSON, then the state in the machine's own format.
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
	f.index.Store(0) // use the index of the snapshot; see Applied
	f.changed()
	return nil
}

// become replaces the state with the state of a snapshot. It first checks the cluster, so that the state of another
// cluster never replaces this one.
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

// readLine reads up to a line feed, and no further.
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
