package serverfault

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/raft"
	"github.com/hashicorp/raft-wal/types"
)

// Disk is a disk that can be broken while a server uses it: what lies between the server and the real one. The zero
// value is a disk that works. It is safe for concurrent use.
type Disk struct {
	mu   sync.Mutex
	ails Ailment

	// Hit is called, if not nil, after each operation that the present ailment refused or delayed. Set it before the
	// first.
	Hit func()
	hit atomic.Int64
}

// Ailment is the fault of a disk.
type Ailment struct {
	// Fsync is the error of every fsync. The data was handed to the operating system before.
	Fsync error
	// Create is the error of the creation of a file, Write the error of every write, after it wrote half.
	Create, Write error
	// Delay prolongs every fsync.
	Delay time.Duration
}

// Full is a disk without room; NoNewFiles is that as long as the log has room in a file that it made ahead of time;
// FailingFsync is a disk that accepts writes and cannot keep them.
var (
	Full         = Ailment{Create: syscall.ENOSPC, Write: syscall.ENOSPC}
	NoNewFiles   = Ailment{Create: syscall.ENOSPC}
	FailingFsync = Ailment{Fsync: syscall.EIO}
)

// Suffer makes the disk behave like that from now on.
func (d *Disk) Suffer(a Ailment) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ails = a
}

// Hits returns the number of refused or delayed operations.
func (d *Disk) Hits() int64 { return d.hit.Load() }

func (d *Disk) ailment() Ailment {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ails
}

func (d *Disk) note() {
	d.hit.Add(1)
	if d.Hit != nil {
		d.Hit()
	}
}

// refuse returns err, and counts it if there is one.
func (d *Disk) refuse(err error) error {
	if err != nil {
		d.note()
	}
	return err
}

// fsync runs before the real one.
func (d *Disk) fsync() error {
	a := d.ailment()
	if a.Delay > 0 {
		time.Sleep(a.Delay)
		d.note()
	}
	return d.refuse(a.Fsync)
}

// Files comes between the log and its files. See Rig.
func (d *Disk) Files(under types.VFS) types.VFS { return files{under, d} }

type files struct {
	types.VFS
	disk *Disk
}

func (f files) Create(dir, name string, size uint64) (types.WritableFile, error) {
	if err := f.disk.refuse(f.disk.ailment().Create); err != nil {
		return nil, err
	}
	return f.wrap(f.VFS.Create(dir, name, size))
}

func (f files) OpenWriter(dir, name string) (types.WritableFile, error) {
	return f.wrap(f.VFS.OpenWriter(dir, name))
}

func (f files) wrap(under types.WritableFile, err error) (types.WritableFile, error) {
	if err != nil {
		return nil, err
	}
	return file{under, f.disk}, nil
}

type file struct {
	types.WritableFile
	disk *Disk
}

func (f file) WriteAt(p []byte, at int64) (int, error) {
	if err := f.disk.refuse(f.disk.ailment().Write); err != nil {
		n, _ := f.WritableFile.WriteAt(p[:len(p)/2], at)
		return n, err
	}
	return f.WritableFile.WriteAt(p, at)
}

func (f file) Sync() error {
	if err := f.disk.fsync(); err != nil {
		return err
	}
	return f.WritableFile.Sync()
}

// Stable comes between raft and its store of terms and votes. See Rig.
func (d *Disk) Stable(under raft.StableStore) raft.StableStore { return stable{under, d} }

type stable struct {
	raft.StableStore
	disk *Disk
}

func (s stable) write(do func() error) error {
	if err := s.disk.refuse(s.disk.ailment().Write); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	return s.disk.fsync()
}

func (s stable) Set(key, value []byte) error {
	return s.write(func() error { return s.StableStore.Set(key, value) })
}

func (s stable) SetUint64(key []byte, value uint64) error {
	return s.write(func() error { return s.StableStore.SetUint64(key, value) })
}
