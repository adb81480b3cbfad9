package embedded

import (
	"crypto/tls"
	"fmt"
	"io"
	"time"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// Limits bound the state of a server. A zero field has the default in docs/SERVER.md. The leader's limits apply to
// all members: give all of them the same.
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
	DeadlockSteps  int // names, holders and waiters that one search for a deadlock visits
	// ClientShare is the share of Sessions, Holds, Waits and of the connections that one client may have, in
	// hundredths; at most 100. Clients in this process have no such bound.
	ClientShare int
}

// RestoreOptions configure the restore of a backup, or of a disk. The zero value is right if the original cluster is
// gone.
type RestoreOptions struct {
	// NewCluster gives the cluster a new token space, for a copy beside the original. Guards that know the old one
	// refuse it.
	NewCluster bool
	// ClosedFor is the time for which the server refuses clients at first. 0: the longest TTL that the old cluster
	// granted, or 24 hours if unknown. Negative: no time. A client that held a lock at the end relies on it for its
	// TTL.
	ClosedFor time.Duration
	// Members are addresses of members of the old cluster, which are asked first, beside those in the log. TLS and
	// JoinKey are those of Cluster. If a member answers, that is an error, unless Supersede is set: it stops when it
	// hears of the new cluster.
	Members   []string
	TLS       *tls.Config
	JoinKey   []byte
	Supersede bool
}

// replica converts o for the server.
func (o *RestoreOptions) replica() replica.RestoreOptions {
	return replica.RestoreOptions{
		NewCluster: o.NewCluster, ClosedFor: o.ClosedFor,
		Members: o.Members, TLS: o.TLS, JoinKey: o.JoinKey, Supersede: o.Supersede,
	}
}

// Restored is the result of Restore and Recover.
type Restored struct {
	// TokenSpace of the new cluster. All its tokens are greater than After, and than all tokens of the old one.
	TokenSpace string
	After      uint64
	// At is when the backup was made, or the disk last written, by the clock of that machine.
	At time.Time
	// ClosedFor is the time for which the server will refuse clients after its start.
	ClosedFor time.Duration
	// Generation of the new cluster, which its grants carry.
	Generation fencing.Generation
}

// Restore makes dir, which must be empty or not exist, the data directory of a new cluster with one member that has
// the state of the backup: see docs/SERVER.md. Every server of the old cluster must be stopped for good before Start
// starts it, unless NewCluster is set. ErrNoBackup is in the chain of the error if the backup is cut off or damaged.
func Restore(dir string, backup io.Reader, o RestoreOptions) (Restored, error) {
	return restored(replica.Restore(dir, backup, o.replica()))
}

// Recover is for a cluster that has lost most of its members. It makes dir, the data directory of a surviving member,
// the data directory of a new cluster with one member, which has all the state on this disk: see docs/SERVER.md. The
// old directory is kept, with ".lost" after its name. No server of the old cluster may run, now or later.
func Recover(dir string, o RestoreOptions) (Restored, error) {
	return restored(replica.Recover(dir, o.replica()))
}

// ErrNoBackup is in the chain of errors about a file that is not a backup, or is cut off or damaged.
var ErrNoBackup = replica.ErrNoBackup

func restored(r replica.Restored, err error) (Restored, error) {
	if err != nil {
		return Restored{}, fmt.Errorf("embedded: %w", err)
	}
	return Restored{
		TokenSpace: r.Cluster, After: r.Revision, At: r.BackedUp, ClosedFor: r.ClosedFor,
		Generation: r.Generation,
	}, nil
}
