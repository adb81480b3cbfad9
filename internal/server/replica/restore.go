package replica

// Creation of the data directory of a new cluster with one member, from a backup (backup.go) or from a surviving disk
// (recover.go).

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/serverfault"
)

// RestoreOptions configure the restore of a backup. The zero value is right if the original cluster no longer exists.
type RestoreOptions struct {
	// Store is the kind of log, as in Config.
	Store Store
	// NewCluster gives the cluster a new name, so that guards and clients that know the old name refuse it. It is for a
	// copy that runs beside the original cluster: the tokens of the two cannot be compared.
	NewCluster bool
	// ClosedFor is the time for which the cluster does not serve clients at first. 0: the greatest TTL that the old
	// cluster permitted, which is in the backup; 24 h if an earlier version made the backup. Negative: no time. A client
	// that held a lock when the cluster was lost relies on it for its TTL, and may have acquired it after the backup was
	// made. So a shorter time is safe if the TTLs in use were shorter, or if the old cluster has already been down for
	// some time.
	ClosedFor time.Duration
	// Members are addresses of members of the old cluster, in addition to those that Recover finds in the log. Restore and
	// Recover first ask these members: see Supersede. The new server asks them too, while it runs. TLS and JoinKey are as
	// in Config.
	Members []string
	TLS     *tls.Config
	JoinKey []byte
	// Supersede creates the new generation even if a server of the cluster answers. Without Supersede or NewCluster, that
	// is a *RivalError. The number of the new generation is 1 + the greatest number in the answers and the data: the other
	// servers stop when they find the new generation.
	Supersede bool
}

// Restored is the result of a restore.
type Restored struct {
	// Cluster is the token space of the new cluster.
	Cluster string
	// BackedUp is the time of the backup, by the clock of the server that made it.
	BackedUp time.Time
	// Revision is the greatest revision before the first new token: all future tokens are greater, and no earlier token
	// is.
	Revision uint64
	// ClosedFor is the time for which the server will not serve clients after its start.
	ClosedFor time.Duration
	// UsedTTL is the longest TTL of a session in the backup. It is only advice for RestoreOptions.ClosedFor, since a
	// longer TTL may have been in use after the backup.
	UsedTTL time.Duration
	// Generation is the generation of the new cluster.
	Generation fencing.Generation
}

// tokensPerMilli is more than the number of tokens that the bundled server issues in a millisecond. A restore increases
// the revision by this number for each millisecond since the backup, in addition to the state machine's own increase.
// So tokens increase even if the same backup is restored a second time, or if it is very old.
const tokensPerMilli = 1 << 10

// Restore creates the data directory of a new cluster with one member that has the state of the backup. dir must be
// empty or must not exist. Further members join as in any other cluster, with empty directories. Unless the cluster
// gets a new name, it must not start before all members of the backup's cluster have stopped permanently. If one of
// Members answers, the error is a *RivalError, unless Supersede or NewCluster is set.
//
// Tokens continue far above all issued tokens, even those issued after the backup was made. Every session ends, with
// its holds and waits; the minimum times of holds continue. Earlier events are lost.
//
// A truncated or damaged backup is an error. After an error, dir does not exist, or it is unusable and has to be
// emptied.
func Restore(dir string, backup io.Reader, o RestoreOptions) (Restored, error) {
	r, err := restore(dir, backup, o)
	if err != nil {
		return Restored{}, fmt.Errorf("replica.Restore: %w", err)
	}
	return r, nil
}

func restore(dir string, backup io.Reader, o RestoreOptions) (Restored, error) {
	if o.Store == "" {
		o.Store = StoreWAL
	}
	if o.Store != StoreWAL && o.Store != StoreBolt {
		return Restored{}, &ConfigError{"Store", string(o.Store), "want wal or bolt"}
	}
	a, snapshot, err := readBackup(backup)
	if err != nil {
		return Restored{}, err
	}
	return remake(dir, a, snapshot, o)
}

