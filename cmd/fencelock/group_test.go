//go:build unix

package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
)

// runScript starts a shell script under a lock that exists only in its fencelock process.
func runScript(t *testing.T, script string, options ...string) *program {
	t.Helper()
	args := append([]string{"run", "--backend", "memory://", "--name", "x"}, options...)
	return start(t, append(args, "--", "sh", "-c", script)...)
}

func TestSignalsArePassedOn(t *testing.T) {
	t.Parallel()
	for name, sig := range map[string]syscall.Signal{
		"INT": syscall.SIGINT, "TERM": syscall.SIGTERM, "HUP": syscall.SIGHUP, "QUIT": syscall.SIGQUIT,
		"USR1": syscall.SIGUSR1, "USR2": syscall.SIGUSR2,
	} {
		t.Run(name, func(t *testing.T) {
			// The child of a script without job control ignores INT and QUIT.
			options := map[bool][]string{true: {"--kill-children"}}[name == "USR1" || name == "USR2"]
			p := runScript(t, "trap 'echo got it; exit 7' "+name+"; sleep 1000 & echo ready; while :; do wait; done",
				options...)
			p.await("ready")
			if err := syscall.Kill(p.Pid(), sig); err != nil {
				t.Fatal(err)
			}
			p.await("got it")
			p.expectExit(7)
		})
	}
}

func TestChildrenKeepTheLock(t *testing.T) {
	t.Parallel()
	p := runScript(t, "sleep 1000 & echo pid $!; exit 4", "--verbose")
	pid := p.awaitPid("pid ")
	eventually(t, "a message names the child", func() bool { // which may still be the shell
		return strings.Contains(p.Stderr(), "stays until its children end: ") &&
			strings.Contains(p.Stderr(), fmt.Sprintf(" (process %d)", pid))
	})
	if !p.Running() || !alive(pid) {
		t.Error("the child is not alive, or the lock does not stay")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.expectExit(4, "was released")
}

func TestKillChildren(t *testing.T) {
	t.Parallel()
	for name, trap := range map[string]string{"obedient": "", "ignoring TERM": "trap '' TERM; "} {
		t.Run(name, func(t *testing.T) {
			p := runScript(t, trap+"sleep 1000 & echo pid $!; exit 4", "--kill-children", "--kill-after", "200ms",
				"--verbose")
			pid := p.awaitPid("pid ")
			p.expectExit(4, "was released")
			if alive(pid) {
				t.Error("a process that the command left behind runs on without the lock")
			}
		})
	}
}

func TestIgnoredHangupStaysIgnored(t *testing.T) {
	t.Parallel()
	p := start(t, "run", "--backend", "memory://", "--name", "outer", "--", "sh", "-c",
		`trap '' HUP; "$@" & pid=$!; read line; kill -HUP $pid; wait $pid; echo code $?`, "sh",
		"env", asProgram+"=1", executable(t),
		"run", "--backend", "memory://", "--name", "inner", "--", "sh", "-c", "echo ready; kill -HUP $$; exit 5")
	p.await("ready")
	if err := p.Send("go"); err != nil {
		t.Fatal(err)
	}
	p.await("code 5")
	p.expectExit(0)
}
