// Command runner runs one container with testcontainers-go for package containers, which starts the command. It has
// its own module, so that users of Fencelock do not depend on testcontainers-go and the Docker client.
//
// The first line on stdin is the Spec, in JSON. Every other line is an operation (pull, start, ended, kill, pause,
// resume, logs, close), or cancel, which cancels the running operation. For each line but cancel, the runner writes
// an Answer, a line of JSON, to stdout. At the end of stdin, that is when the process that started it ends, the
// runner removes the container.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// removeTimeout bounds the removal of a container.
const removeTimeout = 2 * time.Minute

// Spec describes the container to run.
type Spec struct {
	Image       string
	Entrypoint  []string // nil: the image's
	Command     []string
	User        string   // empty: the image's
	Environ     []string // KEY=value
	Port        string   // 6379/tcp for example
	HostNetwork bool     // instead of Port
}

// Answer is the answer to one line.
type Answer struct {
	Text     string // the address of a started container, or logs
	Error    string // empty: the operation succeeded
	NoEngine bool   // no Docker engine answers
}

// operation is one line on stdin.
type operation struct {
	line   []byte
	ctx    context.Context
	cancel context.CancelFunc
}

func main() {
	// Signals from a terminal go to the whole process group. The test ends with the end of stdin. SIGPIPE would end this
	// program, and leave the container, when it answers a test that has died.
	signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE)
	if err := serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "runner:", err)
		os.Exit(1)
	}
}

func serve(in io.Reader, out io.Writer) (err error) {
	operations := make(chan operation)
	go func() {
		defer close(operations)
		read(in, operations)
	}()
	var c *container
	defer func() {
		if c != nil {
			ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
			defer cancel()
			err = errors.Join(err, c.close(ctx))
		}
	}()
	answers := json.NewEncoder(out)
	for op := range operations {
		var text string
		var err error
		if c == nil {
			c, err = open(op.ctx, op.line)
		} else {
			text, err = c.do(op.ctx, string(op.line))
		}
		op.cancel()
		a := Answer{Text: text, NoEngine: errors.Is(err, errNoEngine)}
		if err != nil {
			a.Error = err.Error()
		}
		// A test that has died does not read. The end of stdin follows.
		_ = answers.Encode(a)
	}
	return nil
}

// read sends the lines of in as operations. It cancels an operation on cancel, and at the end of stdin. At the end of
// stdin it does not cancel a start, which could leave a container with an unknown ID.
func read(in io.Reader, operations chan<- operation) {
	cancel := func() {}
	var last []byte
	for lines := bufio.NewReader(in); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			if string(last) != "start" {
				cancel()
			}
			return
		}
		line = bytes.TrimSpace(line)
		if string(line) == "cancel" {
			cancel()
			continue
		}
		op := operation{line: line}
		op.ctx, op.cancel = context.WithCancel(context.Background())
		last, cancel = line, op.cancel
		operations <- op
	}
}

func open(ctx context.Context, line []byte) (*container, error) {
	var spec Spec
	if err := json.Unmarshal(line, &spec); err != nil {
		return nil, fmt.Errorf("read the spec %q: %w", line, err)
	}
	return newContainer(ctx, spec)
}

func (c *container) do(ctx context.Context, op string) (string, error) {
	switch op {
	case "pull":
		return "", c.pull(ctx)
	case "start":
		return c.start(ctx)
	case "ended":
		return "", c.ended(ctx)
	case "kill":
		return "", c.kill(ctx)
	case "pause":
		return "", c.pause(ctx)
	case "resume":
		return "", c.resume(ctx)
	case "logs":
		return c.logs(ctx), nil
	case "close":
		return "", c.close(ctx)
	default:
		return "", fmt.Errorf("unknown operation %q", op)
	}
}
