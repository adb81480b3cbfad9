package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
)

// process is a server that was started here, with its files in a folder of its own. It can be ended and started again
// with what it has kept there. A nil process is a server that was running already: it is not ours, and nothing is done
// to it.
type process struct {
	dir     string
	command func() *exec.Cmd
	child   *fault.Child
	output  sync.WaitGroup // the reader of the child's output
	past    time.Duration  // CPU of those that were killed
	paused  bool
}

// startProcess runs the program, with args for the folder.
func startProcess(program string, args func(dir string) []string) (*process, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return nil, fmt.Errorf("install %s: %w", program, err)
	}
	dir, err := os.MkdirTemp("", "fencelock-bench-")
	if err != nil {
		return nil, err
	}
	p := &process{dir: dir, command: func() *exec.Cmd {
		cmd := exec.Command(path, args(dir)...)
		cmd.Dir = dir
		return cmd
	}}
	if err := p.start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return p, nil
}

// start starts the process, after kill or awaitEnd again.
func (p *process) start() error {
	child, err := fault.Spawn(p.command())
	if err != nil {
		return err
	}
	p.child = child
	p.output.Go(func() {
		for { // a pipe that nobody reads would stop the server
			if _, err := child.Line(context.Background()); err != nil {
				return
			}
		}
	})
	return nil
}

// cpu is user and system time so far.
func (p *process) cpu() (time.Duration, error) {
	now, err := processCPU(p.child.Pid())
	return p.past + now, err
}

// resident is the memory that the process keeps, in bytes.
func (p *process) resident() (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.child.Pid()))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0, fmt.Errorf("/proc/%d/statm has %d fields", p.child.Pid(), len(fields))
	}
	pages, err := strconv.ParseFloat(fields[1], 64)
	return pages * float64(os.Getpagesize()), err
}

// pause stops the process as it is, with its sockets open; resume lets it go on. False: it is not ours.
func (p *process) pause() bool {
	if p == nil {
		return false
	}
	p.paused = p.child.Pause() == nil
	return p.paused
}

func (p *process) resume() {
	if p != nil && p.paused {
		p.child.Resume()
		p.paused = false
	}
}

// kill ends the process at once (SIGKILL).
func (p *process) kill() {
	if spent, err := p.cpu(); err == nil {
		p.past = spent
	}
	p.child.Kill()
	p.awaitEnd()
}

// terminate asks the process to end (SIGTERM), and does not wait: awaitEnd does.
func (p *process) terminate() error { return p.child.Terminate() }

func (p *process) awaitEnd() {
	p.child.Wait()
	p.child.Close()
	p.output.Wait()
}

// blame adds what the process wrote to standard error.
func (p *process) blame(err error) error {
	if p.child.Stderr() == "" {
		return err
	}
	return fmt.Errorf("%w\n%s", err, strings.TrimSpace(p.child.Stderr()))
}

// close ends the process and deletes its folder.
func (p *process) close() error {
	if p == nil {
		return nil
	}
	p.kill()
	return os.RemoveAll(p.dir)
}

// startTime is how long a server may take before it answers.
const startTime = 30 * time.Second

// answers asks until there is an answer. A server that is not ours is asked once.
func (p *process) answers(ctx context.Context, ask func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		attempt, end := context.WithTimeout(ctx, 2*time.Second)
		err := ask(attempt)
		end()
		switch {
		case err == nil:
			return nil
		case p == nil:
			return err
		case ctx.Err() != nil:
			return p.blame(fmt.Errorf("it does not answer: %w", err))
		}
		sleep(ctx, 10*time.Millisecond)
	}
}

// processCPU is user and system time of another process.
func processCPU(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), ") ") // behind the program's name
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	var ticks int64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil // as in machineCPU
}

// freeAddrs returns addresses of the loopback interface at which nobody listens. They are below the range from which
// Linux takes ports that nobody named, so that they stay free while a server is ended and started again.
func freeAddrs(n int) ([]string, error) {
	var all []string
	for range 1000 {
		if len(all) == n {
			return all, nil
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 16384+rand.IntN(16384)))
		if err != nil {
			continue // taken, most likely
		}
		defer l.Close() // until there are n, so that they differ
		all = append(all, l.Addr().String())
	}
	return nil, errors.New("there are no free ports")
}
