package replica

// The content of the data directory, and how it is opened. The log is a stack of stores, each with one purpose:
//
//	logCache (compact.go) ─► checkedLog (checksum.go) ─► watchedLog (silence.go) ─► strictLog (disk.go) ─► wal or bolt

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	"github.com/hashicorp/raft-boltdb/v2"
	wal "github.com/hashicorp/raft-wal"
	walfs "github.com/hashicorp/raft-wal/fs"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"

	"github.com/fencelock/fencelock/internal/serverfault"
	_ "github.com/fencelock/fencelock/internal/standardlog" // raft-wal changes package log
)

// Store names the kinds of log store.
type Store string

// The log stores.
const (
	// StoreWAL appends to files, with one fsync per append, and deletes old files. It is the default.
	StoreWAL Store = "wal"
	// StoreBolt is a B+tree in one file. It is slower, but older and longer in use.
	StoreBolt Store = "bolt"
	// StoreMemory has no files. It is for trials and tests.
	StoreMemory Store = "memory"
)

// snapshotsKept is the number of snapshots on disk.
const snapshotsKept = 2

// stores has all storage of raft and of the replica.
type stores struct {
	nodeID    raft.ServerID
	cluster   clusterFile
	log       raft.LogStore
	stable    raft.StableStore
	snapshots raft.SnapshotStore
	checked   *checkedLog // the log without its cache; nil: no data directory
	commits   *commitMark
	known     *known
	members   []raft.Server // at the time of opening
	last      uint64        // the last index of the log or of a snapshot, at the time of opening
	sizes     *logSizes
	silence   *silence
	disk      *disk       // nil: no data directory
	open      []io.Closer // in the order in which they were opened
}

// close closes all in reverse order. It releases the lock of the directory last, so that no other server opens a store
// that is still open.
func (s *stores) close() error {
	var err error
	for _, c := range slices.Backward(s.open) {
		err = errors.Join(err, c.Close())
	}
	s.open = nil
	return err
}

// logAndStable is the interface of each of the stores.
type logAndStable interface {
	raft.LogStore
	raft.StableStore
	io.Closer
}

