package containers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
)

// process is a server that runs as a child, with its files in its own folder.
type process struct {
	spec   spec
	binary string
	dir    string
	port   *freeport.Port
	child  *fault.Child
	lines  sync.WaitGroup // the reader of the child's output

	mu  sync.Mutex // protects the following field
	log bytes.Buffer
}

func newProcess(_ context.Context, sp spec) (node, string, error) {
	binary, err := exec.LookPath(sp.binary)
	if err != nil {
		return nil, "", err
	}
	dir, err := os.MkdirTemp("", "fencelock-"+filepath.Base(sp.binary)+"-")
	if err != nil {
		return nil, "", err
	}
	reserved := sp.fixed
	if reserved == nil {
		if reserved, err = freeport.Reserve(); err != nil {
			return nil, "", errors.Join(err, os.RemoveAll(dir))
		}
	}
	return &process{spec: sp, binary: binary, dir: dir, port: reserved}, "process, " + binary, nil
}

func (p *process) start(context.Context) (string, error) {
	addr := p.port.Addr()
	cmd := exec.Command(p.binary, append(p.spec.process(addr, p.dir), p.spec.args...)...)
	cmd.Dir = p.dir
	if p.spec.environ != nil {
		cmd.Env = append(os.Environ(), p.spec.environ...)
	}
	p.port.Lend()
	child, err := fault.Spawn(cmd)
	if err != nil {
		return "", err
	}
	p.child = child
	p.lines.Go(func() { p.follow(child) })
	return addr, nil
}

// follow keeps the child's output, until it ends: an unread pipe would block the server.
func (p *process) follow(child *fault.Child) {
	for {
		line, err := child.Line(context.Background())
		if err != nil {
			return
		}
		p.mu.Lock()
		p.log.WriteString(line)
		p.log.WriteByte('\n')
		p.mu.Unlock()
	}
}

func (p *process) ended(context.Context) error {
	if p.child.Running() {
		return nil
	}
	if err := p.child.Wait(); err != nil {
		return err
	}
	return errors.New("the server has ended by itself")
}

func (p *process) kill(context.Context) error {
	err := p.child.Kill()
	p.child.Close()
	p.lines.Wait()
	return err
}

func (p *process) pause(context.Context) error  { return p.child.Pause() }
func (p *process) resume(context.Context) error { return p.child.Resume() }

func (p *process) logs(context.Context) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child == nil {
		return ""
	}
	return p.log.String() + p.child.Stderr()
}

func (p *process) close(ctx context.Context) error {
	var err error
	if p.child != nil {
		err = p.kill(ctx)
	}
	if p.spec.fixed == nil {
		p.port.Close()
	}
	if failed := os.RemoveAll(p.dir); failed != nil {
		err = errors.Join(err, fmt.Errorf("remove the server's files: %w", failed))
	}
	return err
}
