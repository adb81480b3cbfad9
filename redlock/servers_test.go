package redlock

import (
	"context"
	"os/exec"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

// servers are independent Redis servers, which lose their state in a restart.
type servers []*containers.RedisServer

// start starts n servers, as processes if possible, since these start quickly.
func start(t testing.TB, n int, args ...string) servers {
	t.Helper()
	opts := []containers.Option{containers.Args(args...)}
	if _, err := exec.LookPath("redis-server"); err == nil {
		opts = append(opts, containers.AsProcess())
	}
	var s servers
	for range n {
		s = append(s, containers.Redis(t, opts...))
	}
	return s
}

// driver returns a driver that trusts fresh servers unless o is given.
func (s servers) driver(t testing.TB, o *Options) *Driver {
	d, _ := s.connect(t, o, false)
	return d
}

// linked returns a driver with a link to each server.
func (s servers) linked(t testing.TB, o *Options) (*Driver, fault.Links) {
	return s.connect(t, o, true)
}

func (s servers) connect(t testing.TB, o *Options, link bool) (*Driver, fault.Links) {
	if o == nil {
		o = &Options{TrustFresh: true}
	}
	var clients []goredis.UniversalClient
	var links fault.Links
	for _, server := range s {
		addr := server.Addr()
		if link {
			var l fault.Link
			addr, l = server.NewLink(t)
			links = append(links, l)
		}
		c := goredis.NewClient(&goredis.Options{Addr: addr})
		t.Cleanup(func() { _ = c.Close() })
		clients = append(clients, c)
	}
	d := New(clients, o)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = d.Close(ctx) // it fails over a broken link
	})
	return d, links
}

// each calls act for some servers concurrently.
func (s servers) each(t testing.TB, act func(context.Context, *containers.RedisServer) error, which ...int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var all sync.WaitGroup
	for _, i := range which {
		all.Go(func() {
			if err := act(ctx, s[i]); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

func (s servers) pause(t testing.TB, which ...int) {
	s.each(t, func(ctx context.Context, r *containers.RedisServer) error { return r.Pause(ctx) }, which...)
}

func (s servers) resume(t testing.TB, which ...int) {
	s.each(t, func(ctx context.Context, r *containers.RedisServer) error { return r.Resume(ctx) }, which...)
}

func (s servers) stop(t testing.TB, which ...int) {
	s.each(t, func(ctx context.Context, r *containers.RedisServer) error { return r.Stop(ctx) }, which...)
}

func (s servers) startAgain(t testing.TB, which ...int) {
	s.each(t, func(ctx context.Context, r *containers.RedisServer) error { return r.Start(ctx) }, which...)
}

func (s servers) restart(t testing.TB, which ...int) {
	s.each(t, func(ctx context.Context, r *containers.RedisServer) error { return r.Restart(ctx) }, which...)
}

// admin calls act with a client of server i.
func (s servers) admin(t testing.TB, i int, act func(context.Context, *goredis.Client) error) {
	t.Helper()
	c := goredis.NewClient(&goredis.Options{Addr: s[i].Addr()})
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := act(ctx, c); err != nil {
		t.Fatal(err)
	}
}

// expire ends a lock on server i, as a forward jump of its clock does.
func (s servers) expire(t testing.TB, i int, name string) {
	t.Helper()
	s.admin(t, i, func(ctx context.Context, c *goredis.Client) error {
		return c.Del(ctx, redisscript.KeysOf("fencelock:", name).Lock).Err()
	})
}

// votes returns the number of servers with a key of name.
func (s servers) votes(t testing.TB, name string) int {
	t.Helper()
	n := 0
	for i := range s {
		s.admin(t, i, func(ctx context.Context, c *goredis.Client) error {
			k, err := c.Exists(ctx, redisscript.KeysOf("fencelock:", name).Lock).Result()
			n += int(k)
			return err
		})
	}
	return n
}

// values returns the servers' values of a lock.
func (s servers) values(t testing.TB, name string) []string {
	t.Helper()
	values := make([]string, len(s))
	for i := range s {
		s.admin(t, i, func(ctx context.Context, c *goredis.Client) (err error) {
			values[i], err = c.Get(ctx, redisscript.KeysOf("fencelock:", name).Lock).Result()
			return err
		})
	}
	return values
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// take acquires, or fails the test.
func take(t testing.TB, d *Driver, r backend.Request) backend.Grant {
	t.Helper()
	g, err := d.Acquire(within(t, 30*time.Second), r)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// eventually waits until ok returns true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	ctx := within(t, time.Minute)
	for !ok() {
		if !redisconn.PauseFor(ctx, 10*time.Millisecond) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}
