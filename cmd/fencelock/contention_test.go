//go:build unix

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/redis"
)

// on returns the arguments that run a shell script under the lock "x" of the server at addr.
func on(addr, script string, options ...string) []string {
	args := append([]string{"run", "--backend", "redis://" + addr, "--name", "x"}, options...)
	return append(args, "--", "sh", "-c", script)
}

// awaitWaiter returns when somebody waits for the lock "x".
func awaitWaiter(t *testing.T, addr string) {
	t.Helper()
	d, err := redis.Open(t.Context(), "redis://"+addr)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close(t.Context())
	eventually(t, "somebody waits", func() bool {
		info, err := d.Look(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		return info.Waiters > 0
	})
}

// answered starts a program with a wait. While the service does not answer in time, as on a busy machine, it starts
// the program again with a longer wait.
func answered(wait time.Duration, start func(wait string) *program) *program {
	p := start(wait.String())
	for isExit(p.end(), exitUnavailable) && wait < 10*time.Second {
		wait *= 2
		p = start(wait.String())
	}
	return p
}

func TestRedisIsRefusedForCorrectness(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	start(t, on(server.Addr(), "true", "--tier", "correctness")...).
		expectExit(exitUsage, "driver redis cannot serve the correctness tier")
}

func TestHeld(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	holder := start(t, on(server.Addr(), "echo in; cat", "--owner", "somebody")...)
	holder.await("in")
	refused := func(t *testing.T, how ...string) *program {
		p := start(t, on(server.Addr(), "echo in", how...)...)
		if text := p.output(); text != "" {
			t.Errorf("the command ran: %q", text)
		}
		return p
	}
	t.Run("try", func(t *testing.T) { refused(t, "--try").expectExit(exitHeld, `lock "x"`, "held", "somebody") })
	t.Run("wait", func(t *testing.T) {
		answered(300*time.Millisecond, func(wait string) *program { return refused(t, "--wait", wait) }).
			expectExit(exitHeld, `lock "x"`, "held")
	})
	t.Run("interrupted", func(t *testing.T) {
		p := start(t, on(server.Addr(), "echo in")...)
		awaitWaiter(t, server.Addr())
		if err := syscall.Kill(p.Pid(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		p.expectExit(exitSignal+int(syscall.SIGTERM), "waiting")
	})
	next := start(t, on(server.Addr(), "echo in", "--wait", "1m")...)
	awaitWaiter(t, server.Addr())
	holder.CloseStdin()
	holder.expectExit(0)
	next.await("in")
	next.expectExit(0)
}

func TestNeverBothInside(t *testing.T) {
	t.Parallel()
	const runs, rounds = 2, 20
	server := containers.Redis(t)
	journal := filepath.Join(t.TempDir(), "journal")
	for i := range runs {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for round := range rounds {
				id := fmt.Sprintf("%d.%d", i, round)
				// The command starts a process between the two lines, which is time enough for another to come between.
				script := fmt.Sprintf("echo begin %s >>%s; sleep 0.01; echo end %s >>%s", id, journal, id, journal)
				start(t, on(server.Addr(), script)...).expectExit(0)
			}
		})
	}
	t.Cleanup(func() { // after the parallel ones
		text, err := os.ReadFile(journal)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		if len(lines) != 2*runs*rounds {
			t.Fatalf("%d lines; want %d:\n%s", len(lines), 2*runs*rounds, text)
		}
		for i := 0; i < len(lines); i += 2 {
			if id, ok := strings.CutPrefix(lines[i], "begin "); !ok || lines[i+1] != "end "+id {
				t.Fatalf("two were inside at once, line %d:\n%s", i+1, text)
			}
		}
	})
}

func TestAtLeastKeepsTheNameClosed(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	start(t, on(server.Addr(), "true", "--at-least", "5m")...).expectExit(0)
	start(t, on(server.Addr(), "true", "--try")...).expectExit(exitHeld)
}

func TestReleaseThatIsNotConfirmed(t *testing.T) {
	t.Parallel()
	server := containers.Redis(t)
	p := start(t, on(server.Addr(), "echo in; cat; exit 6")...)
	p.await("in")
	if err := server.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.CloseStdin()
	p.expectExit(6, `the release of "x" was not confirmed`)
}
