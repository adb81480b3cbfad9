package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/internal/testtier"
)

// deaths is the table of docs/CLI.md: what each death and each stop leaves, and the test that shows it.
var deaths = []struct{ event, writes, free, test string }{
	{"`kill -9` of fencelock, also by the OOM killer", "none", "when the TTL ends", "TestNobodyOutlivesTheLock"},
	{"`kill -9` of the guardian", "none", "as soon as every process is dead", "TestNobodyOutlivesTheLock"},
	{"`kill -9` of both at the same time", "children of COMMAND; not COMMAND itself", "when the TTL ends",
		"TestDeathOfBothLeavesChildren"},
	{"`kill -9` of COMMAND", "none", "when its last child has ended", "TestKilledCommandLeavesItsChildren"},
	{"the OOM killer ends a child of COMMAND", "none", "when COMMAND has ended", "TestMemoryLimitOfAContainer"},
	{"SIGSTOP of fencelock", "none", "when the TTL ends", "TestNobodyOutlivesTheLock"},
	{"SIGSTOP of the guardian", "none", "no change: fencelock resumes the guardian", "TestStopsThatKeepTheLock"},
	{"SIGSTOP of COMMAND", "none", "after COMMAND is resumed and has ended, or after TERM to fencelock",
		"TestStopsThatKeepTheLock"},
	{"`docker stop` with a grace period longer than --stop-timeout", "none", "as soon as every process is dead",
		"TestStopOfAContainer"},
	{"`docker stop` with a shorter grace period, `docker kill`", "none", "when the TTL ends", "TestStopOfAContainer"},
	{"COMMAND ignores TERM", "none", "after --stop-timeout and KILL", "TestTermEndsStoppedProcesses"},
	{"a process survives KILL", "that process", "when the TTL ends; fencelock exits with 71", "TestSurvivorKeepsTheLock"},
}

// The table of docs/CLI.md is that of the tests, and each test exists.
func TestDeathsAreDocumented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/CLI.md")
	if err != nil {
		t.Fatal(err)
	}
	want := "| event | processes that still write when the next holder starts | when the lock becomes free | test |\n|---|---|---|---|\n"
	for _, d := range deaths {
		want += fmt.Sprintf("| %s | %s | %s | `%s` |\n", d.event, d.writes, d.free, d.test)
	}
	if !strings.Contains(string(text), want) {
		t.Errorf("docs/CLI.md lacks this table:\n%s", want)
	}
	var sources strings.Builder
	for _, file := range []string{"deaths_linux_test.go", "tree_linux_test.go"} {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		sources.Write(source)
	}
	for _, d := range deaths {
		if !strings.Contains(sources.String(), "\nfunc "+d.test+"(t *testing.T) {") {
			t.Errorf("there is no %s", d.test)
		}
	}
}

