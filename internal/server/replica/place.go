package replica

// Detection of a copied data directory without other members: node-id-place has the inode and the birth time of the
// file node-id. A file keeps both when its directory is moved within the file system, and a copy of the file never has
// both.

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"
)

const (
	nodeIDFile = "node-id"
	placeFile  = "node-id-place"
)

// place identifies a file.
type place struct {
	// Device alone is not evidence: a volume may get another number when it is attached again.
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
	Born   int64  `json:"born,omitempty"` // Unix nanoseconds; zero if the file system does not have it
}

func (p place) String() string {
	born := "unknown"
	if p.Born != 0 {
		born = time.Unix(0, p.Born).UTC().Format(time.RFC3339Nano)
	}
	return fmt.Sprintf("device %d, inode %d, born %s", p.Device, p.Inode, born)
}

// CopiedError is the reason why a server does not start: its data directory is a copy, and the server of the original
// may run.
type CopiedError struct {
	Dir      string
	was, now place
}

func (e *CopiedError) Error() string {
	return fmt.Sprintf("data directory %s is a copy: its node-id was the file with %s, and is the file with %s; "+
		"two servers with one node id issue tokens twice: start the copy with --moved if the original never starts "+
		"again, and with an empty directory otherwise", e.Dir, e.was, e.now)
}

// checkPlace returns a *CopiedError for a data directory that is a copy, unless moved is set, and records the place
// otherwise. The caller has the lock of the directory, which has a node-id.
func checkPlace(dir string, moved bool, log *slog.Logger) error {
	now, err := placeOf(filepath.Join(dir, nodeIDFile))
	if err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	path := filepath.Join(dir, placeFile)
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil && !moved {
		var was place
		if err := json.Unmarshal(text, &was); err != nil {
			return &CorruptError{File: path, Why: err.Error()}
		}
		switch {
		case was == now:
			return nil
		case was.Inode != now.Inode, was.Born != now.Born && was.Born != 0 && now.Born != 0:
			return &CopiedError{dir, was, now}
		case was.Device != now.Device:
			log.Warn("the data directory is on another device than before: if that is a clone of a volume, "+
				"the original must never start again", "dir", dir, "was", was.Device, "is", now.Device)
		}
	}
	if text, err = json.Marshal(now); err != nil {
		return err
	}
	return writeFile(path, append(text, '\n'))
}
