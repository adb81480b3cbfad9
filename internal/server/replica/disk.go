package replica

// A disk that refuses a write: nothing more is written to it, and the server stops.

import (
	"fmt"
	"runtime"
	"sync"

	"github.com/hashicorp/raft"
	"github.com/hashicorp/raft-wal/types"
)

// DiskError is why a server stopped whose disk refused a write: it is full, or an fsync failed. See Server.Err.
type DiskError struct {
	What string // was to be written
	Err  error
}

func (e *DiskError) Error() string { return fmt.Sprintf("the disk refused %s: %v", e.What, e.Err) }

// Unwrap returns what the operating system said.
func (e *DiskError) Unwrap() error { return e.Err }

// disk makes the first write that is refused the last one, and has fatal called with it: the server stops.
//
// To try again was rejected. After an fsync that failed the operating system may take the data for written, and the
// next one succeeds without it; and raft goes on with a log that is shorter, or with a configuration that is newer,
// than it believes. What is on the disk is read again, and checked, when the server is started again. Where the disk
// lies then too, because it dropped what it could not write, it has to be replaced and the member to begin with an
// empty directory.
type disk struct {
	fatal func(error)

	mu     sync.Mutex
	broken error
}

// write does one write, unless an earlier one was refused.
func (d *disk) write(what string, do func() error) error {
	d.mu.Lock()
	broken := d.broken
	d.mu.Unlock()
	if broken != nil {
		return broken
	}
	err := do()
	if err == nil {
		return nil
	}
	return d.condemn(&DiskError{what, err})
}

// condemn has nothing written any more, for the reason err.
func (d *disk) condemn(err error) error {
	d.mu.Lock()
	d.broken = err
	d.mu.Unlock()
	d.fatal(err)
	return err
}

// strictLog is a log on such a disk.
type strictLog struct {
	raft.LogStore
	disk *disk
}

func (l *strictLog) StoreLog(entry *raft.Log) error { return l.StoreLogs([]*raft.Log{entry}) }

func (l *strictLog) StoreLogs(entries []*raft.Log) error {
	return l.disk.write("log entries", func() error { return l.LogStore.StoreLogs(entries) })
}

func (l *strictLog) DeleteRange(first, last uint64) error {
	return l.disk.write("the deletion of log entries", func() error { return l.LogStore.DeleteRange(first, last) })
}

// IsMonotonic passes on whether the store refuses gaps. See watchedLog.
func (l *strictLog) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// strictStable keeps the term and the votes on such a disk.
type strictStable struct {
	raft.StableStore
	disk *disk
}

// strictFiles makes the files of the log on such a disk. The log makes them ahead of time and in full, and forgets why
// it could not.
type strictFiles struct {
	types.VFS
	disk *disk
}

func (f strictFiles) Create(dir, name string, size uint64) (types.WritableFile, error) {
	var file types.WritableFile
	err := f.disk.write("a new file of the log", func() (err error) {
		file, err = f.VFS.Create(dir, name, size)
		return err
	})
	if err != nil {
		return nil, err
	}
	return file, nil
}

// currentTerm is the key under which raft keeps its term.
const currentTerm = "CurrentTerm"

func (s *strictStable) Set(key, value []byte) error {
	return s.disk.write(string(key), func() error { return s.StableStore.Set(key, value) })
}

// SetUint64 implements raft.StableStore. Raft panics if its term cannot be written, which would end the program around
// the server. Its main loop, which alone writes the term, ends here instead: nobody hears of this member any more. What
// is there already is not written again: that is how raft begins, before it has a main loop. The first term is written
// by the making of a cluster, which takes an error; elections begin with the second.
func (s *strictStable) SetUint64(key []byte, value uint64) error {
	if old, err := s.GetUint64(key); old == value && (err == nil || value == 0) {
		return nil
	}
	err := s.disk.write(string(key), func() error { return s.StableStore.SetUint64(key, value) })
	if err != nil && string(key) == currentTerm && value > 1 {
		runtime.Goexit()
	}
	return err
}
