//go:build unix

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/testtier"
)

// asProgram, in the environment, makes the test binary the program itself, so that the race detector watches it too.
const asProgram = "FENCELOCK_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Unsetenv(asProgram)
		main()
	}
	os.Unsetenv("FENCELOCK_BACKEND")
	// The programs that the tests start inherit ignored signals, as under nohup, but not caught signals.
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
	testtier.Wide(8)
	os.Exit(m.Run())
}

// program is one run of fencelock. It has a process group without its command: Pause, Resume and Kill reach only
// fencelock.
type program struct {
	*fault.Child
	t *testing.T
}

func start(t *testing.T, args ...string) *program {
	t.Helper()
	cmd := exec.Command(executable(t), args...)
	cmd.Env = append(os.Environ(), asProgram+"=1", "GORACE=atexit_sleep_ms=0") // a second for each run otherwise
	return &program{fault.Start(t, cmd), t}
}

func executable(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

// await returns the rest of the next line of standard output that starts with prefix.
func (p *program) await(prefix string) string {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	rest, err := p.Await(ctx, prefix)
	if err != nil {
		p.t.Fatalf("%v; standard error:\n%s", err, p.Stderr())
	}
	return rest
}

// awaitPid is await for the number of a process.
func (p *program) awaitPid(prefix string) int {
	p.t.Helper()
	pid, err := strconv.Atoi(p.await(prefix))
	if err != nil {
		p.t.Fatal(err)
	}
	return pid
}

// output returns the lines until the end of standard output.
func (p *program) output() string {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	var lines []string
	for {
		line, err := p.Line(ctx)
		if ctx.Err() != nil {
			p.t.Fatal(err)
		}
		if err != nil {
			return strings.Join(lines, "\n")
		}
		lines = append(lines, line)
	}
}

// expectExit waits for the end and checks the exit code, and that standard error has the parts.
func (p *program) expectExit(want int, parts ...string) {
	p.t.Helper()
	if err := p.end(); !isExit(err, want) {
		p.t.Fatalf("fencelock: %v; want exit code %d; standard error:\n%s", err, want, p.Stderr())
	}
	text := p.Stderr()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			p.t.Errorf("no %q in standard error:\n%s", part, text)
		}
	}
}

// end waits for the end, and returns what Wait says.
func (p *program) end() error {
	p.t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(patience):
		p.t.Fatalf("fencelock does not end; standard error:\n%s", p.Stderr())
		return nil
	}
}

// isExit reports whether err is the result of a program that exits with code.
func isExit(err error, code int) bool {
	return err == nil && code == 0 || err != nil && strings.HasSuffix(err.Error(), fmt.Sprintf("exit code %d", code))
}

// alive reports whether a process runs: a zombie does not.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) == syscall.ESRCH {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil { // it ended before, or, with ESRCH, between the open and the read
		_, err := os.Stat("/proc/self/stat")
		return err != nil // no /proc here
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(after, "Z") && !strings.HasPrefix(after, "X")
}

