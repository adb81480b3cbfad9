//go:build unix

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/freeport"
)

func TestWaitCoversTheFirstConnection(t *testing.T) {
	t.Parallel()
	addr := freeport.Addresses(t, 1)[0]
	args := []string{"run", "--backend", "fencelock://" + addr, "--name", "x"}
	start(t, append(args, "--wait", "1ms", "true")...).expectExit(exitUnavailable)
	p := start(t, append(args, "--wait", patience.String(), "--", "echo", "in")...)
	eventually(t, "it says that it tries again", func() bool { return strings.Contains(p.Stderr(), "trying again for") })
	startServerAt(t, addr)
	p.await("in")
	p.expectExit(exitOK)
	if n := strings.Count(p.Stderr(), "\n"); n != 1 {
		t.Errorf("%d lines while it tried again; want 1:\n%s", n, p.Stderr())
	}
}

func TestWaitNamesTheHolder(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	holder := start(t, runAt(url, "--owner", "somebody")...)
	holder.await("in")
	p := start(t, runAt(url, "--log-format", "json")...)
	eventually(t, "a message names the holder", func() bool { return strings.Contains(p.Stderr(), "held by somebody") })
	var line struct {
		Time, Level, Msg string
		Locks            []string
	}
	if err := json.Unmarshal([]byte(p.Stderr()), &line); err != nil {
		t.Fatalf("%v: %s", err, p.Stderr())
	}
	form := regexp.MustCompile(`^waiting for lock "x", held by somebody since \d{4}-\d\d-\d\dT\S+ \(\d+s\)$`)
	if !form.MatchString(line.Msg) || line.Level != "WARN" || line.Time == "" || len(line.Locks) != 1 || line.Locks[0] != "x" {
		t.Errorf("%+v", line)
	}
	holder.CloseStdin()
	holder.expectExit(exitOK)
	p.await("in")
	p.CloseStdin()
	p.expectExit(exitOK)
}

func TestRenewalWarningsAreFew(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	p := start(t, on(server.Addr(), "echo in; cat", "--ttl", "6s")...)
	p.await("in")
	if err := server.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.expectExit(exitLost, "was lost: expired")
	if err := server.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The remaining time halves between warnings: from six seconds to ten milliseconds.
	if n := strings.Count(p.Stderr(), "cannot be renewed and is lost in"); n < 1 || n > 10 {
		t.Errorf("%d warnings; want 1 to 10:\n%s", n, p.Stderr())
	}
	for line := range strings.Lines(p.Stderr()) {
		if !strings.HasPrefix(line, "fencelock: ") {
			t.Errorf("a line without prefix: %q", line)
		}
	}
}

func TestConflictExitCode(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	holder := start(t, on(server.Addr(), "echo in; cat")...)
	holder.await("in")
	status := filepath.Join(t.TempDir(), "status")
	start(t, on(server.Addr(), "true", "--try", "-E", "42", "--status-file", status)...).expectExit(42)
	if got := readStatus(t, status); got.Outcome != outcomeHeld || *got.ExitCode != 42 || got.CommandExitCode != nil {
		t.Errorf("%+v", got)
	}
	start(t, on(server.Addr(), "true", "--try", "--conflict-exit-code", "0")...).expectExit(0)
	start(t, on(server.Addr(), "true", "--try", "-E", "256")...).expectExit(exitUsage, "--conflict-exit-code 256")
}

func readStatus(t *testing.T, path string) (s runStatus) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The status file distinguishes a command's exit code from the same code of fencelock.
func TestStatusFile(t *testing.T) {
	t.Parallel()
	status := filepath.Join(t.TempDir(), "status")
	p := start(t, "run", "--backend", "memory://", "--name", "x", "--tier", "correctness", "--owner", "me",
		"--status-file", status, "--", "sh", "-c", "echo pid $$; cat; exit 75")
	pid := p.awaitPid("pid ")
	var s runStatus
	eventually(t, "the command runs", func() bool { s = readStatus(t, status); return s.State == "running" })
	if s.PID != p.Pid() || s.CommandPID != pid || len(s.Locks) != 1 || s.Locks[0].LockKey != "x" ||
		s.Locks[0].OwnerID != "me" || s.Locks[0].FencingToken == 0 || s.Locks[0].TokenSpace == "" {
		t.Errorf("%+v", s)
	}
	p.CloseStdin()
	p.expectExit(exitHeld)
	s = readStatus(t, status)
	if s.State != "ended" || s.Outcome != outcomeExited || *s.ExitCode != 75 || *s.CommandExitCode != 75 || s.Locks != nil {
		t.Errorf("%+v", s)
	}
	start(t, "run", "--backend", "memory://", "--name", "x", "--status-file", "/no/such/directory/status", "echo", "in").
		expectExit(exitNoCreate, "--status-file")
}

