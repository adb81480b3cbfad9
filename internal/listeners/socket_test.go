//go:build unix

package listeners

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Only the user can open the socket. It replaces a socket without a listener, and closing the listener removes it.
func TestListenUnix(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "socket")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "admin.sock")
	open := func() net.Listener {
		t.Helper()
		l, err := ListenUnix(path)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := open()
	if about, err := os.Stat(path); err != nil || about.Mode().Perm() != 0o600 {
		t.Errorf("the socket: %v, %v", about.Mode(), err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "another process listens") {
		t.Errorf("a second listener: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}

	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false) // as after a crash
	dead.Close()
	open().Close()

	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("a file is there: %v", err)
	}
	if _, err := ListenUnix(filepath.Join(dir, strings.Repeat("x", maxSocketPath))); err == nil {
		t.Error("a path is too long, and taken")
	}
}
