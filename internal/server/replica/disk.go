package replica

// Handling of a disk that refuses a write: there are no further writes, and the server stops.

import (
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"github.com/hashicorp/raft-wal/types"
)

// DiskError is the reason why a server stopped: its disk refused a write, for example because the disk is full or an
// fsync failed. See Server.Err.
type DiskError struct {
	What string // the data that the disk refused
	Err  error
}

func (e *DiskError) Error() string { return fmt.Sprintf("the disk refused %s: %v", e.What, e.Err) }

// Unwrap returns the error of the operating system.
func (e *DiskError) Unwrap() error { return e.Err }

// disk permits no write after the first refused write, and calls fatal with its error: the server stops.
//
// disk does not retry. After a failed fsync the operating system may treat the data as written, so that the next fsync
// succeeds without it. Raft would continue with a log that is shorter, or with a configuration that is newer, than it
// assumes. After a restart the server reads its data from the disk and checks it. If the disk has dropped data that it
// could not write, the disk has to be replaced, and the member has to start with an empty directory.
type disk struct {
	fatal func(error)
	// appended gets the duration of each append to the log, including its fsync. May be nil.
	appended func(time.Duration)

	mu     sync.Mutex
	broken error
}

// write does one write, or returns the error of an earlier refused write.
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

// condemn prevents all further writes, and stops the server with err.
func (d *disk) condemn(err error) error {
	d.mu.Lock()
	d.broken = err
	d.mu.Unlock()
	d.fatal(err)
	return err
}

// strictLog is a log on a disk.
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

// strictStable stores the term and the votes on a disk.
type strictStable struct {
	raft.StableStore
	disk *disk
}

// strictFiles creates the files of the log on a disk. The log creates them in advance with their full size, and ignores
// an error.
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

// currentTerm is the key under which raft stores its term.
const currentTerm = "CurrentTerm"

func (s *strictStable) Set(key, value []byte) error {
	return s.disk.write(string(key), func() error { return s.StableStore.Set(key, value) })
}

// SetUint64 implements raft.StableStore. Raft panics if its term cannot be written, which would end the whole program.
// So SetUint64 ends raft's main loop, which alone writes the term, and the member stops sending. It does not write a
// value that is already stored, as raft does before it has a main loop. The creation of a cluster writes the first term
// and handles an error; elections begin with the second term.
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
