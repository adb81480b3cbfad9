// Package serverfault lets the tests of this module come between a server and its foundations: its disk, its clock, and the
// size of its log. It is internal: no program uses it by mistake.
package serverfault

import (
	"time"

	"github.com/hashicorp/raft"
	"github.com/hashicorp/raft-wal/types"
)

// Rig replaces parts of a server. Zero fields have no effect.
type Rig struct {
	// Files comes between the log and the file system, Log between raft and the log, Stable between raft and its store
	// of terms and votes.
	Files  func(types.VFS) types.VFS
	Log    func(raft.LogStore) raft.LogStore
	Stable func(raft.StableStore) raft.StableStore
	// SegmentBytes is the size of the log's files, which are allocated in full.
	SegmentBytes int

	// Now replaces time.Now.
	Now func() time.Time

	// SnapshotEntries is the number of log entries before a snapshot, TrailingEntries the number kept after it, and
	// SnapshotInterval how often a member looks.
	SnapshotEntries, TrailingEntries uint64
	SnapshotInterval                 time.Duration

	// Start is the process of a member that continues here, as one does in a virtual machine reverted to a
	// snapshot: nobody is asked whether it may start. Empty: a new one.
	Start string

	// Level is the feature level that a member reports, such as that of an earlier version. 0: its highest.
	Level uint32
}
