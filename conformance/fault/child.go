package fault

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// roleEnv is the environment variable with the role of a child.
const roleEnv = "FENCELOCK_FAULT_ROLE"

// Role is the function of a child process. It reads the lines that the parent sends from in, and writes lines to the
// parent on standard output (fmt.Println). Its result is the exit code. The process exits when the parent does.
type Role func(in <-chan string, args []string) int

// RunRole runs the role of a process that StartRole started, and then does not return. A test binary calls it first
// in TestMain.
func RunRole(roles map[string]Role) {
	name := os.Getenv(roleEnv)
	if name == "" {
		return
	}
	os.Unsetenv(roleEnv)
	role, ok := roles[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "fault: no role %q in this binary\n", name)
		os.Exit(2)
	}
	in := make(chan string, 64)
	go func() {
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			in <- lines.Text()
		}
		os.Exit(3)
	}()
	os.Exit(role(in, os.Args[1:]))
}

// Child is a real process under the control of a test: goroutines cannot be paused or killed. Every method may be
// called from any goroutine.
type Child struct {
	cmd    *exec.Cmd
	stdin  *os.File
	stdout *os.File
	lines  chan string // closed at the end of the child's output

	mu     sync.Mutex // protects the following fields
	state  *sync.Cond
	phase  phase
	exit   error
	stderr tail
}

type phase uint8

const (
	running phase = iota
	stopped
	exited
)

// StartRole runs the test binary again, in a role that its TestMain passes to RunRole. See Start.
func StartRole(t testing.TB, role string, args ...string) *Child {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatalf("fault: start role %q: %v", role, err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	return Start(t, cmd)
}

// Start is Spawn, with Close at the end of the test; if the test failed, Start logs the child's standard error.
func Start(t testing.TB, cmd *exec.Cmd) *Child {
	t.Helper()
	c, err := Spawn(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		if text := c.Stderr(); text != "" && t.Failed() {
			t.Logf("standard error of %s:\n%s", cmd.Path, text)
		}
	})
	return c
}

// Spawn runs cmd as a child in its own process group. Standard input, output and error of cmd must not be set: Send,
// Line and Stderr use them. The caller must call Close. On Linux the kernel kills the child if this process dies
// without Close.
func Spawn(cmd *exec.Cmd) (*Child, error) {
	c, err := start(cmd)
	if err != nil {
		return nil, fmt.Errorf("fault: start %s: %w", cmd.Path, err)
	}
	return c, nil
}

// Close kills the whole process group and returns when no zombie and no goroutine is left. Unread lines are lost.
func (c *Child) Close() {
	c.Kill()
	c.stdin.Close()
	c.stdout.SetReadDeadline(time.Now().Add(time.Second)) // a grandchild that left the group may keep the pipe open
	for range c.lines {
	}
}

func start(cmd *exec.Cmd) (*Child, error) {
	if cmd.Stdin != nil || cmd.Stdout != nil || cmd.Stderr != nil {
		return nil, errors.New("standard input, output and error are the child's own")
	}
	c := &Child{cmd: cmd, lines: make(chan string, 1024)}
	c.state = sync.NewCond(&c.mu)
	var pipes [3][2]*os.File
	closeEnds := func(ends ...int) {
		for i, end := range ends {
			if f := pipes[i][end]; f != nil {
				f.Close()
			}
		}
	}
	for i := range pipes {
		r, w, err := os.Pipe()
		if err != nil {
			closeEnds(0, 0, 0)
			closeEnds(1, 1, 1)
			return nil, err
		}
		pipes[i] = [2]*os.File{r, w}
	}
	// Files, and no io.Reader or io.Writer: then package exec starts no goroutines, which only its Wait would end.
	// c.reap waits for the child instead, and also reports stops.
	cmd.Stdin, cmd.Stdout, cmd.Stderr = pipes[0][0], pipes[1][1], pipes[2][1]
	started := make(chan error)
	go func() {
		// Linux kills the child when the thread that started it ends: this thread stays until the child has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.spawn()
		started <- err
		if err == nil {
			c.reap(c.collect(pipes[2][0]))
		}
	}()
	err := <-started
	closeEnds(0, 1, 1)
	if err != nil {
		closeEnds(1, 0, 0)
		return nil, err
	}
	c.stdin, c.stdout = pipes[0][1], pipes[1][0]
	go c.readLines()
	return c, nil
}

// collect keeps the child's standard error. The returned function waits for its end.
func (c *Child) collect(r *os.File) (wait func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer r.Close()
		io.Copy(&c.stderr, r)
		// The deadline may have passed while this process was stopped, with bytes left to read.
		r.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		io.Copy(&c.stderr, r)
	}()
	return func() {
		r.SetReadDeadline(time.Now().Add(time.Second)) // a grandchild that left the group may keep the pipe open
		<-done
	}
}

func (c *Child) readLines() {
	defer c.stdout.Close()
	defer close(c.lines)
	in := bufio.NewReader(c.stdout)
	for {
		line, err := in.ReadString('\n')
		if line != "" {
			c.lines <- strings.TrimRight(line, "\r\n")
		}
		if err != nil {
			return
		}
	}
}

// Line returns the next line of the child's standard output. After the last line it returns io.EOF.
func (c *Child) Line(ctx context.Context) (string, error) {
	select {
	case line, ok := <-c.lines:
		if !ok {
			return "", io.EOF
		}
		return line, nil
	case <-ctx.Done():
		return "", fmt.Errorf("fault: no line from %s: %w", c.cmd.Path, ctx.Err())
	}
}

// Await returns the next line that starts with prefix, without the prefix, and drops the lines before it.
func (c *Child) Await(ctx context.Context, prefix string) (string, error) {
	for {
		line, err := c.Line(ctx)
		if err != nil {
			return "", fmt.Errorf("fault: await %q: %w", prefix, err)
		}
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			return rest, nil
		}
	}
}

// Send writes a line to the child's standard input.
func (c *Child) Send(line string) error {
	_, err := io.WriteString(c.stdin, line+"\n")
	return err
}

// CloseStdin ends the child's standard input. A child in a Role then exits, as at the end of its parent.
func (c *Child) CloseStdin() { c.stdin.Close() }

// Stderr returns the end of the child's standard error so far, at most 64 KiB.
func (c *Child) Stderr() string { return c.stderr.String() }

// Pid returns the process id, which is also the id of the process group.
func (c *Child) Pid() int { return c.cmd.Process.Pid }

// Running reports whether the process has not ended. A paused process is running.
func (c *Child) Running() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.phase != exited
}

// Wait returns when the process has ended: nil if its exit code is 0, otherwise an error with the code or the signal.
// It does not wait until its lines are read.
func (c *Child) Wait() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.await(exited)
	return c.exit
}

// await waits for a phase of the child. It returns false if the child has exited before. c.mu is held.
func (c *Child) await(want phase) bool {
	for c.phase != want && c.phase != exited {
		c.state.Wait()
	}
	return c.phase == want
}

func (c *Child) enter(p phase, exit error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.phase, c.exit = p, exit
	c.state.Broadcast()
}

// tail keeps the end of a text.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (b *tail) Write(p []byte) (int, error) {
	const most = 64 << 10
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text = append(b.text, p...)
	if extra := len(b.text) - most; extra > 0 {
		b.text = append([]byte(nil), b.text[extra:]...)
	}
	return len(p), nil
}

func (b *tail) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return string(b.text)
}
