package replica

// The data directory of a new cluster with one member, made of a backup (backup.go) or of a surviving disk
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

// RestoreOptions configure the restore of a backup. The zero value is right if the original cluster is gone.
type RestoreOptions struct {
	// Store is the kind of log, as in Config.
	Store Store
	// NewCluster gives the cluster a new name, so that guards and clients that know the old one refuse it. It is for a
	// copy beside the original cluster, whose tokens would not be comparable.
	NewCluster bool
	// ClosedFor is the time for which the cluster serves nobody at first. 0: the greatest TTL that the old cluster
	// permitted, which is in the backup; 24 h if an earlier version made it. Negative: no time. A client that held a
	// lock when the cluster was lost relies on it for its TTL, and may have acquired it after the backup was made. So
	// less is right where the TTLs in use were shorter, or where the old cluster has been down for a while.
	ClosedFor time.Duration
	// Members are addresses of members of the old cluster, beside those that Recover finds in the log. They are asked
	// first: see Supersede. The new server asks them too, while it runs. TLS and JoinKey as in Config.
	Members []string
	TLS     *tls.Config
	JoinKey []byte
	// Supersede makes the new generation although a server of the cluster answers, which is otherwise a *RivalError. Its
	// number is 1 + the greatest of the answers: these servers stop when they hear of it.
	Supersede bool
}

// Restored is the result of a restore.
type Restored struct {
	// Cluster is the token space of the new cluster.
	Cluster string
	// BackedUp is when the backup was made, by the clock of the server that made it.
	BackedUp time.Time
	// All future tokens are above Revision, and all earlier ones are not.
	Revision uint64
	// ClosedFor is the time for which the server will serve nobody after its start.
	ClosedFor time.Duration
	// UsedTTL is the longest TTL of a session in the backup: advice for RestoreOptions.ClosedFor, since a longer one may
	// have been in use after that.
	UsedTTL time.Duration
	// Generation of the new cluster.
	Generation fencing.Generation
}

// tokensPerMilli is more than the bundled server issues in a millisecond. The revision is set ahead by that much for
// the time since the backup was made, besides the state machine's own addition: so tokens increase even over a second
// restore of one backup, and if the backup is very old.
const tokensPerMilli = 1 << 10

// Restore makes dir, which must be empty or not exist, the data directory of a new cluster with one member that has
// the state of the backup. Start starts it; other members are admitted as into any other cluster, and begin with
// empty directories. It must not be started before every member of the backup's cluster is stopped for good, unless
// it gets another name. If one of Members answers, the error is a *RivalError, unless Supersede is set.
//
// Tokens go on far above all tokens issued before, even after the backup was made. Every session is ended with its
// holds and waits; the minimum times of holds go on. Earlier events are gone.
//
// A truncated or damaged backup is an error; dir is then not made, or cannot be started and has to be emptied.
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

// remake makes dir the data directory of a new cluster with one member and the state in snapshot, described by a.
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

// unfinished is the name of a file that marks a data directory while a backup is restored into it.
const unfinished = "restoring"

// checkFinished refuses a data directory with an interrupted restore: it would begin without tokens.
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

// writeDataDir makes dir the data directory of a single member, with the state f as its first snapshot. The file
// unfinished is there before any file that a server needs and until all are, so that no server starts with a part.
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

// firstTerm makes the log, which is empty, and records in it that the term of the snapshot has begun.
func firstTerm(kind Store, dir string) error {
	log, err := openLog(kind, dir, newRaftLog(slog.New(slog.DiscardHandler)), &serverfault.Rig{}, &disk{fatal: func(error) {}})
	if err != nil {
		return err
	}
	return errors.Join(log.SetUint64([]byte(currentTerm), 1), log.Close())
}

// firstSnapshot replaces the first log entry of a cluster with one member. The member finds out its address when it
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
