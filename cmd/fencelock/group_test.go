//go:build unix

package main

import (
	"runtime"
	"syscall"
	"testing"
)

// runScript starts a shell script under a lock of its own process.
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
			p := runScript(t, "trap 'echo got it; exit 7' "+name+"; sleep 1000 & echo ready; while :; do wait; done")
			p.await("ready")
			if err := syscall.Kill(p.Pid(), sig); err != nil {
				t.Fatal(err)
			}
			p.await("got it")
			p.expectExit(7)
		})
	}
}

func TestLeftoversDieBeforeTheRelease(t *testing.T) {
	t.Parallel()
	for name, trap := range map[string]string{"obedient": "", "ignoring TERM": "trap '' TERM; "} {
		t.Run(name, func(t *testing.T) {
			p := runScript(t, trap+"sleep 1000 & echo pid $!; exit 4", "--kill-after", "200ms", "--verbose")
			pid := p.awaitPid("pid ")
			p.expectExit(4, "is given back")
			if alive(pid) {
				t.Error("a process that the command left behind runs on without the lock")
			}
		})
	}
}

func TestCommandDiesWithFencelock(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux kills the children of a killed process")
	}
	p := runScript(t, "trap '' TERM HUP; echo pid $$; exec sleep 1000")
	pid := p.awaitPid("pid ")
	if !alive(pid) {
		t.Fatal("the command does not run")
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the command is dead", func() bool { return !alive(pid) })
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
