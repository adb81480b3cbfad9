//go:build unix

package replica

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// lockDir locks the directory until this process ends or closes the result. Without the lock, a second server would
// wait for the log store of the first without an error.
func lockDir(dir string) (io.Closer, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return heldDir{f}, nil
	}
	f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("data directory %s is in use by another server", dir)
	}
	return nil, fmt.Errorf("data directory %s: lock: %w", dir, err)
}

type heldDir struct{ *os.File }

// Close implements io.Closer. It unlocks the file explicitly: a child process that is being started shares the file
// until it executes its program.
func (d heldDir) Close() error {
	return errors.Join(unix.Flock(int(d.Fd()), unix.LOCK_UN), d.File.Close())
}