// openStores opens or creates the stores in dir. fatal is called later if the disk refuses a write.
func openStores(kind Store, dir string, logger hclog.Logger, rig *serverfault.Rig, fatal func(error)) (*stores, error) {
	if kind == StoreMemory {
		return memoryStores(), nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	s := &stores{silence: newSilence(), sizes: newLogSizes(), open: []io.Closer{lock}}
	s.disk = &disk{fatal: fatal}
	if err := s.openIn(kind, dir, logger, rig, s.disk); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// openIn opens the stores in dir. It calls checkKind before it opens the log, which creates a missing log: otherwise
// there could be two kinds of logs. It reads the whole log and all snapshots before raft uses them.
func (s *stores) openIn(kind Store, dir string, logger hclog.Logger, rig *serverfault.Rig, disk *disk) (err error) {
	if err := finishAside(dir); err != nil {
		return err
	}
	if err := errors.Join(checkFinished(dir), checkKind(kind, dir)); err != nil {
		return err
	}
	if s.nodeID, err = nodeID(dir); err != nil {
		return err
	}
	if s.cluster, err = readClusterFile(dir); err != nil {
		return err
	}
	snapshots, err := openSnapshots(dir, logger)
	if err != nil {
		return err
	}
	s.snapshots = snapshots
	newest, err := snapshots.check()
	if err != nil {
		return err
	}
	store, err := openLog(kind, dir, logger, rig, disk)
	if err != nil {
		return fmt.Errorf("log in %s: %w", dir, err)
	}
	s.open = append(s.open, store)
	stable := raft.StableStore(store)
	if rig.Stable != nil {
		stable = rig.Stable(stable)
	}
	s.stable = &strictStable{stable, disk}
	last, err := store.LastIndex()
	if err != nil {
		return err
	}
	mark, err := openMark(dir, last)
	if err != nil {
		return err
	}
	s.open = append(s.open, mark)
	if s.commits, err = openCommitMark(dir); err != nil {
		return err
	}
	s.open = append(s.open, s.commits)
	below := raft.LogStore(store)
	if rig.Log != nil {
		below = rig.Log(below)
	}
	s.checked = &checkedLog{
		LogStore: &watchedLog{&strictLog{below, disk}, s.silence}, path: filepath.Join(dir, string(kind)),
		silence: s.silence, disk: disk, mark: mark, commits: s.commits, sizes: s.sizes,
	}
	if err := s.checked.check(newest); err != nil {
		return err
	}
	if s.last, s.members, err = s.checked.end(snapshots, newest); err != nil {
		return err
	}
	s.known = openKnown(dir)
	s.log = &logCache{LogStore: s.checked}
	return nil
}

func memoryStores() *stores {
	store := raft.NewInmemStore()
	s := &stores{
		nodeID: newNodeID(), stable: store, snapshots: raft.NewInmemSnapshotStore(),
		silence: newSilence(), sizes: newLogSizes(), commits: &commitMark{}, known: &known{index: map[raft.ServerID]uint64{}},
	}
	s.log = &checkedLog{
		LogStore: &watchedLog{store, s.silence}, silence: s.silence, disk: &disk{fatal: func(error) {}}, sizes: s.sizes,
	}
	return s
}

func openLog(kind Store, dir string, logger hclog.Logger, rig *serverfault.Rig, disk *disk) (log logAndStable, err error) {
	path := filepath.Join(dir, string(kind))
	defer func() {
		if x := recover(); x != nil { // both kinds may panic on damaged files
			err = &CorruptError{File: path, Why: fmt.Sprint(x)}
		}
	}()
	if kind == StoreBolt {
		return raftboltdb.NewBoltStore(path)
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	files := types.VFS(walfs.New())
	if rig.Files != nil {
		files = rig.Files(files)
	}
	files = strictFiles{files, disk}
	if err := reopenSealed(path, files); err != nil {
		return nil, fmt.Errorf("its last file is sealed and cannot be copied: %w", err)
	}
	return wal.Open(path, wal.WithLogger(logger), wal.WithSegmentSize(cmp.Or(rig.SegmentBytes, segmentBytes)),
		wal.WithSegmentFiler(segment.NewFiler(path, files)))
}

// checkKind returns an error if the directory has a log of another kind: the member would forget its votes and
// acknowledgements.
func checkKind(kind Store, dir string) error {
	for _, other := range []Store{StoreWAL, StoreBolt} {
		if other == kind {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, string(other))); err == nil {
			return fmt.Errorf("data directory %s has a log of kind %s, not %s", dir, other, kind)
		}
	}
	return nil
}

// nodeID returns the id of this member. It creates a random id once and stores it with the data: operators could give
// two members the same id, and these would then vote twice.
func nodeID(dir string) (raft.ServerID, error) {
	path := filepath.Join(dir, nodeIDFile)
	text, err := os.ReadFile(path)
	if err == nil {
		if id := strings.TrimSpace(string(text)); id != "" {
			return raft.ServerID(id), nil
		}
		return "", fmt.Errorf("%s is empty", path)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	id := newNodeID()
	return id, writeFile(path, []byte(string(id)+"\n"))
}

func newNodeID() raft.ServerID {
	var raw [8]byte
	rand.Read(raw[:]) // never fails
	return raft.ServerID(hex.EncodeToString(raw[:]))
}

// clusterFile records the cluster of a member, so that the member refuses members of other clusters even before it has
// read its log. The zero value is for a member without a data directory.
type clusterFile struct {
	path string
	name string // empty if unknown
}

const clusterIDFile = "cluster-id"

func readClusterFile(dir string) (clusterFile, error) {
	f := clusterFile{path: filepath.Join(dir, clusterIDFile)}
	text, err := os.ReadFile(f.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	f.name = strings.TrimSpace(string(text))
	return f, nil
}

func (f clusterFile) write(name string) error {
	if f.path == "" {
		return nil
	}
	return writeFile(f.path, []byte(name+"\n"))
}

// writeFile writes a file atomically and durably.
func writeFile(path string, text []byte) error {
	temporary := path + ".new"
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
