// Package rig lets the tests of this module come between a server and what it stands on: its disk, its clock, and how
// much log it keeps. It is internal: no program gets at it by mistake.
package rig

import (
	"time"

	"github.com/hashicorp/raft"
	"github.com/hashicorp/raft-wal/types"
)

// Rig is what a server uses instead of the usual. Fields that are zero change nothing.
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

	// SnapshotEntries is how many log entries gather before a snapshot, TrailingEntries how many stay after it, and
	// SnapshotInterval how often a member looks.
	SnapshotEntries, TrailingEntries uint64
	SnapshotInterval                 time.Duration
}