// Without fencelock and guardian nobody ends the children of the command, which the help says. The kernel ends the
// command itself.
func TestDeathOfBothLeavesChildren(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	p, pids := familyOf(t, server.Addr(), "--ttl", "10s")
	// Stopped, fencelock cannot kill them when the guardian dies.
	if err := p.Pause(); err != nil {
		t.Fatal(err)
	}
	for _, victim := range []string{"guardian", "fencelock"} {
		if err := syscall.Kill(pids[victim], syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	start(t, on(server.Addr(), "true")...).expectExit(0)
	eventually(t, "the command is dead", func() bool { return !alive(pids["command"]) })
	if left := living(pids); len(left) != 3 {
		t.Errorf("%v are alive: docs/CLI.md and the help promise less than there is", left)
	}
}

// fencelock continues a stopped guardian, and a stopped command keeps the lock: fencelock renews it.
func TestStopsThatKeepTheLock(t *testing.T) {
	t.Parallel()
	for _, victim := range []string{"guardian", "command"} {
		t.Run(victim, func(t *testing.T) {
			t.Parallel()
			server := containers.Redis(t)
			p, pids := familyOf(t, server.Addr(), "--stop-timeout", "300ms")
			if err := syscall.Kill(pids[victim], syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			if victim == "guardian" {
				eventually(t, "the guardian is continued", func() bool { return stateOf(t, pids[victim]) != "T" })
			}
			start(t, on(server.Addr(), "true", "--try")...).expectExit(exitHeld)
			if left := living(pids); len(left) != 4 {
				t.Errorf("only %v are alive", left)
			}
			if err := syscall.Kill(p.Pid(), syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			p.expectExit(exitSignal + 9)
			start(t, on(server.Addr(), "true", "--try")...).expectExit(0)
		})
	}
}

// stateOf returns the state of a process, such as T for stopped.
func stateOf(t *testing.T, pid int) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), ") ")
	return after[:1]
}

// box is a container in which fencelock runs as the first process, with the programs of this machine and its network.
type box struct {
	t    *testing.T
	id   string
	file string // the command writes to it
}

// boxed starts fencelock with a script in a container.
func boxed(t *testing.T, addr, script string, limits, options []string) *box {
	t.Helper()
	testtier.Only(t)
	image := os.Getenv("FENCELOCK_IMAGE_REDIS")
	if image == "" {
		image = "redis:8"
	}
	dir := t.TempDir()
	b := &box{t: t, file: filepath.Join(dir, "written")}
	if err := os.WriteFile(b.file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	self := executable(t)
	args := append([]string{
		"run", "-d", "--network", "host", "--label", "org.testcontainers=true", "-e", asProgram + "=1", "--entrypoint", self,
		"-v", "/usr:/usr:ro", "-v", self + ":" + self + ":ro", "-v", dir + ":" + dir,
	}, limits...)
	b.id = b.docker(append(append(args, image), on(addr, strings.ReplaceAll(script, "FILE", b.file), options...)...)...)
	t.Cleanup(func() { _ = exec.Command("docker", "rm", "-f", "-v", b.id).Run() })
	return b
}

func (b *box) docker(args ...string) string {
	b.t.Helper()
	cmd := exec.Command("docker", args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		b.t.Fatalf("docker %s: %v: %s", strings.Join(args, " "), err, &stderr)
	}
	return strings.TrimSpace(string(out))
}

func (b *box) written() string {
	text, err := os.ReadFile(b.file)
	if err != nil {
		b.t.Fatal(err)
	}
	return string(text)
}

// awaitWriter returns when the command writes.
func (b *box) awaitWriter() {
	b.t.Helper()
	eventually(b.t, "the command writes", func() bool {
		if b.docker("inspect", "-f", "{{.State.Running}}", b.id) != "true" {
			b.t.Fatalf("the container has ended: %s", b.docker("logs", b.id))
		}
		return b.written() != ""
	})
}

// expectAlone starts the next holder, and expects that nobody writes while it runs.
func (b *box) expectAlone(addr string) {
	b.t.Helper()
	next := start(b.t, on(addr, fmt.Sprintf("before=$(wc -c <%[1]s); sleep 0.5; [ $before = $(wc -c <%[1]s) ]", b.file))...)
	next.expectExit(0)
}

// expectCode waits for the end of the container.
func (b *box) expectCode(want string) {
	b.t.Helper()
	if got := b.docker("wait", b.id); got != want {
		b.t.Errorf("the container exits with %s; want %s: %s", got, want, b.docker("logs", b.id))
	}
}

// writer is a script that ignores TERM. Its child writes in a separate session.
const writer = `trap '' TERM; setsid sh -c "trap '' TERM; while echo x >>FILE; do sleep 0.01; done" & wait; wait`

// The stop of a container ends in a release if there is time to kill the command. If not, the TTL decides.
func TestStopOfAContainer(t *testing.T) {
	t.Parallel()
	testtier.Only(t)
	for name, c := range map[string]struct {
		ttl, stop string
		within    string
		code      string
	}{
		// An hour: only a release makes the lock free in time.
		"with time":    {"1h", "300ms", "60", "137"},
		"without time": {"3s", "1h", "1", "137"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := containers.Redis(t).Addr()
			b := boxed(t, addr, writer, nil, []string{"--ttl", c.ttl, "--kill-after", "1s", "--stop-timeout", c.stop})
			b.awaitWriter()
			b.docker("stop", "-t", c.within, b.id)
			b.expectCode(c.code)
			b.expectAlone(addr)
		})
	}
}

// If a child exceeds the memory of the container, its command and the lock live on.
func TestMemoryLimitOfAContainer(t *testing.T) {
	t.Parallel()
	testtier.Only(t)
	addr := containers.Redis(t).Addr()
	b := boxed(t, addr, "tail /dev/zero; echo $? >>FILE; until [ -e FILE.end ]; do sleep 0.05; done; exit 3",
		[]string{"--memory", "512m", "--memory-swap", "512m"}, []string{"--ttl", "1h"})
	b.awaitWriter()
	if got := strings.TrimSpace(b.written()); got != "137" {
		t.Fatalf("the child of the command ended with %s: this test shows nothing", got)
	}
	start(t, on(addr, "true", "--try")...).expectExit(exitHeld)
	if err := os.WriteFile(b.file+".end", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b.expectCode("3")
	start(t, on(addr, "true", "--try")...).expectExit(0)
}
