package containers_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
)

// patience is the timeout for an expected event; silence is the time in which no event must happen.
const (
	patience = 30 * time.Second
	silence  = 300 * time.Millisecond
)

// eachWay runs a test on a server in a container and on a server in a process.
func eachWay(t *testing.T, test func(t *testing.T, start func(...containers.Option) *containers.RedisServer)) {
	for name, way := range map[string]func() containers.Option{
		"container": containers.AsContainer,
		"process":   containers.AsProcess,
	} {
		t.Run(name, func(t *testing.T) {
			test(t, func(opts ...containers.Option) *containers.RedisServer {
				return containers.Redis(t, append(opts, way())...)
			})
		})
	}
}

// client is a connection that speaks Redis's inline protocol.
type client struct {
	net.Conn
	in *bufio.Reader
}

func dial(t *testing.T, addr string) *client {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &client{c, bufio.NewReader(c)}
}

// ask sends a command and returns the first line of the reply; for a string reply, the string.
func (c *client) ask(timeout time.Duration, command string) (string, error) {
	c.SetDeadline(time.Now().Add(timeout))
	if _, err := fmt.Fprintf(c, "%s\r\n", command); err != nil {
		return "", err
	}
	return c.reply()
}

func (c *client) reply() (string, error) {
	line, err := c.in.ReadString('\n')
	if strings.HasPrefix(line, "$") && line != "$-1\r\n" {
		line, err = c.in.ReadString('\n')
	}
	return strings.TrimSpace(line), err
}

// expect sends a command on a new connection, and checks the reply.
func expect(t *testing.T, addr, command, want string) {
	t.Helper()
	if got, err := dial(t, addr).ask(patience, command); err != nil || got != want {
		t.Fatalf("%s: %q, %v; want %q", command, got, err, want)
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func waiting(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func TestRedisKeepsItsAddressAcrossRestarts(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, start func(...containers.Option) *containers.RedisServer) {
		s := start()
		addr, _ := s.NewLink(t)
		main := s.Addr()
		for range 2 {
			expect(t, main, "SET k v", "+OK")
			expect(t, addr, "GET k", "v")
			before := dial(t, addr)
			if _, err := before.ask(patience, "PING"); err != nil {
				t.Fatal(err)
			}
			check(t, s.Restart(waiting(t)))
			if got, err := before.ask(patience, "PING"); err == nil {
				t.Errorf("a connection outlived the server: %q", got)
			}
			expect(t, main, "GET k", "$-1") // no data was kept
			expect(t, addr, "GET k", "$-1")
		}
		if s.Addr() != main {
			t.Errorf("the address changed from %s to %s", main, s.Addr())
		}
	})
}

func TestRedisRefusesWhileStopped(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, start func(...containers.Option) *containers.RedisServer) {
		s := start()
		addr, _ := s.NewLink(t)
		for range 2 { // the second call has no effect
			check(t, s.Stop(waiting(t)))
		}
		late, _ := s.NewLink(t)
		for _, a := range []string{s.Addr(), addr, late} {
			// A listener that closes resets a connection that it has not accepted yet.
			_, err := net.Dial("tcp", a)
			if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("connect to a stopped server: %v; want refused", err)
			}
		}
		for range 2 {
			check(t, s.Start(waiting(t)))
		}
		for _, a := range []string{s.Addr(), addr, late} {
			expect(t, a, "PING", "+PONG")
		}
	})
}

func TestRedisIsSilentWhilePaused(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, start func(...containers.Option) *containers.RedisServer) {
		s := start()
		c := dial(t, s.Addr())
		if _, err := c.ask(patience, "PING"); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			check(t, s.Pause(waiting(t)))
		}
		var timeout net.Error
		if got, err := c.ask(silence, "PING"); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Fatalf("a paused server answered %q, %v", got, err)
		}
		if got, err := dial(t, s.Addr()).ask(silence, "PING"); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Fatalf("a paused server answered a new connection %q, %v", got, err)
		}
		for range 2 {
			check(t, s.Resume(waiting(t)))
		}
		c.SetDeadline(time.Now().Add(patience))
		if got, err := c.reply(); err != nil || got != "+PONG" {
			t.Errorf("after Resume: %q, %v; want the reply that was due", got, err)
		}
		check(t, s.Pause(waiting(t)))
		check(t, s.Restart(waiting(t)))
		expect(t, s.Addr(), "PING", "+PONG")
		check(t, s.Pause(waiting(t))) // a paused server is removed, too
	})
}

func TestRedisKeepsDataIfConfigured(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, start func(...containers.Option) *containers.RedisServer) {
		s := start(containers.Args("--appendonly", "yes", "--appendfsync", "always"))
		expect(t, s.Addr(), "SET k v", "+OK")
		check(t, s.Restart(waiting(t)))
		expect(t, s.Addr(), "GET k", "v")
	})
}

func TestRedisLinksBreakAlone(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, start func(...containers.Option) *containers.RedisServer) {
		s := start()
		broken, link := s.NewLink(t)
		whole, _ := s.NewLink(t)
		link.Hold(fault.Requests)
		c := dial(t, broken)
		var timeout net.Error
		if got, err := c.ask(silence, "SET late yes"); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Fatalf("an answer through a link that holds: %q, %v", got, err)
		}
		expect(t, whole, "GET late", "$-1")
		c.Close()
		link.Pass()
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			if got, err := dial(t, whole).ask(patience, "GET late"); err == nil && got == "yes" {
				break
			}
			if time.Now().After(end) {
				t.Fatal("the held request was not delivered")
			}
		}
	})
}

func TestRedisServersAreApart(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, start func(...containers.Option) *containers.RedisServer) {
		a, b := start(), start()
		expect(t, a.Addr(), "SET k v", "+OK")
		expect(t, b.Addr(), "GET k", "$-1")
	})
}

func TestRedisLeavesNoFiles(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	t.Run("server", func(t *testing.T) {
		s := containers.Redis(t, containers.AsProcess(), containers.Args("--appendonly", "yes"))
		expect(t, s.Addr(), "SET k v", "+OK")
	})
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
