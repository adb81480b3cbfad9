package replica

// The acknowledgements of the other members that this member knows. They show a member whose disk went back in time
// that it has forgotten entries: see starts.go.

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

// known has, for each other member, an index up to which its log goes: of committed entries that it has acknowledged.
// A leader that lacks other entries may delete them.
type known struct {
	path string // empty: not kept on disk

	mu      sync.Mutex
	runs    map[raft.ServerID]run // of the processes that this one knows; not kept
	index   map[raft.ServerID]uint64
	changed bool
}

// run is an index up to which the log of one process of a member goes.
type run struct {
	start string
	index uint64
}

// openKnown reads the file that was written last. It ignores a damaged file, as after a loss of power.
func openKnown(dir string) *known {
	k := &known{path: filepath.Join(dir, knownFile), index: map[raft.ServerID]uint64{}}
	if text, err := os.ReadFile(k.path); err == nil && json.Unmarshal(text, &k.index) != nil || k.index == nil {
		k.index = map[raft.ServerID]uint64{}
	}
	return k
}

// note records that the log of a member goes to index.
func (k *known) note(id raft.ServerID, index uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if index > k.index[id] {
		k.index[id], k.changed = index, true
	}
}

// noteRun records that the log of a process goes to index.
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

// write keeps the indexes of members, and drops all others. It makes no fsync: a file that is some seconds old has
// lower indexes, but no wrong ones.
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

// noteKnown updates the known indexes. A leader knows its followers' acknowledgements. A follower knows that the
// leader has all committed entries: it was elected with those of earlier terms, and has committed the others itself.
func (r *Replica) noteKnown() {
	k, commit := r.stores.known, r.raft.CommitIndex() // before the leader is asked for
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

// startOf returns the start of a member's process that this one speaks with; empty if unknown.
func (r *Replica) startOf(id raft.ServerID) string {
	if r.peers == nil {
		return ""
	}
	return r.peers.startOf(id)
}

// Knows returns the known end of another member's log.
func (r *Replica) Knows(id string) uint64 { return r.stores.known.of(raft.ServerID(id)) }
