//go:build unix

package main

import (
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The command of the systemd unit starts a server that notifies systemd when it is ready and when it stops.
func TestSystemdUnit(t *testing.T) {
	unit, err := os.ReadFile("../../deploy/fencelock.service")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^ExecStart=/usr/local/bin/fencelock (.*)$`).FindSubmatch(unit)
	if m == nil || !strings.Contains(string(unit), "\nType=notify\n") || !strings.Contains(string(unit), "\nLimitNOFILE=") {
		t.Fatalf("the unit lacks ExecStart, Type=notify or LimitNOFILE:\n%s", unit)
	}
	dir := t.TempDir()
	config := filepath.Join(dir, "serve.yaml")
	if err := os.WriteFile(config, []byte("listen: 127.0.0.1:0\npeer-listen: 127.0.0.1:0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	args := strings.NewReplacer("/etc/fencelock/serve.yaml", config, "/var/lib/fencelock", filepath.Join(dir, "data")).
		Replace(string(m[1]))

	socket := filepath.Join(dir, "notify")
	manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	if err := manager.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	told := func(want string) {
		t.Helper()
		text := make([]byte, 256)
		n, err := manager.Read(text)
		if err != nil || string(text[:n]) != want {
			t.Errorf("the service manager gets %q, %v; want %q", text[:n], err, want)
		}
	}
	t.Setenv("NOTIFY_SOCKET", socket)
	p := start(t, strings.Fields(args)...)
	told(notifyReady)
	p.await("fencelock: serving clients at ")
	if err := syscall.Kill(p.Pid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	told(notifyStopping)
	p.expectExit(exitOK)
}