// eventually polls a condition that sends no notification.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !condition(); {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestExitCodes(t *testing.T) {
	t.Parallel()
	lock := func(args ...string) []string {
		return append([]string{"run", "--backend", "memory://", "--name", "x"}, args...)
	}
	for name, c := range map[string]struct {
		args   []string
		code   int
		stderr string
	}{
		"success":                 {lock("--", "true"), 0, ""},
		"the command's own":       {lock("--", "sh", "-c", "exit 3"), 3, ""},
		"without dashes":          {lock("sh", "-c", "exit 3"), 3, ""},
		"killed by a signal":      {lock("--", "sh", "-c", "kill -9 $$"), 128 + 9, ""},
		"command not found":       {lock("--", "no-such-command-anywhere"), 127, "not found"},
		"path not found":          {lock("--", "/no/such/command"), 127, "no such file"},
		"command not executable":  {lock("--", "/etc/passwd"), 126, "permission denied"},
		"no subcommand":           {nil, 64, "a subcommand is missing"},
		"unknown subcommand":      {[]string{"walk"}, 64, `no subcommand "walk"`},
		"no backend":              {[]string{"run", "--name", "x", "true"}, 64, "neither FENCELOCK_BACKEND nor"},
		"no name":                 {[]string{"run", "--backend", "memory://", "true"}, 64, "--name is missing"},
		"no command":              {lock(), 64, "command to run is missing"},
		"unknown flag":            {lock("--frobnicate", "true"), 64, "-frobnicate"},
		"bad duration":            {lock("--ttl", "30", "true"), 64, "-ttl"},
		"negative TTL":            {lock("--ttl", "-1s", "true"), 64, "--ttl"},
		"TTL below the driver's":  {lock("--ttl", "1ms", "true"), 64, "invalid TTL"},
		"unknown tier":            {lock("--tier", "hope", "true"), 64, "--tier hope"},
		"grace over half the TTL": {lock("--ttl", "10s", "--kill-after", "6s", "true"), 64, "more than half"},
		"negative grace":          {lock("--kill-after", "-1s", "true"), 64, "--kill-after"},
		"no wait and a wait":      {lock("--try", "--wait", "1s", "true"), 64, "exclude each other"},
		"zero wait":               {lock("--wait", "0", "true"), 64, "--wait"},
		"zero minimum":            {lock("--at-least", "0", "true"), 64, "--at-least"},
		"permits of what":         {lock("--permits", "3", "true"), 64, "--permits 3: want N/LIMIT"},
		"more permits than limit": {lock("--permits", "3/2", "true"), 64, "--permits 3/2"},
		"two kinds":               {lock("--permits", "1/2", "--shared", "true"), 64, "exclude each other"},
		"kind that is not there":  {lock("--backend", "bare://", "--shared", "true"), 64, "shared"},
		"quiet and verbose":       {lock("--quiet", "--verbose", "true"), 64, "exclude each other"},
		"bad name":                {lock("--name", "a\nb", "true"), 64, "name"},
		"unknown scheme":          {lock("--backend", "carrier-pigeon://loft", "true"), 64, "carrier-pigeon"},
		"no URL":                  {lock("--backend", "localhost", "true"), 64, "no scheme"},
		"service does not answer": {lock("--backend", "redis://127.0.0.1:1", "true"), 69, "unavailable"},
		"verbose":                 {lock("--verbose", "true"), 0, `lock "x" was acquired`},
		"help":                    {[]string{"help"}, 0, ""},
		"help of run":             {[]string{"help", "run"}, 0, ""},
		"version":                 {[]string{"version"}, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, c.args...)
			p.expectExit(c.code, c.stderr)
			if text := p.Stderr(); c.stderr == "" && text != "" {
				t.Errorf("standard error:\n%s", text)
			}
		})
	}
}

func TestHelpListsExitCodes(t *testing.T) {
	t.Parallel()
	p := start(t, "run", "--help")
	help := p.output()
	p.expectExit(0)
	for _, code := range []int{
		exitUsage, exitUnavailable, exitSystem, exitHeld, exitLost, exitCannotRun, exitNotFound, exitSignal,
	} {
		if !strings.Contains(help, fmt.Sprintf("  %d", code)) {
			t.Errorf("no exit code %d in the help", code)
		}
	}
}

func TestQuietSaysNothing(t *testing.T) {
	t.Parallel()
	p := start(t, "run", "--quiet", "--backend", "redis://127.0.0.1:1", "--name", "x", "true")
	p.expectExit(exitUnavailable)
	if text := p.Stderr(); text != "" {
		t.Errorf("standard error:\n%s", text)
	}
}

func TestEnvironment(t *testing.T) {
	print := "echo $FENCELOCK_NAME,$FENCELOCK_OWNER,${FENCELOCK_TOKEN-unset},${FENCELOCK_TOKEN_SPACE-unset}"
	t.Setenv("FENCELOCK_TOKEN", "of an outer lock")
	t.Setenv("FENCELOCK_TOKEN_SPACE", "of an outer lock")
	t.Setenv("FENCELOCK_BACKEND", "memory://")

	p := start(t, "run", "--name", "a b", "--owner", "me", "--", "sh", "-c", print)
	if got, want := p.output(), "a b,me,,unset"; got != want {
		t.Errorf("efficiency tier: %q; want %q", got, want)
	}
	p.expectExit(0)

	p = start(t, "run", "--name", "a b", "--owner", "me", "--tier", "correctness", "--", "sh", "-c", print)
	got := p.output()
	space, found := strings.CutPrefix(got, "a b,me,2,")
	if !found || space == "" || space == "unset" || space == "of an outer lock" {
		t.Errorf("correctness tier: %q; want token 2 and its space", got)
	}
	p.expectExit(0)
}

func TestStandardInputReachesTheCommand(t *testing.T) {
	t.Parallel()
	p := start(t, "run", "--backend", "memory://", "--name", "x", "--", "cat")
	if err := p.Send("hello"); err != nil {
		t.Fatal(err)
	}
	p.await("hello")
	p.CloseStdin()
	p.expectExit(0)
}
