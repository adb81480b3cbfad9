package builtin_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
	locks "github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server"
)

// patience is the maximum time for which a test waits for an expected event.
const patience = time.Minute

// node is a server in this process that a test can stop, start again with its data, and freeze for its attached
// clients.
type node struct {
	config server.Config

	mu      sync.Mutex
	server  *server.Server
	running chan struct{} // closed while it is not frozen
}

// startNode starts a durable server on a free port.
func startNode(t testing.TB) *node {
	t.Helper()
	return startNodeIn(t, t.TempDir())
}

// startNodeIn starts a server with the data directory dir. If dir is empty, the server stores nothing.
func startNodeIn(t testing.TB, dir string) *node {
	t.Helper()
	n := &node{running: make(chan struct{}), config: server.Config{
		DataDir: dir, Listen: freeport.Addresses(t, 1)[0], MinTTL: 100 * time.Millisecond, Log: quiet(t),
	}}
	close(n.running)
	n.start(t)
	t.Cleanup(func() { n.stop(t) })
	return n
}

func (n *node) addr() string { return n.config.Listen }

func (n *node) start(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var s *server.Server
	err := freeport.Again(func() (err error) {
		s, err = server.Start(ctx, n.config)
		return err
	})
	if err == nil {
		err = s.WaitLeader(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.server = s
}

func (n *node) stop(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := n.current().Close(ctx); err != nil {
		t.Error(err)
	}
}

func (n *node) current() *server.Server {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.server
}

func (n *node) freeze(testing.TB) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.running = make(chan struct{})
}

func (n *node) thaw(testing.TB) {
	n.mu.Lock()
	defer n.mu.Unlock()
	close(n.running)
}

// attach connects clients in this process.
func (n *node) attach(ctx context.Context) builtin.Stream {
	return frozen{n.current().Attach(ctx), ctx, n}
}

// frozen is a stream that blocks while its node is frozen.
type frozen struct {
	builtin.Stream
	ctx  context.Context
	node *node
}

func (f frozen) wait() error {
	f.node.mu.Lock()
	running := f.node.running
	f.node.mu.Unlock()
	select {
	case <-running:
		return nil
	case <-f.ctx.Done():
		return f.ctx.Err()
	}
}

func (f frozen) Send(m *lockpb.ClientMessage) error {
	if err := f.wait(); err != nil {
		return err
	}
	return f.Stream.Send(m)
}

func (f frozen) Recv() (*lockpb.ServerMessage, error) {
	m, err := f.Stream.Recv()
	if end := f.wait(); end != nil {
		return nil, end
	}
	return m, err
}

// linked returns a driver that connects to each of the servers through a proxy, even if another server has named the
// address.
func linked(t testing.TB, addrs ...string) (*builtin.Driver, fault.Link) {
	t.Helper()
	return linkedBy(t, nil, addrs...)
}

// linkedBy is linked with TLS.
func linkedBy(t testing.TB, config *tls.Config, addrs ...string) (*builtin.Driver, fault.Link) {
	t.Helper()
	proxies, links := map[string]string{}, fault.Links{}
	for _, addr := range addrs {
		p := newProxy(t, addr)
		proxies[addr], links = p.Addr(), append(links, p)
	}
	return builtin.New(addrs, &builtin.Options{
		TLS: config,
		Dial: func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", proxies[address])
		},
	}), links
}

// open is builtin.Open.
func open(t testing.TB, addrs ...string) backend.FencingDriver {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	d, err := builtin.Open(ctx, "fencelock://"+strings.Join(addrs, ",")+"?timeout=1m")
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// admin is a client with which tests act as an administrator.
type admin struct{ driver *builtin.Driver }

func newAdmin(t testing.TB, addrs ...string) admin {
	d := builtin.New(addrs, nil)
	t.Cleanup(func() { _ = d.Close(context.Background()) }) // the servers may have ended by then
	return admin{d}
}

func within(t testing.TB, act func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := act(ctx); err != nil {
		t.Fatal(err)
	}
}

// quiet returns a logger that writes messages only if the environment asks for them.
func quiet(testing.TB) *slog.Logger {
	to := io.Discard
	if os.Getenv("FENCELOCK_SERVER_LOG") != "" {
		to = os.Stderr
	}
	return slog.New(slog.NewTextHandler(to, nil))
}

// A limit of the server ends an acquire immediately, also when it waits, and names the limit.
func TestLimitEndsAWait(t *testing.T) {
	t.Parallel()
	for limit, limits := range map[string]locks.Limits{
		"sessions": {Sessions: 1, ClientShare: 100}, "waits": {Waits: 1, ClientShare: 100},
	} {
		t.Run(limit, func(t *testing.T) {
			t.Parallel()
			n := startNode(t)
			n.stop(t)
			n.config.Limits = limits
			n.start(t)
			d := opened(t, n)
			held := take(t, d, request("x", time.Minute))
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			r := request("x", time.Minute)
			r.Wait = true
			first := make(chan error, 1)
			go func() {
				_, err := d.Acquire(ctx, r)
				first <- err
			}()
			eventually(t, "it waits", func() bool {
				state, err := d.Look(ctx, "x")
				return err == nil && state.Waiters == 1
			})
			second := opened(t, n)
			if limit == "waits" {
				second = d
			}
			r = request("x", time.Minute)
			r.Wait = true
			_, err := second.Acquire(ctx, r)
			var reached *builtin.LimitError
			if !errors.As(err, &reached) || !strings.EqualFold(reached.Limit, limit) || !errors.Is(err, backend.ErrUnavailable) ||
				errors.Is(err, backend.ErrUnknown) || ctx.Err() != nil {
				t.Errorf("Acquire = %v, want ErrUnavailable with the limit %s", err, limit)
			}
			giveBack(t, d, held)
			if err := <-first; err != nil {
				t.Errorf("the first waiter: %v", err)
			}
		})
	}
}
