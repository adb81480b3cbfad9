// Package tlsfiles keeps a value that was read from files, such as a configuration of TLS, and reads the files again
// when they have been replaced. Servers and clients use it for certificates, keys and authorities.
package tlsfiles

import (
	"os"
	"sync"
	"time"
)

// Files is a value and the files that it was read from. All methods are safe for concurrent use.
type Files[T any] struct {
	read    func() (T, error)
	changed func(value T, err error)
	paths   []string

	mu     sync.Mutex // protects the following fields
	value  T
	stamps []os.FileInfo // nil for a missing file
	looked time.Time
	failed bool // value is that of earlier files
}

// lookInterval is the minimum time between two looks at the files.
const lookInterval = time.Second

// Read reads the files at paths, all of them with read. changed is called after each later reading: with the new value,
// or with the value of earlier files, which stays in use, and the error. It is not called again while the same files
// fail.
func Read[T any](read func() (T, error), changed func(value T, err error), paths ...string) (*Files[T], error) {
	f := &Files[T]{read: read, changed: changed, paths: paths, looked: time.Now()}
	f.stamps = f.look()
	var err error
	f.value, err = read()
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Current returns the value of the files as they are, or as they were at most a second ago.
func (f *Files[T]) Current() T {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if since := now.Sub(f.looked); since < lookInterval && since >= 0 {
		return f.value
	}
	f.looked = now
	stamps := f.look()
	changed := false
	for i := range stamps {
		changed = changed || differ(stamps[i], f.stamps[i])
	}
	if changed || f.failed {
		f.stamps = stamps
		f.load(changed)
	}
	return f.value
}

// Reload reads the files now, whether or not they have changed.
func (f *Files[T]) Reload() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.looked, f.stamps = time.Now(), f.look()
	f.load(true)
}

// load reads the files. It reports a failure only if report is set. The caller holds f.mu.
func (f *Files[T]) load(report bool) {
	value, err := f.read()
	if f.failed = err != nil; !f.failed {
		f.value = value
	} else if !report {
		return
	}
	f.changed(f.value, err)
}

// look returns the file facts that distinguish versions of the files.
func (f *Files[T]) look() []os.FileInfo {
	all := make([]os.FileInfo, len(f.paths))
	for i, path := range f.paths {
		if about, err := os.Stat(path); err == nil {
			all[i] = about
		}
	}
	return all
}

// differ reports whether two looks at a path saw different versions of the file. Two that are renamed to the path within
// one tick of the file system's clock have one time, and may have one size.
func differ(a, b os.FileInfo) bool {
	if a == nil || b == nil {
		return a != b
	}
	return !os.SameFile(a, b) || !a.ModTime().Equal(b.ModTime()) || a.Size() != b.Size()
}
