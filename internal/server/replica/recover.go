package replica

// Recovery from the disk of one member. The new directory is made beside the old one and takes its place at the end, by
// two renames: up to there an error leaves the old one where it was.

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/rig"
)

// What stands beside a data directory that is recovered, by what follows its name.
const (
	recoveredSuffix = ".recovered"
	lostSuffix      = ".lost"
)

// Recover turns the data directory of one member, of a cluster that has lost most of its members, into one of a new
// cluster with one member, which has all that is on this disk. It is Restore with a disk in place of a backup: tokens
// go on far above all that were issued, also those that this disk knows nothing of, every session is ended, and the
// server serves nobody at first, for DefaultMaxTTL where ClosedFor is 0: the disk may lack what other members
// acknowledged last. Damage is a *CorruptError. The old directory is kept, with ".lost" after its name.
//
// No other member of the old cluster must run, now or later.
func Recover(dir string, o RestoreOptions) (Restored, error) {
	r, err := recoverDir(filepath.Clean(dir), o)
	if err != nil {
		return Restored{}, fmt.Errorf("replica.Recover: %w", err)
	}
	return r, nil
}

func recoverDir(dir string, o RestoreOptions) (Restored, error) {
	fresh, lost := dir+recoveredSuffix, dir+lostSuffix
	if _, err := os.Lstat(lost); !errors.Is(err, os.ErrNotExist) {
		return Restored{}, errors.Join(fmt.Errorf("%s is there, of an earlier recovery", lost), err)
	}
	kind, err := kindOf(dir)
	if err != nil {
		return Restored{}, err
	}
	if o.Store == "" {
		o.Store = kind
	}
	info, snapshot, err := rescue(kind, dir)
	if err != nil {
		return Restored{}, err
	}
	r, err := remake(fresh, info, snapshot, o)
	if err != nil {
		return Restored{}, err
	}
	if err := errors.Join(os.Rename(dir, lost), os.Rename(fresh, dir)); err != nil {
		return Restored{}, fmt.Errorf("the new data directory is ready at %s, and could not be put in place: %w",
			fresh, err)
	}
	return r, syncDir(filepath.Dir(dir))
}

// rescue returns all that is in a data directory, as if it were a backup made when the log was last written.
func rescue(kind Store, dir string) (info BackupInfo, snapshot []byte, err error) {
	written, err := os.Stat(filepath.Join(dir, markFile))
	if errors.Is(err, os.ErrNotExist) { // it is of an older version
		written, err = os.Stat(filepath.Join(dir, string(kind)))
	}
	if err != nil {
		return info, nil, err
	}
	s, err := openStores(kind, dir, newRaftLog(slog.New(slog.DiscardHandler)), &rig.Rig{}, func(error) {})
	if err != nil {
		return info, nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	f := NewFSM(machine.New(1), func() {}, func(error) {})
	if _, err := s.replay(f); err != nil {
		return info, nil, err
	}
	if f.Cluster() == "" {
		return info, nil, fmt.Errorf("%s is of a member that was never in a cluster", dir)
	}
	var state bytes.Buffer
	_, err = f.Machine.Freeze().WriteTo(&state)
	return BackupInfo{Cluster: f.Cluster(), At: written.ModTime()}, state.Bytes(), err
}
