//go:build unix

package main

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance/fault"
)

// Idle connections over HTTP leave a member the file descriptors that its log and its clients need.
func TestIdleHTTPConnectionsLeaveFiles(t *testing.T) {
	t.Parallel()
	args := []string{"-c", `ulimit -n 256 && exec "$0" "$@"`, executable(t), "serve", "--listen", "127.0.0.1:0",
		"--peer-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--limit", "client-share=100",
		"--data-dir", filepath.Join(t.TempDir(), "data")}
	cmd := exec.Command("sh", args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	p := &program{fault.Start(t, cmd), t}
	url := "fencelock://" + p.await("fencelock: serving clients at ")
	door := p.await("fencelock: serving HTTP at ")
	first := tokenAt(t, url)
	var idle []net.Conn
	for range 400 {
		c, err := net.Dial("tcp", strings.TrimPrefix(door, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		idle = append(idle, c)
	}
	eventually(t, "connections are turned away", func() bool {
		return strings.Contains(p.Stderr(), "connections are refused")
	})
	for range 3 {
		if next := tokenAt(t, url); next <= first {
			t.Errorf("token %d after %d", next, first)
		}
	}
	for _, c := range idle {
		c.Close()
	}
	eventually(t, "HTTP is served again", func() bool {
		resp, err := http.Get(door + "/livez")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
	p.terminate()
}