// remake creates the data directory of a new cluster with one member and the state in snapshot, which a describes.
func remake(dir string, a BackupInfo, snapshot []byte, o RestoreOptions) (Restored, error) {
	m := machine.New(1)
	since := uint64(max(0, time.Since(a.At).Milliseconds()))
	used, err := m.RestoreBackup(bytes.NewReader(snapshot), since*tokensPerMilli)
	if err != nil {
		return Restored{}, err
	}
	f := &Frozen{facts{Cluster: a.Cluster, Clients: map[raft.ServerID]string{}}, m.Freeze()}
	if o.NewCluster {
		f.facts.Cluster = newClusterID()
	}
	next := fencing.Generation{ID: fencing.NewNonce()}
	if next.Number, err = rivals(a, &o); err != nil {
		return Restored{}, err
	}
	f.facts.Restored, f.facts.Former = next.String(), o.Members
	f.facts.UsedTTL, f.facts.DefaultMaxTTL, f.facts.MaxTTL = used, a.DefaultMaxTTL, max(used, a.max())
	switch {
	case o.ClosedFor == 0:
		f.facts.ClosedFor = f.facts.MaxTTL
	case o.ClosedFor > 0:
		f.facts.ClosedFor = o.ClosedFor
	}
	if err := writeDataDir(dir, o.Store, f); err != nil {
		return Restored{}, err
	}
	return Restored{
		Cluster: f.facts.Cluster, BackedUp: a.At, Revision: m.Revision(), ClosedFor: f.facts.ClosedFor, UsedTTL: used,
		Generation: next,
	}, nil
}

// unfinished is the name of the file that marks a data directory during a restore.
const unfinished = "restoring"

// checkFinished returns an error for a data directory with an interrupted restore: a server would begin without the
// earlier tokens.
func checkFinished(dir string) error {
	_, err := os.Stat(filepath.Join(dir, unfinished))
	switch {
	case err == nil:
		return fmt.Errorf(
			"data directory %s: a backup was being restored and that was broken off: empty it, and restore again", dir)
	case errors.Is(err, os.ErrNotExist):
		return nil
	}
	return err
}

// writeDataDir creates the data directory of a single member, with the state f as its first snapshot. The file
// unfinished exists until all files that a server needs are there, so that no server starts with a part of them.
func writeDataDir(dir string, kind Store, f *Frozen) (err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(entries) > 0 {
		return fmt.Errorf("data directory %s is not empty: %s is there", dir, entries[0].Name())
	}
	lock, err := lockDir(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	mark := filepath.Join(dir, unfinished)
	if err := writeFile(mark, []byte("see fencelock help restore\n")); err != nil {
		return err
	}
	id, err := nodeID(dir)
	if err != nil {
		return err
	}
	if err := (clusterFile{path: filepath.Join(dir, clusterIDFile)}).write(f.facts.home()); err != nil {
		return err
	}
	if err := firstTerm(kind, dir); err != nil {
		return err
	}
	if err := firstSnapshot(dir, id, f); err != nil {
		return err
	}
	if err := os.Remove(mark); err != nil {
		return err
	}
	return syncDir(dir)
}

// firstTerm creates an empty log, and records the term of the snapshot in it.
func firstTerm(kind Store, dir string) error {
	log, err := openLog(kind, dir, newRaftLog(slog.New(slog.DiscardHandler)), &serverfault.Rig{}, &disk{fatal: func(error) {}})
	if err != nil {
		return err
	}
	return errors.Join(log.SetUint64([]byte(currentTerm), 1), log.Close())
}

// firstSnapshot writes the first snapshot of a cluster with one member. The member records its address when it starts.
func firstSnapshot(dir string, id raft.ServerID, f *Frozen) error {
	store, err := openSnapshots(dir, newRaftLog(slog.New(slog.DiscardHandler)))
	if err != nil {
		return err
	}
	address, t := raft.NewInmemTransport("local")
	defer t.Close() //nolint:errcheck // it is in memory
	alone := raft.Configuration{Servers: []raft.Server{{ID: id, Address: address}}}
	sink, err := store.Create(raft.SnapshotVersionMax, 1, 1, alone, 1, t)
	if err != nil {
		return err
	}
	return f.Persist(sink)
}
