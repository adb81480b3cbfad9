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
	// ClosedFor is the time for which the server refuses clients after its first start, because a client that held a lock
	// when the old cluster ended may rely on it for its TTL. 0: the longest TTL that the old cluster permitted, or 24
	// hours if that is unknown. Negative: no time.
	ClosedFor time.Duration
	// Members are addresses of members of the old cluster, besides those in the log. The restore first asks all of them.
	// TLS and JoinKey are those of Cluster. If a member answers, the restore fails, unless Supersede is set: that member
	// stops when the new cluster contacts it.
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
	// TokenSpace is that of the new cluster, whose tokens are all greater than After and than all tokens of the old
	// cluster.
	TokenSpace string
	After      uint64
	// At is the time at which the backup was made or the disk was last written, by the clock of that machine.
	At time.Time
	// ClosedFor is the time for which the server will refuse clients after its start.
	ClosedFor time.Duration
	// Generation is that of the new cluster, and is part of its grants.
	Generation fencing.Generation
}

// Restore makes dir, which must be empty or not exist, the data directory of a new cluster with one member that has
// the state of the backup: see docs/SERVER.md. Unless NewCluster is set, stop every server of the old cluster
// permanently before Start. The error wraps ErrNoBackup if the backup is cut off or damaged.
func Restore(dir string, backup io.Reader, o RestoreOptions) (Restored, error) {
	return restored(replica.Restore(dir, backup, o.replica()))
}

// Recover is for a cluster that has lost most of its members. It makes dir, the data directory of a surviving member,
// the data directory of a new cluster with one member, which has all the state on this disk: see docs/SERVER.md. The
// old directory is kept, with ".lost" after its name. No server of the old cluster may run, now or later.
func Recover(dir string, o RestoreOptions) (Restored, error) {
	return restored(replica.Recover(dir, o.replica()))
}

// ErrNoBackup: the file is not a backup, or is cut off or damaged.
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
