package listeners

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// UnixPrefix begins the address of a Unix socket.
const UnixPrefix = "unix:"

// UnixPath returns the path of a Unix socket's address.
func UnixPath(address string) (path string, is bool) { return strings.CutPrefix(address, UnixPrefix) }

// maxSocketPath bounds the path of a socket, in bytes: the smallest limit of all systems with Unix sockets.
const maxSocketPath = 103

// liveTime is the maximum time until a process that listens at a socket accepts a connection.
const liveTime = time.Second

// ListenUnix listens at a socket that only the user of this process and root can open. It replaces the socket of a
// process that has ended, and fails if another process listens at the path. Closing the listener removes the socket.
//
// ListenUnix creates the socket in a directory that only the user can enter, sets its mode, and then moves it to path.
func ListenUnix(path string) (net.Listener, error) {
	refused := func(err error) (net.Listener, error) { return nil, fmt.Errorf("the socket %s: %w", path, err) }
	if about, err := os.Lstat(path); err == nil {
		if about.Mode()&os.ModeSocket == 0 {
			return refused(errors.New("there is a file that is no socket"))
		}
		if c, err := net.DialTimeout("unix", path, liveTime); err == nil {
			c.Close()
			return refused(errors.New("another process listens there"))
		}
	}
	private, err := os.MkdirTemp(filepath.Dir(path), ".s")
	if err != nil {
		return refused(err)
	}
	defer func() { _ = os.RemoveAll(private) }() // the directory is empty, or has an unused socket
	first := filepath.Join(private, "s")
	if n := max(len(first), len(path)); n > maxSocketPath {
		return refused(fmt.Errorf("its path has more than %d bytes, with the directory in which it is made", maxSocketPath))
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: first, Net: "unix"})
	if err != nil {
		return refused(err)
	}
	l.SetUnlinkOnClose(false)
	if err = os.Chmod(first, 0o600); err == nil {
		err = os.Rename(first, path)
	}
	if err != nil {
		_ = l.Close() // nobody has connected
		return refused(err)
	}
	return &unixListener{l, path}, nil
}

type unixListener struct {
	*net.UnixListener
	path string
}

func (l *unixListener) Close() error {
	err := l.UnixListener.Close()
	if err == nil { // only the first Close succeeds
		err = os.Remove(l.path)
	}
	return err
}
