package nemesis

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
)

// client is one client in the view of the run. A client with its own process gets a new process after each kill.
type client struct {
	t     testing.TB
	index int
	own   bool // a separate process
	links fault.Links
	config
	open func(context.Context, string) (backend.Driver, error)
	all  *collector

	mu    sync.Mutex // protects the following fields
	count int        // processes so far
	runs  *running
}

// running is one process of a client, or its goroutines.
type running struct {
	name  string       // "c2.1"
	child *fault.Child // nil: in the test's process
	lines chan string  // lines to the client
	said  chan string  // lines from the client, without events
	ended chan struct{}
	err   error // once ended is closed
}

// newClient returns a client that is not started.
func newClient(t testing.TB, s *Service, all *collector, index int, own bool, seed uint64) *client {
	target, links := s.Client(t)
	return &client{
		t: t, index: index, own: own, links: links, open: s.Open, all: all,
		config: config{Target: target, TTL: s.TTL, Seed: seed<<8 | uint64(index)},
	}
}

// id returns the name of the client, common to all of its processes.
func (c *client) id() string { return fmt.Sprintf("c%d", c.index) }

// now returns the current process.
func (c *client) now() *running {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.runs
}

// start starts the client, in a new process if it has its own, and returns when the client contends for the names of
// the epoch.
func (c *client) start(ctx context.Context, epoch int) (string, error) {
	c.mu.Lock()
	c.count++
	cfg := c.config
	cfg.Client, cfg.Epoch = fmt.Sprintf("%s.%d", c.id(), c.count), epoch
	cfg.Seed += uint64(c.count) << 32
	r := &running{name: cfg.Client, said: make(chan string, 256), ended: make(chan struct{})}
	c.runs = r
	c.mu.Unlock()
	if c.own {
		text, err := json.Marshal(cfg)
		if err != nil {
			return "", err
		}
		r.child = fault.StartRole(c.t, Role, string(text))
		go r.listen(c.all)
	} else {
		r.lines = make(chan string, 64)
		go func() {
			defer close(r.ended)
			r.err = work(cfg, c.open, r.lines, r.writer(c.all))
		}()
	}
	return r.await(ctx, lineReady)
}

// listen reads a child's lines until it has ended.
func (r *running) listen(all *collector) {
	defer close(r.ended)
	for {
		line, err := r.child.Line(context.Background())
		if err != nil {
			r.err = r.child.Wait()
			return
		}
		r.hear(all, line)
	}
}

func (r *running) hear(all *collector, line string) {
	if strings.HasPrefix(line, "{") {
		all.take(line)
		return
	}
	select {
	case r.said <- line:
	default: // drop a line when too many are unread
	}
}

// writer is the standard output of a client in the test's process.
func (r *running) writer(all *collector) writerFunc {
	return func(p []byte) (int, error) {
		r.hear(all, strings.TrimSuffix(string(p), "\n"))
		return len(p), nil
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func (r *running) send(line string) error {
	if r.child != nil {
		if err := r.child.Send(line); err != nil {
			return fmt.Errorf("tell client %s to %q: %w", r.name, line, err)
		}
		return nil
	}
	select {
	case r.lines <- line:
	case <-r.ended:
	}
	return nil
}

// await returns the next line of the client with prefix, without prefix.
func (r *running) await(ctx context.Context, prefix string) (string, error) {
	for {
		select {
		case line := <-r.said:
			if rest, ok := strings.CutPrefix(line, prefix); ok {
				return rest, nil
			}
			continue
		default:
		}
		select {
		case line := <-r.said:
			if rest, ok := strings.CutPrefix(line, prefix); ok {
				return rest, nil
			}
		case <-r.ended:
			if len(r.said) == 0 {
				return "", fmt.Errorf("client %s has ended, and was to say %q: %w%s", r.name, prefix, r.err, r.stderr())
			}
		case <-ctx.Done():
			return "", fmt.Errorf("client %s does not say %q: %w%s", r.name, prefix, ctx.Err(), r.stderr())
		}
	}
}

func (r *running) stderr() string {
	if r.child == nil || r.child.Stderr() == "" {
		return ""
	}
	return "\n" + r.child.Stderr()
}

// kill ends the process without warning, and returns when all of its lines were read.
func (r *running) kill(all *collector) error {
	if err := r.child.Kill(); err != nil {
		return err
	}
	<-r.ended
	all.marks.Killed(r.name)
	return nil
}

// stop makes the client release all locks and end, and waits for it.
func (r *running) stop(ctx context.Context) error {
	if err := r.send(lineStop); err != nil {
		return err
	}
	if _, err := r.await(ctx, lineBye); err != nil {
		return err
	}
	select {
	case <-r.ended:
		return r.err
	case <-ctx.Done():
		return fmt.Errorf("client %s does not end: %w", r.name, ctx.Err())
	}
}

// settle is the time for reading a process's lines.
const settle = 50 * time.Millisecond
