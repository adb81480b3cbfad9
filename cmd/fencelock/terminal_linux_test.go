package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// typist sits at a new terminal in which a shell script runs as the session's leader.
type typist struct {
	t      *testing.T
	keys   *os.File
	screen *bufio.Reader
	cmd    *exec.Cmd
}

func atTerminal(t *testing.T, script string, args ...string) *typist {
	t.Helper()
	keys, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { keys.Close() })
	raw, err := keys.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var number int
	var failed error
	if err := raw.Control(func(fd uintptr) {
		if failed = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); failed == nil {
			number, failed = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()

	cmd := exec.Command("bash", append([]string{"--norc", "-c", script, "bash"}, args...)...)
	cmd.Env = append(os.Environ(), asProgram+"=1", "GORACE=atexit_sleep_ms=0")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	if err := keys.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return &typist{t, keys, bufio.NewReader(keys), cmd}
}

func (y *typist) typeIn(keys string) {
	y.t.Helper()
	if _, err := io.WriteString(y.keys, keys); err != nil {
		y.t.Fatal(err)
	}
}

// await waits for the next line on the screen that has text in it, and returns what follows there.
func (y *typist) await(text string) string {
	y.t.Helper()
	var seen []string
	for {
		line, err := y.screen.ReadString('\n')
		if _, rest, found := strings.Cut(line, text); found {
			return strings.TrimRight(rest, "\r\n")
		}
		seen = append(seen, line)
		if err != nil {
			y.t.Fatalf("await %q: %v; the screen:\n%s", text, err, strings.Join(seen, ""))
		}
	}
}

// atPrompt runs a script under a lock in the foreground of a terminal with job control, as from a prompt.
func atPrompt(t *testing.T, script, after string) *typist {
	t.Helper()
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("THE TERMINAL IS NOT TESTED: install bash")
	}
	// The script ends by reading a line: the terminal discards its output when the last process ends.
	return atTerminal(t, `set -m; "$@"; echo "code $?"; `+after,
		executable(t), "run", "--backend", "memory://", "--name", "x", "--verbose", "--", "bash", "-c", script)
}

func TestTerminalReachesTheCommand(t *testing.T) {
	t.Parallel()
	y := atPrompt(t, "read line; echo read $line; exit 3", `read line; echo "the shell read $line"; read line`)
	y.typeIn("one\n")
	y.await("read one")
	y.await("code 3")
	y.typeIn("two\n") // the shell has the terminal back
	y.await("the shell read two")
	y.typeIn("end\n")
}

func TestInterruptAtTheTerminal(t *testing.T) {
	t.Parallel()
	y := atPrompt(t, "read line; echo ready; sleep 1000", "read line")
	y.typeIn("the terminal is the command's\n")
	y.await("ready")
	y.typeIn("\x03")
	y.await(`fencelock: lock "x" was released`)
	y.await("code 130")
	y.typeIn("end\n")
}

func TestSuspendAtTheTerminal(t *testing.T) {
	t.Parallel()
	y := atPrompt(t, "read line; echo ready; read line; echo read $line; exit 3",
		`echo "the shell goes on"; fg; echo "code $?"; read line`)
	y.typeIn("the terminal is the command's\n")
	y.await("ready")
	y.typeIn("\x1a")
	y.await("the shell goes on")
	y.typeIn("one\n")
	y.await("read one")
	y.await("code 3")
	y.typeIn("end\n")
}

func TestSuspendOfFencelockItself(t *testing.T) {
	t.Parallel()
	y := atPrompt(t, "echo pid $PPID; read line; echo read $line; exit 3",
		`echo "the shell goes on"; read line; fg; echo "code $?"; read line`)
	guardian, err := strconv.Atoi(y.await("pid "))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(parentOf(t, guardian), syscall.SIGTSTP); err != nil {
		t.Fatal(err)
	}
	y.await("the shell goes on")
	y.typeIn("to the shell\n")
	y.typeIn("one\n")
	y.await("read one")
	y.await("code 3")
	y.typeIn("end\n")
}

// Whatever a terminal, pipes and signals do to a command, it can read from the terminal, and the lock is released.
func TestTerminalTable(t *testing.T) {
	t.Parallel()
	const (
		piped  = `echo piped | "$@"; echo "code ${PIPESTATUS[1]}"; `
		asJob  = `"$@" & `
		goesOn = `echo "the shell goes on"; read line; `
		foregr = `fg; echo "code $?"; `
		ended  = `read line`
		reads  = `cat; echo ready; read line </dev/tty; echo read $line; exit 3`
		// grandparent is the parent of the parent of this shell, which stands between fencelock and the command.
		grandparent = `$(sed -n 's/^PPid://p' /proc/$PPID/status)`
		readsIt     = `echo ready; read line </dev/tty; echo read $line; exit 3`
	)
	type step struct{ keys, want string }
	for name, c := range map[string]struct {
		shell, command string
		steps          []step
	}{
		"a pipe and /dev/tty": {piped + ended, reads, []step{
			{"", "ready"}, {"one\n", "read one"}, {"", "was released"}, {"", "code 3"},
		}},
		"a pipe, /dev/tty and Ctrl-C": {piped + ended, reads, []step{
			{"", "ready"}, {"\x03", "was released"}, {"", "code 130"},
		}},
		"a pipe, /dev/tty and Ctrl-Z": {piped + goesOn + foregr + ended, reads, []step{
			{"", "ready"}, {"\x1a", "the shell goes on"}, {"to the shell\n", ""},
			{"one\n", "read one"}, {"", "was released"}, {"", "code 3"},
		}},
		"a pipe, Ctrl-Z and TERM": {piped + goesOn + `kill %1; wait; ` + ended, reads, []step{
			{"", "ready"}, {"\x1a", "the shell goes on"}, {"to the shell\n", "was released"},
		}},
		"TERM while it asks for the terminal": {piped + ended, `kill ` + grandparent + `; ` + reads, []step{
			{"", "was released"}, {"", "code 143"},
		}},
		"a neighbour with the terminal": {
			`"$@" | bash -c 'cat; read line </dev/tty; echo "neighbour $line"'; ` + ended, `echo ready`,
			[]step{{"", "ready"}, {"one\n", "neighbour one"}},
		},
		"a job in the background that reads": {asJob + `wait %1; ` + goesOn + foregr + ended, readsIt, []step{
			{"", "ready"}, {"", "the shell goes on"}, {"to the shell\n", ""}, {"one\n", "read one"},
			{"", "was released"}, {"", "code 3"},
		}},
		"a job in the background and TERM": {
			asJob + `wait %1; ` + goesOn + `kill %1; wait; ` + ended, readsIt,
			[]step{{"", "ready"}, {"", "the shell goes on"}, {"to the shell\n", "was released"}},
		},
		"a script and Ctrl-C": {`bash -c 'trap "echo script interrupted" INT; "$@"; echo code $?' bash "$@"; ` + ended,
			`echo ready; sleep 1000`,
			[]step{{"", "ready"}, {"\x03", "was released"}, {"", "script interrupted"}, {"", "code 130"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			y := atTerminal(t, `set -m; `+c.shell, executable(t), "run", "--backend", "memory://", "--name", "x",
				"--verbose", "--", "bash", "-c", c.command)
			for _, s := range c.steps {
				if s.keys != "" {
					y.typeIn(s.keys)
				}
				if s.want != "" {
					y.await(s.want)
				}
			}
			y.typeIn("end\n")
		})
	}
}
