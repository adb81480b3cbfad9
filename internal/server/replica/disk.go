package replica

// A disk that refuses a write: no further writes, and the server stops.

import (
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"github.com/hashicorp/raft-wal/types"
)

// DiskError is the reason why a server stopped: its disk refused a write, because it is full, or an fsync failed. See
// Server.Err.
type DiskError struct {
	What string // was to be written
	Err  error
}

func (e *DiskError) Error() string { return fmt.Sprintf("the disk refused %s: %v", e.What, e.Err) }

// Unwrap returns the error of the operating system.
func (e *DiskError) Unwrap() error { return e.Err }

// disk makes the first refused write the last one, and calls fatal with its error: the server stops.
//
// It does not retry. After a failed fsync the operating system may take the data for written, and the next fsync
// succeeds without it; and raft goes on with a log that is shorter, or with a configuration that is newer, than it
// assumes. After a restart the server reads its data from the disk and checks it. If the disk lies even then, because
// it dropped data that it could not write, it has to be replaced and the member has to start with an empty directory.
type disk struct {
	fatal func(error)
	// appended gets the time of each append to the log, with its fsync. May be nil.
	appended func(time.Duration)

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

// condemn stops all further writes, for the reason err.
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
	began := time.Now()
	err := l.disk.write("log entries", func() error { return l.LogStore.StoreLogs(entries) })
	if l.disk.appended != nil {
		l.disk.appended(time.Since(began))
	}
	return err
}

func (l *strictLog) DeleteRange(first, last uint64) error {
	return l.disk.write("the deletion of log entries", func() error { return l.LogStore.DeleteRange(first, last) })
}

// IsMonotonic reports whether the store refuses gaps. See watchedLog.
func (l *strictLog) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// strictStable keeps the term and the votes on such a disk.
type strictStable struct {
	raft.StableStore
	disk *disk
}

// strictFiles makes the files of the log on such a disk. The log makes them ahead of time and in full, and drops the
// error if it could not.
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

// SetUint64 implements raft.StableStore. Raft panics if its term cannot be written, which would end the program
// around the server. Its main loop, which alone writes the term, ends here instead: this member stops
// sending. A value that is there already is not written: that is how raft begins, before it has a main loop. The first
// term is written by the making of a cluster, which takes an error; elections begin with the second.
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
