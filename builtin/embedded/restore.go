package embedded

import (
	"fmt"
	"io"
	"time"

	"github.com/fencelock/fencelock/internal/server/replica"
)

// Limits bound what a server takes on. A field that is zero has the default that docs/SERVER.md says. The members of a
// cluster agree on those of the one that leads: give all of them the same.
type Limits struct {
	Sessions       int // open at a time
	Holds          int // of all sessions together
	Waits          int // of all sessions together
	WaitersPerName int // in one queue
	Unacked        int // answers that one session has not acknowledged
	Requests       int // names in one acquire
	NameBytes      int // of a name; at most 512
	Levels         int // of a hierarchical name
	MetadataBytes  int // of one request, keys and values together
	DeadlockSteps  int // names, holders and waiters that one search for a deadlock looks at
	// ClientShare is how many hundredths of Sessions, Holds, Waits and of the connections one client may have; at most
	// 100. Clients in this process have no such bound.
	ClientShare int
}

// RestoreOptions say what to make of a backup, or of a disk. The zero value is right where the cluster that it is of is
// gone.
type RestoreOptions struct {
	// NewCluster gives the cluster a token space of its own, for a copy beside the original. Guards that know the old
	// one refuse it.
	NewCluster bool
	// ClosedFor is how long the server serves nobody at first. 0: the longest TTL that the old cluster granted, 24
	// hours where that is not known. Negative: not at all. Who held a lock at the end believes so for as long as its
	// TTL.
	ClosedFor time.Duration
}

// Restored is what came of it.
type Restored struct {
	// TokenSpace of the new cluster. All its tokens are greater than After, and than all that the old one issued.
	TokenSpace string
	After      uint64
	// At is when the backup was made, or the disk last written, by the clock of that machine.
	At time.Time
	// ClosedFor is how long the server will serve nobody when it is started.
	ClosedFor time.Duration
}

// Restore makes dir, which must be empty or not exist, the data directory of a new cluster with one member that has
// what is in the backup: see docs/SERVER.md. Every server of the old cluster must be stopped for good before Start
// starts it, unless NewCluster is set. ErrNoBackup is in the chain of the error if the backup is cut off or damaged.
func Restore(dir string, backup io.Reader, o RestoreOptions) (Restored, error) {
	return restored(replica.Restore(dir, backup, replica.RestoreOptions{
		NewCluster: o.NewCluster, ClosedFor: o.ClosedFor,
	}))
}

// Recover is for a cluster that has lost most of its members. It makes dir, the data directory of one that is left, the
// data directory of a new cluster with one member, which has all that is on this disk: see docs/SERVER.md. The old
// directory is kept, with ".lost" after its name. No server of the old cluster may run, now or later.
func Recover(dir string, o RestoreOptions) (Restored, error) {
	return restored(replica.Recover(dir, replica.RestoreOptions{NewCluster: o.NewCluster, ClosedFor: o.ClosedFor}))
}

// ErrNoBackup is in the chain of errors about a file that is no backup, or is cut off or damaged.
var ErrNoBackup = replica.ErrNoBackup

func restored(r replica.Restored, err error) (Restored, error) {
	if err != nil {
		return Restored{}, fmt.Errorf("embedded: %w", err)
	}
	return Restored{TokenSpace: r.Cluster, After: r.Revision, At: r.BackedUp, ClosedFor: r.ClosedFor}, nil
}
