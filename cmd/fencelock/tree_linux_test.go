package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
)

// family is a script that ignores TERM. It has a child, a child in a separate session, and a daemon whose parent has
// ended. Each of the four prints its process id.
const family = `trap '' TERM HUP
sleep 1000 & echo pid child $!
setsid sh -c 'echo pid session $$; exec sleep 1000' &
sh -c '(setsid sh -c "echo pid daemon \$\$; exec sleep 1000" &)'
echo pid command $$
wait
sleep 1000`

// familyOf starts the family under the lock "x" of the server at addr. It returns the processes of the family by
// name, and those of the program as "fencelock" and "guardian".
func familyOf(t *testing.T, addr string, options ...string) (*program, map[string]int) {
	t.Helper()
	p := start(t, on(addr, family, options...)...)
	pids := map[string]int{}
	t.Cleanup(func() {
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	for len(pids) < 4 {
		name, pid, _ := strings.Cut(p.await("pid "), " ")
		n, err := strconv.Atoi(pid)
		if err != nil {
			t.Fatal(err)
		}
		pids[name] = n
	}
	pids["guardian"] = parentOf(t, pids["command"])
	pids["fencelock"] = p.Pid()
	if parentOf(t, pids["guardian"]) != p.Pid() || parentOf(t, pids["daemon"]) != pids["guardian"] {
		t.Fatalf("the guardian is no child of fencelock, or did not adopt the daemon: %v", pids)
	}
	for _, name := range []string{"child", "session", "daemon"} { // a shell until it has begun its program
		awaitProgram(t, pids[name], "sleep")
	}
	return p, pids
}

func parentOf(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), ") ")
	parent, err := strconv.Atoi(strings.Fields(after)[1])
	if err != nil {
		t.Fatal(err)
	}
	return parent
}

// awaitProgram waits until a process executes a program.
func awaitProgram(t *testing.T, pid int, name string) {
	t.Helper()
	eventually(t, fmt.Sprintf("process %d executes %s", pid, name), func() bool {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		return err == nil && string(text) == name+"\n"
	})
}

// living are the names of the family that are alive.
func living(pids map[string]int) (names []string) {
	for _, name := range []string{"child", "session", "daemon", "command"} {
		if alive(pids[name]) {
			names = append(names, name)
		}
	}
	return names
}

// No process of the tree is alive when the next holder starts, whichever process of the program was killed or stopped.
func TestNobodyOutlivesTheLock(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		victim string
		sig    syscall.Signal
		code   int
		stderr string
	}{
		{"fencelock", syscall.SIGKILL, 0, ""},
		{"fencelock", syscall.SIGSTOP, exitLost, "was lost: expired"},
		{"guardian", syscall.SIGKILL, exitSignal + 9, "the guardian process has died"},
	} {
		t.Run(fmt.Sprintf("%v-of-%s", c.sig, c.victim), func(t *testing.T) {
			t.Parallel()
			server := containers.Redis(t)
			p, pids := familyOf(t, server.Addr(), "--ttl", "10s")
			// The next holder looks itself, when it has the lock. A process that has ended and that nobody has asked for
			// does not write.
			next := start(t, on(server.Addr(), fmt.Sprintf("cd /proc; grep -s ^State: %d/status %d/status %d/status %d/status | "+
				"grep -v Z || echo alone", pids["child"], pids["session"], pids["daemon"], pids["command"]))...)
			awaitWaiter(t, server.Addr())
			if left := living(pids); len(left) < 4 {
				t.Fatalf("before the fault only %v are alive: this test shows nothing", left)
			}
			if err := syscall.Kill(pids[c.victim], c.sig); err != nil {
				t.Fatal(err)
			}
			if got := next.output(); got != "alone" {
				t.Errorf("%q, and %v are alive while the next holder runs", got, living(pids))
			}
			next.expectExit(0)
			if c.stderr == "" {
				return // the test has killed it
			}
			if c.sig == syscall.SIGSTOP {
				if err := p.Resume(); err != nil {
					t.Fatal(err)
				}
			}
			p.expectExit(c.code, c.stderr)
		})
	}
}

