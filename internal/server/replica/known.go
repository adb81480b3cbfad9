package replica

// The acknowledgements of the other members that this member knows. With them, a member whose disk went back in time
// can detect that it has forgotten entries: see starts.go.

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/hashicorp/raft"
)

const knownFile = "known"

// known has, for each other member, an index that its log is known to reach. Only committed entries count, since a
// later leader may delete others.
type known struct {
	path string // empty: not stored on disk

	mu      sync.Mutex
	runs    map[raft.ServerID]run // of processes that this one knows; not stored
	index   map[raft.ServerID]uint64
	changed bool
}

// run is the known end of the log of one process of a member.
type run struct {
	start string
	index uint64
}

// openKnown reads the file. It ignores a missing or damaged file: a loss of power may damage it.
func openKnown(dir string) *known {
	k := &known{path: filepath.Join(dir, knownFile), index: map[raft.ServerID]uint64{}}
	if text, err := os.ReadFile(k.path); err == nil && json.Unmarshal(text, &k.index) != nil || k.index == nil {
		k.index = map[raft.ServerID]uint64{}
	}
	return k
}

// note records that the log of a member reaches index.
func (k *known) note(id raft.ServerID, index uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if index > k.index[id] {
		k.index[id], k.changed = index, true
	}
}

// noteRun records that the log of a process reaches an index. A process with another start replaces the recorded
// process.
func (k *known) noteRun(id raft.ServerID, x run) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if old := k.runs[id]; x.start != "" && (x.start != old.start || x.index > old.index) {
		if k.runs == nil {
			k.runs = map[raft.ServerID]run{}
		}
		k.runs[id] = x
	}
}

// runOf returns the last known process of a member.
func (k *known) runOf(id raft.ServerID) run {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.runs[id]
}

// of returns the known end of a member's log; zero if unknown.
func (k *known) of(id raft.ServerID) uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.index[id]
}

// write stores the indexes of members, and drops all others. It makes no fsync: an older file has lower indexes, but
// they are still correct.
func (k *known) write(members []raft.Server) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.index, func(id raft.ServerID, _ uint64) bool {
		return !slices.ContainsFunc(members, func(m raft.Server) bool { return m.ID == id })
	})
	if k.path == "" || !k.changed {
		return nil
	}
	text, err := json.Marshal(k.index)
	if err == nil {
		err = os.WriteFile(k.path+".new", append(text, '\n'), 0o600)
	}
	if err == nil {
		err = os.Rename(k.path+".new", k.path)
	}
	k.changed = err != nil
	return err
}

// noteKnown updates the known indexes. A leader knows the acknowledgements of its followers. A follower knows that the
// leader has all committed entries: those of earlier terms when it was elected, and those of its term because it wrote
// them.
func (r *Replica) noteKnown() {
	k, commit := r.stores.known, r.raft.CommitIndex() // before the check for the leader
	if term, leads := r.LeadingTerm(); leads {
		for id, index := range r.proof.indexes(term) {
			k.note(id, min(index, commit))
			k.noteRun(id, run{r.startOf(id), min(index, commit)})
		}
		return
	}
	if _, id := r.raft.LeaderWithID(); id != "" && id != r.id {
		k.note(id, commit)
		k.noteRun(id, run{r.startOf(id), commit})
	}
}

// startOf returns the start of the process of a member that has connections with this process; empty if unknown.
func (r *Replica) startOf(id raft.ServerID) string {
	if r.peers == nil {
		return ""
	}
	return r.peers.startOf(id)
}

// Knows returns the known end of another member's log.
func (r *Replica) Knows(id string) uint64 { return r.stores.known.of(raft.ServerID(id)) }
