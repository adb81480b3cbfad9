package replica

// The data directory of a new cluster with one member, made of a backup (backup.go) or of what is left on a disk
// (recover.go).

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/rig"
)

// DefaultMaxTTL is the longest TTL of a session that a server grants where it is not told another.
const DefaultMaxTTL = 24 * time.Hour

// RestoreOptions say what to make of a backup. The zero value is right where the cluster of which it was made is gone.
type RestoreOptions struct {
	// Store is the kind of log, as in Config.
	Store Store
	// NewCluster gives the cluster a new name, so that guards and clients that know the old one refuse it. It is for a
	// copy beside the cluster that was copied, which would issue tokens that mean nothing to the other.
	NewCluster bool
	// ClosedFor is how long the cluster serves nobody at first. 0: the longest TTL that the old cluster granted, which
	// is in the backup; DefaultMaxTTL if it is not. Negative: not at all. Who held a lock when the cluster was lost
	// believes so for as long as its TTL, and may have taken it after the backup was made. So less is right where the
	// TTLs in use were shorter, or where the old cluster has been down for a while.
	ClosedFor time.Duration
}

// Restored is what came of a backup.
type Restored struct {
	// Cluster is the token space of the new cluster.
	Cluster string
	// BackedUp is when the backup was made, by the clock of the server that made it.
	BackedUp time.Time
	// Every token to come is above Revision, and no earlier one is.
	Revision uint64
	// ClosedFor is how long the server will serve nobody when it is started.
	ClosedFor time.Duration
}

// tokensPerMilli is more than the bundled server issues in a millisecond. The revision is set ahead by that much for
// the time since the backup was made, besides what the state machine adds: so tokens increase also over a second
// restore of one backup, and where it is very old.
const tokensPerMilli = 1 << 10

// Restore makes dir, which must be empty or not exist, the data directory of a new cluster with one member that has
// what is in the backup. Start starts it; other members are taken in as into any other cluster, and begin with empty
// directories. It must not be started before every member of the cluster of which the backup was made is stopped for
// good, unless it is given another name.
//
// Tokens go on far above all that were issued before, also after the backup was made. Every session is ended and so is
// what hung on it; the minimum times of holds go on. Events from before are gone.
//
// A backup that is cut off or damaged is an error; dir is then not made, or cannot be started and has to be emptied.
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

// remake makes dir the data directory of a new cluster with one member and the state in snapshot, of which a is told.
func remake(dir string, a BackupInfo, snapshot []byte, o RestoreOptions) (Restored, error) {
	m := machine.New(1)
	since := uint64(max(0, time.Since(a.At).Milliseconds()))
	longest, err := m.RestoreBackup(bytes.NewReader(snapshot), since*tokensPerMilli)
	if err != nil {
		return Restored{}, err
	}
	f := &Frozen{facts{Cluster: a.Cluster, Clients: map[raft.ServerID]string{}}, m.Freeze()}
	if o.NewCluster {
		f.facts.Cluster = newClusterID()
	}
	f.facts.Restored = newClusterID()
	switch {
	case o.ClosedFor == 0:
		f.facts.ClosedFor = max(longest, cmp.Or(a.MaxTTL, DefaultMaxTTL))
	case o.ClosedFor > 0:
		f.facts.ClosedFor = o.ClosedFor
	}
	if err := writeDataDir(dir, o.Store, f); err != nil {
		return Restored{}, err
	}
	return Restored{
		Cluster: f.facts.Cluster, BackedUp: a.At, Revision: m.Revision(), ClosedFor: f.facts.ClosedFor,
	}, nil
}

// unfinished is the name of a file that is in a data directory while a backup is restored into it.
const unfinished = "restoring"

// checkFinished refuses a data directory in which a restore was broken off: it would begin with no tokens.
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

// writeDataDir makes dir the data directory of a member that is alone, with the state f as its first snapshot. The file
// unfinished is there before anything that a server needs and until all of it is, so that no server starts with a part.
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

// firstTerm makes the log, which is empty, and says that its term has begun in which the snapshot was made.
func firstTerm(kind Store, dir string) error {
	log, err := openLog(kind, dir, newRaftLog(slog.New(slog.DiscardHandler)), &rig.Rig{}, &disk{fatal: func(error) {}})
	if err != nil {
		return err
	}
	return errors.Join(log.SetUint64([]byte(currentTerm), 1), log.Close())
}

// firstSnapshot stands for the first log entry of a cluster with one member. Where that is reached it finds out when it
// starts.
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
