//go:build unix

package containers

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// lock locks the file, and waits while another process has it locked.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX); {
		case err == nil:
			return func() { f.Close() }, nil
		case !errors.Is(err, unix.EINTR):
			f.Close()
			return nil, os.NewSyscallError("flock", err)
		}
	}
}
