package replica

// Recovery from the disk of one member. The new directory is created beside the old one. At the end two renames replace
// the old directory: before that, an error leaves the old directory in place.

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/serverfault"
)

// Suffixes of the directories beside a recovered data directory.
const (
	recoveredSuffix = ".recovered"
	lostSuffix      = ".lost"
)

// Recover is for a cluster that has lost most of its members. It converts the data directory of one member to that of a
// new cluster with one member, which has all state on this disk. It is like Restore with a disk instead of a backup:
// tokens continue far above all issued tokens, even those that are not on this disk, and every session ends. The server
// does not serve clients at first, because the disk may lack the last acknowledged entries. The error is a
// *CorruptError if the data is damaged. Recover keeps the old directory, with ".lost" appended to its name.
//
// No other member of the old cluster may run, now or later. If one answers, the error is a *RivalError, unless
// Supersede is set.
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
		return Restored{}, errors.Join(fmt.Errorf("%s exists, from an earlier recovery", lost), err)
	}
	kind, err := kindOf(dir)
	if err != nil {
		return Restored{}, err
	}
	if o.Store == "" {
		o.Store = kind
	}
	info, snapshot, members, err := rescue(kind, dir)
	if err != nil {
		return Restored{}, err
	}
	o.Members = append(members, o.Members...)
	slices.Sort(o.Members)
	o.Members = slices.Compact(o.Members)
	r, err := remake(fresh, info, snapshot, o)
	if err != nil {
		return Restored{}, err
	}
	if err := errors.Join(os.Rename(dir, lost), os.Rename(fresh, dir)); err != nil {
		return Restored{}, fmt.Errorf("the new data directory is ready at %s, but could not be moved into place: %w",
			fresh, err)
	}
	return r, syncDir(filepath.Dir(dir))
}

// rescue returns the state of a data directory, like a backup from the time of the last write to the log, and the
// addresses of other members.
func rescue(kind Store, dir string) (info BackupInfo, snapshot []byte, others []string, err error) {
	written, err := os.Stat(filepath.Join(dir, markFile))
	if errors.Is(err, os.ErrNotExist) { // the data is from an older version
		written, err = os.Stat(filepath.Join(dir, string(kind)))
	}
	if err != nil {
		return info, nil, nil, err
	}
	s, err := openStores(kind, dir, newRaftLog(slog.New(slog.DiscardHandler)), &serverfault.Rig{}, func(error) {})
	if err != nil {
		return info, nil, nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	f := NewFSM(machine.New(1), func() {}, func(error) {})
	if _, err := s.replay(f); err != nil {
		return info, nil, nil, err
	}
	if f.Cluster() == "" {
		return info, nil, nil, fmt.Errorf("%s belongs to a member that was never in a cluster", dir)
	}
	others = slices.Clone(f.former())
	for _, m := range s.members {
		if m.ID != s.nodeID {
			others = append(others, string(m.Address))
		}
	}
	var state bytes.Buffer
	_, err = f.Machine.Freeze().WriteTo(&state)
	return BackupInfo{
		Cluster: f.Cluster(), History: f.History(), At: written.ModTime(), permitted: f.facts.permitted,
	}, state.Bytes(), others, err
}
