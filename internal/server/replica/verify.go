package replica

// Verification of the data of a stopped server: the checks of a starting server, and a replay of the log in memory.

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/serverfault"
)

// Verified is the result of Verify.
type Verified struct {
	// Node is the id of the member, and Cluster the token space; Cluster is empty if the member was never in a cluster.
	Node, Cluster string
	// First and Last are the first and the last entry of the log; zero if it is empty. Snapshot is the last entry in the
	// newest snapshot; zero without a snapshot.
	First, Last, Snapshot uint64
	// Unsummed is the number of entries without checksums, from older versions. They are checked only by applying them.
	Unsummed int
	// Revision is at least the revision of the last token, after all entries.
	Revision uint64
}

// Verify reads the whole data directory of a stopped server, and applies its log in memory. The error wraps a
// *CorruptError if the directory has damage with which a server would not start, or at which its state machine would
// stop. Verify does not change the data, except that it completes interrupted steps of a killed server, as the start of
// a server does.
func Verify(dir string) (Verified, error) {
	v, err := verify(dir, &serverfault.Rig{})
	if err != nil {
		return v, fmt.Errorf("replica.Verify: %w", err)
	}
	return v, nil
}

func verify(dir string, rig *serverfault.Rig) (v Verified, err error) {
	kind, err := kindOf(dir)
	if err != nil {
		return v, err
	}
	s, err := openStores(kind, dir, newRaftLog(slog.New(slog.DiscardHandler)), rig, func(error) {})
	if err != nil {
		return v, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	f := NewFSM(newMachine(), func() {}, func(error) {})
	v, err = s.replay(f)
	v.Node, v.Cluster, v.Revision = string(s.nodeID), f.Cluster(), f.Machine.Revision()
	return v, err
}

// kindOf returns the kind of the log in a data directory.
func kindOf(dir string) (Store, error) {
	kind := StoreWAL
	if _, err := os.Stat(filepath.Join(dir, string(StoreBolt))); err == nil {
		kind = StoreBolt
	}
	if _, err := os.Stat(filepath.Join(dir, string(kind))); err != nil {
		return kind, fmt.Errorf("%s is no data directory: %w", dir, err)
	}
	return kind, nil
}

// replay restores the newest snapshot into f, and applies all later entries of the log. It also reads the earlier
// entries.
func (s *stores) replay(f *FSM) (v Verified, err error) {
	all, err := s.snapshots.List()
	if err != nil {
		return v, err
	}
	if len(all) > 0 {
		_, state, err := s.snapshots.Open(all[0].ID)
		if err != nil {
			return v, err
		}
		if err := f.Restore(state); err != nil {
			return v, &CorruptError{File: all[0].ID, Why: err.Error()}
		}
		v.Snapshot = all[0].Index
	}
	if v.First, err = s.checked.FirstIndex(); err != nil {
		return v, err
	}
	if v.Last, err = s.checked.LastIndex(); err != nil {
		return v, err
	}
	for i := max(v.First, 1); i <= v.Last; i++ {
		var entry raft.Log
		if err := s.checked.read(i, &entry); err != nil {
			return v, err
		}
		if len(entry.Extensions) == 0 {
			v.Unsummed++
		}
		if i <= v.Snapshot || entry.Type != raft.LogCommand {
			continue
		}
		if err, failed := f.Apply(&entry).(error); failed {
			return v, &CorruptError{File: s.checked.file(i), Index: i, Why: err.Error()}
		}
	}
	return v, nil
}
