package audit

import (
	"os"
	"path/filepath"
	"time"
)

// full is the pattern of full files, whose names are in the order of time. layout is the name of one.
const (
	full   = "audit-*.jsonl"
	layout = "audit-20060102T150405.000000000Z.jsonl"
)

// rotate renames the file, and deletes the oldest full files. If it cannot rename the file, the file grows by FileBytes
// before the next attempt.
func (l *Log) rotate() {
	size := l.size
	l.shut()
	files, err := l.files()
	if err != nil {
		l.o.Log.Warn("full audit files cannot be deleted", "dir", l.o.Dir, "error", err)
	}
	now := time.Now().UTC()
	if len(files) > 0 {
		// The clock may have been set back: the file that is renamed now is the newest.
		if last, err := time.Parse(layout, files[len(files)-1]); err == nil && !now.After(last) {
			now = last.Add(1)
		}
	}
	at, to := filepath.Join(l.o.Dir, file), now.Format(layout)
	if err := os.Rename(at, filepath.Join(l.o.Dir, to)); err != nil {
		l.o.Log.Warn("the audit file cannot be renamed, and grows on", "file", at, "error", err)
		l.limit = size + l.o.FileBytes
		return
	}
	l.limit = l.o.FileBytes
	for files = append(files, to); len(files) > l.o.Keep; files = files[1:] {
		if err := os.Remove(filepath.Join(l.o.Dir, files[0])); err != nil {
			l.o.Log.Warn("a full audit file cannot be deleted", "error", err)
		}
	}
}

// files returns the names of the full files, the oldest first.
func (l *Log) files() ([]string, error) {
	entries, err := os.ReadDir(l.o.Dir) // in the order of names
	var names []string
	for _, e := range entries {
		if is, _ := filepath.Match(full, e.Name()); is { // the pattern is valid
			names = append(names, e.Name())
		}
	}
	return names, err
}