// A stopped guardian or command does not keep the lock after TERM.
func TestTermEndsStoppedProcesses(t *testing.T) {
	t.Parallel()
	for _, victim := range []string{"guardian", "command"} {
		t.Run(victim, func(t *testing.T) {
			t.Parallel()
			server := containers.Redis(t)
			p, pids := familyOf(t, server.Addr(), "--stop-timeout", "300ms")
			if err := syscall.Kill(pids[victim], syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(p.Pid(), syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			p.expectExit(exitSignal+9, "was killed")
			if left := living(pids); len(left) > 0 {
				t.Errorf("%v are alive", left)
			}
			start(t, on(server.Addr(), "true", "--try")...).expectExit(0)
		})
	}
}

// A command that ends by a signal leaves its children, which keep the lock.
func TestKilledCommandLeavesItsChildren(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	p, pids := familyOf(t, server.Addr(), "--ttl", "10s")
	if err := syscall.Kill(pids["command"], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a message names the children", func() bool {
		return strings.Contains(p.Stderr(), fmt.Sprintf("sleep (process %d)", pids["daemon"]))
	})
	start(t, on(server.Addr(), "true", "--try")...).expectExit(exitHeld)
	for _, name := range []string{"child", "session", "daemon"} {
		if err := syscall.Kill(pids[name], syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	p.expectExit(exitSignal + 9)
	start(t, on(server.Addr(), "true", "--try")...).expectExit(0)
}

// A process that fencelock may not kill keeps the lock, which ends with its TTL.
func TestSurvivorKeepsTheLock(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("A PROCESS THAT SURVIVES KILL IS NOT TESTED: run this test as root")
	}
	dir, err := os.MkdirTemp("", "survivor") // others can read it, unlike the test's own directory
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	install := func(from, to string, mode os.FileMode) string {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		to = filepath.Join(dir, to)
		if err := errors.Join(os.WriteFile(to, text, 0o700), os.Chmod(to, mode), os.Chmod(dir, 0o755)); err != nil {
			t.Fatal(err)
		}
		return to
	}
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		t.Fatal(err)
	}
	root := install(setpriv, "setpriv", 0o755|os.ModeSetuid)
	binary := install(executable(t), "fencelock", 0o755)
	server := containers.Redis(t)
	cmd := exec.Command(setpriv, append([]string{"--reuid=65534", "--clear-groups", binary}, on(server.Addr(),
		`echo pid $$; exec "$0" --reuid=0 sleep 1000`, "--stop-timeout", "0")...)...)
	cmd.Args = append(cmd.Args, root)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	p := &program{fault.Start(t, cmd), t}
	pid := p.awaitPid("pid ")
	t.Cleanup(func() { syscall.Kill(pid, syscall.SIGKILL) })
	awaitProgram(t, pid, "sleep") // which belongs to root
	if err := syscall.Kill(p.Pid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.expectExit(exitSystem, fmt.Sprintf("survive KILL: sleep (process %d)", pid), "not released")
	if !alive(pid) {
		t.Error("the command is dead: this test shows nothing")
	}
	start(t, on(server.Addr(), "true", "--try")...).expectExit(exitHeld)
}

// Files that the caller has inherited keep their numbers in the command.
func TestInheritedFiles(t *testing.T) {
	t.Parallel()
	out := filepath.Join(t.TempDir(), "out")
	p := start(t, "run", "--backend", "memory://", "--name", "outer", "--", "sh", "-c",
		`exec 3>"$0" 4>&3 5>&3 6>&3 7>&3 8>&3 9>&3; exec "$@"`, out, "env", asProgram+"=1", executable(t),
		"run", "--backend", "memory://", "--name", "inner", "--", "sh", "-c",
		"for n in 3 4 5 6 7 8 9; do eval \"echo $n >&$n\" || exit 1; done; ls -l /proc/self/fd")
	if got := p.output(); strings.Contains(got, "socket:") {
		t.Errorf("the command has the guardian's socket:\n%s", got)
	}
	p.expectExit(0)
	if text, err := os.ReadFile(out); err != nil || string(text) != "3\n4\n5\n6\n7\n8\n9\n" {
		t.Errorf("%q, %v", text, err)
	}
}

// The guardian knows no secret: it inherits no environment from the caller.
func TestGuardianKnowsNoSecret(t *testing.T) {
	t.Parallel()
	p := start(t, "run", "--backend", "memory://", "--name", "x", "--", "sh", "-c",
		"tr '\\0' '\\n' </proc/$PPID/environ | cut -d= -f1 | grep -v ^GO; tr '\\0' ' ' </proc/$PPID/cmdline; echo")
	if got := p.output(); !strings.HasPrefix(got, "fencelock-guardian ") || strings.Contains(got, "memory") {
		t.Errorf("the guardian's environment and arguments: %q", got)
	}
	p.expectExit(0)
}
