package containers

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"
)

// pullTimeout bounds the pull of an image.
const pullTimeout = 3 * time.Minute

// errNoEngine means that no Docker engine answers.
var errNoEngine = errors.New("no Docker engine answers")

// container is a server in a container, which a process of the program runner starts with testcontainers-go and
// removes. Each container has its own process, which removes the container even if this process is killed. No
// goroutine of this process waits for it.
type container struct {
	spec    spec
	runner  *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
	stderr  io.Reader
	started bool
}

// answer is the runner's answer to a line.
type answer struct {
	Text     string
	Error    string
	NoEngine bool
}

func newContainer(ctx context.Context, sp spec) (node, string, error) {
	program, err := runnerProgram()
	if err != nil {
		return nil, "", err
	}
	c := &container{spec: sp, runner: exec.Command(program)}
	if err := c.launch(ctx); err != nil {
		return nil, "", err
	}
	if err := c.pull(ctx); err != nil {
		return nil, "", errors.Join(err, c.close(ctx))
	}
	return c, "container, " + sp.image, nil
}

// launch starts the runner and connects it to the engine.
func (c *container) launch(ctx context.Context) (err error) {
	if c.in, err = c.runner.StdinPipe(); err != nil {
		return err
	}
	out, err := c.runner.StdoutPipe()
	if err != nil {
		return err
	}
	c.out = bufio.NewReader(out)
	if c.stderr, err = c.runner.StderrPipe(); err != nil {
		return err
	}
	if err := c.runner.Start(); err != nil {
		return err
	}
	spec, err := json.Marshal(map[string]any{
		"Image": c.spec.image, "Entrypoint": c.spec.entrypoint, "Command": slices.Concat(c.spec.command, c.spec.args),
		"User": c.spec.user, "Environ": c.spec.environ, "Port": c.spec.port, "HostNetwork": c.spec.fixed != nil,
	})
	if err == nil {
		_, err = c.do(ctx, string(spec))
	}
	if err != nil {
		return errors.Join(err, c.leave())
	}
	return nil
}

// do sends one line to the runner and returns its answer. The end of ctx cancels the operation.
func (c *container) do(ctx context.Context, line string) (string, error) {
	if _, err := io.WriteString(c.in, line+"\n"); err != nil {
		return "", c.died(err)
	}
	canceled := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(canceled)
		// The runner still sends an answer, unless it has died.
		_, _ = io.WriteString(c.in, "cancel\n")
	})
	text, err := c.out.ReadBytes('\n')
	if !stop() {
		<-canceled
	}
	if err != nil {
		return "", c.died(err)
	}
	var a answer
	switch err := json.Unmarshal(text, &a); {
	case err != nil:
		return "", fmt.Errorf("answer %q of the runner: %w", text, err)
	case a.NoEngine:
		return "", fmt.Errorf("%w: %s", errNoEngine, strings.TrimPrefix(a.Error, errNoEngine.Error()+": "))
	case a.Error != "" && ctx.Err() != nil:
		return "", fmt.Errorf("%w: %s", context.Cause(ctx), a.Error)
	case a.Error != "":
		return "", errors.New(a.Error)
	}
	return a.Text, nil
}

// died returns why the runner does not answer.
func (c *container) died(err error) error {
	said, _ := io.ReadAll(c.stderr) // until the runner has ended
	return fmt.Errorf("%s: %w: %s", c.runner.Path, err, said)
}

// leave ends the runner, which removes the container.
func (c *container) leave() error {
	err := c.in.Close()
	said, _ := io.ReadAll(c.stderr)
	if ended := c.runner.Wait(); ended != nil {
		err = errors.Join(err, fmt.Errorf("%s: %w: %s", c.runner.Path, ended, said))
	}
	return err
}

// pulls caches the result of each image's pull in this process, so that a failed pull is not repeated for each
// server.
var pulls sync.Map // image → func() error

// pull pulls the image unless the engine has it.
func (c *container) pull(ctx context.Context) error {
	once, _ := pulls.LoadOrStore(c.spec.image, sync.OnceValue(func() error {
		_, err := c.do(ctx, "pull")
		return err
	}))
	return once.(func() error)()
}

func (c *container) start(ctx context.Context) (string, error) {
	if c.spec.fixed != nil && !c.started {
		c.spec.fixed.Lend()
	}
	c.started = true
	addr, err := c.do(ctx, "start")
	if err == nil && c.spec.fixed != nil {
		addr = c.spec.fixed.Addr()
	}
	return addr, err
}

func (c *container) ended(ctx context.Context) error  { return c.tell(ctx, "ended") }
func (c *container) kill(ctx context.Context) error   { return c.tell(ctx, "kill") }
func (c *container) pause(ctx context.Context) error  { return c.tell(ctx, "pause") }
func (c *container) resume(ctx context.Context) error { return c.tell(ctx, "resume") }

func (c *container) tell(ctx context.Context, op string) error {
	_, err := c.do(ctx, op)
	return err
}

func (c *container) logs(ctx context.Context) string {
	text, err := c.do(ctx, "logs")
	if err != nil {
		return err.Error()
	}
	return text
}

// close removes the container immediately, with its data.
func (c *container) close(ctx context.Context) error {
	return errors.Join(c.tell(ctx, "close"), c.leave())
}