func TestBackendFile(t *testing.T) {
	t.Setenv("FENCELOCK_BACKEND", "")
	file := filepath.Join(t.TempDir(), "backend")
	if err := os.WriteFile(file, []byte("memory://\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, "run", "--backend-file", file, "--name", "x", "true").expectExit(0)
	t.Setenv("FENCELOCK_BACKEND_FILE", file)
	start(t, "run", "--name", "x", "true").expectExit(0)
	start(t, "run", "--backend-file", file, "--backend", "memory://", "--name", "x", "true").
		expectExit(exitUsage, "exclude each other")
	start(t, "run", "--backend-file", file+"?", "--name", "x", "true").expectExit(exitUsage, "no such file")

	// A variable with a password does not reach the command.
	t.Setenv("FENCELOCK_BACKEND", "redis://user:secret@127.0.0.1:1")
	start(t, "run", "--name", "x", "true").expectExit(exitUsage, "exclude each other")
	t.Setenv("FENCELOCK_BACKEND_FILE", "")
	p := start(t, "run", "--name", "x", "true")
	p.expectExit(exitUnavailable)
	p = start(t, "run", "--backend", "memory://", "--name", "x", "env")
	if text := p.output(); strings.Contains(text, "secret") || !strings.Contains(text, "FENCELOCK_NAME=x") {
		t.Errorf("the command's environment:\n%s", text)
	}
	p.expectExit(0)
}

func TestSeveralNames(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	p := start(t, "run", "--backend", url, "--tier", "correctness", "--name", "a", "--name", "b", "--owner", "me", "--metadata",
		"job=7", "--", "sh", "-c", "echo $FENCELOCK_NAME ${FENCELOCK_TOKEN-unset}; echo \"$FENCELOCK_CLAIMS\"; cat")
	p.await("a b unset")
	for _, name := range []string{"a", "b"} {
		if claim := p.await(""); !strings.Contains(claim, name) {
			t.Errorf("claim %q; want one of %s", claim, name)
		}
		start(t, "run", "--backend", url, "--name", name, "--try", "true").expectExit(exitHeld, "me")
		held := start(t, "holder", name, "--backend", url, "--json")
		if text := held.output(); !strings.Contains(text, `"job":"7"`) {
			t.Errorf("metadata: %s", text)
		}
	}
	start(t, "run", "--backend", url, "--name", "c", "--name", "b", "--try", "true").expectExit(exitHeld, `"c", "b"`)
	start(t, "run", "--backend", url, "--name", "c", "--try", "true").expectExit(exitOK)
	p.CloseStdin()
	p.expectExit(exitOK)
	start(t, "run", "--backend", url, "--name", "b", "--name", "c", "--try", "true").expectExit(exitOK)
	start(t, "run", "--backend", url, "--name", "b", "--metadata", "x", "true").expectExit(exitUsage, "KEY=VALUE")
}

func TestHierarchical(t *testing.T) {
	t.Parallel()
	url := startServer(t)
	p := start(t, "run", "--backend", url, "--name", "a/b", "--hierarchical", "--", "sh", "-c", "echo in; cat")
	p.await("in")
	for name, code := range map[string]int{"a": exitHeld, "a/b": exitHeld, "a/b/c": exitHeld, "a/c": exitOK} {
		start(t, "run", "--backend", url, "--name", name, "--hierarchical", "--try", "true").expectExit(code)
	}
	p.CloseStdin()
	p.expectExit(exitOK)
}
