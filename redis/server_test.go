package redis

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/freeport"
)

// testServer is a redis-server of one test.
type testServer struct {
	addr string
	args []string
	cmd  *exec.Cmd
}

// startServer starts redis-server on a free loopback port with further arguments, and stops it when the test ends.
func startServer(t testing.TB, args ...string) *testServer {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		if os.Getenv("FENCELOCK_REQUIRE") == "all" {
			t.Fatal("redis-server is required and not installed")
		}
		t.Skip("SKIP: install redis-server or Docker")
	}
	s := &testServer{addr: freeport.Addresses(t, 1)[0]}
	_, port, _ := net.SplitHostPort(s.addr)
	s.args = append([]string{
		"--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", t.TempDir(),
		"--daemonize", "no", "--loglevel", "warning",
	}, args...)
	s.start(t)
	t.Cleanup(func() { s.kill() })
	return s
}

func (s *testServer) start(t testing.TB) {
	t.Helper()
	s.cmd = exec.Command("redis-server", s.args...)
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the server answers", func() bool {
		c, err := net.Dial("tcp", s.addr)
		if err != nil {
			return false
		}
		defer c.Close()
		fmt.Fprint(c, "PING\r\n")
		line, err := bufio.NewReader(c).ReadString('\n')
		return err == nil && (strings.HasPrefix(line, "+PONG") || strings.HasPrefix(line, "-NOAUTH"))
	})
}

func (s *testServer) kill() {
	if s.cmd != nil {
		s.signal(syscall.SIGCONT)
		s.cmd.Process.Kill()
		s.cmd.Wait()
		s.cmd = nil
	}
}

func (s *testServer) signal(sig syscall.Signal) { s.cmd.Process.Signal(sig) }

// pause stops the server process; its sockets stay open.
func (s *testServer) pause()  { s.signal(syscall.SIGSTOP) }
func (s *testServer) resume() { s.signal(syscall.SIGCONT) }

// admin returns a plain client to examine the server.
func (s *testServer) admin(t testing.TB) *goredis.Client {
	t.Helper()
	c := goredis.NewClient(&goredis.Options{Addr: s.addr})
	t.Cleanup(func() { c.Close() })
	return c
}

// fitOptions are settings with which New uses the client as it is.
func fitOptions(addr string) *goredis.Options {
	return &goredis.Options{Addr: addr, MaxRetries: -1, ContextTimeoutEnabled: true, DialerRetries: 1}
}

// open returns a driver with its own connections, which is closed at the end of the test.
func (s *testServer) open(t testing.TB) *Driver { return openAt(t, s.addr) }

func openAt(t testing.TB, addr string) *Driver {
	t.Helper()
	d := newDriver(goredis.NewClient(fitOptions(addr)), true, nil, &Options{})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		d.Close(ctx)
	})
	return d
}

// subscribe makes the driver's subscription.
func subscribe(t testing.TB, d *Driver) {
	t.Helper()
	eventually(t, "the subscription stands", func() bool { return d.service.push.stands(d.service) })
}

// keys returns all keys of the server.
func keys(t testing.TB, c *goredis.Client) []string {
	t.Helper()
	found, err := c.Keys(context.Background(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// commands returns the number of commands that the server has executed, including those inside scripts.
func commands(t testing.TB, c *goredis.Client) (total int) {
	t.Helper()
	text, err := c.Info(context.Background(), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(text) {
		name, rest, ok := strings.Cut(line, ":calls=")
		if !ok || strings.HasPrefix(name, "cmdstat_info") || strings.HasPrefix(name, "cmdstat_config") {
			continue
		}
		calls, _, _ := strings.Cut(rest, ",")
		n, err := strconv.Atoi(calls)
		if err != nil {
			t.Fatal(err)
		}
		total += n
	}
	return total
}

// eventually polls until ok returns true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// request returns a request with a new id.
func request(name string, ttl time.Duration, wait bool) backend.Request {
	return backend.Request{
		Name: name, Owner: "test/" + name, RequestID: backend.NewRequestID(),
		HoldID: backend.NewRequestID(), Fresh: true, TTL: ttl, Wait: wait,
	}
}

// releasedIfUnknown releases the possible leftover of a failed acquire of r, as its caller has to, and returns err,
// joined with the error of the release.
func releasedIfUnknown(d *Driver, r backend.Request, err error) error {
	if !errors.Is(err, backend.ErrUnknown) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	released := d.Release(ctx, r.Grant())
	if errors.Is(released, backend.ErrNotHeld) {
		released = nil
	}
	return errors.Join(err, released)
}

// within returns a context for calls that should succeed.
func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func mustAcquire(t testing.TB, d *Driver, r backend.Request) backend.Grant {
	t.Helper()
	g, err := d.Acquire(within(t, 20*time.Second), r)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// settle releases requests if err is that of an unknown outcome, as the core does, and reports whether it is.
func settle(t testing.TB, d *Driver, err error, rs ...backend.Request) bool {
	t.Helper()
	if !errors.Is(err, backend.ErrUnknown) {
		return false
	}
	for _, r := range rs {
		if err := d.Release(within(t, 20*time.Second), r.Grant()); err != nil && !errors.Is(err, backend.ErrNotHeld) {
			t.Error(err)
		}
	}
	return true
}

func mustRelease(t testing.TB, d *Driver, g backend.Grant) {
	t.Helper()
	if err := d.Release(within(t, 20*time.Second), g); err != nil {
		t.Fatal(err)
	}
}
