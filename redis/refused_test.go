package redis

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/testcert"
)

// opened opens a driver by URL for the test.
func opened(t *testing.T, url string) (*Driver, error) {
	t.Helper()
	d, err := Open(within(t, 20*time.Second), url)
	if err == nil {
		t.Cleanup(func() { d.Close(within(t, 10*time.Second)) })
	}
	return d, err
}

// passes hands a lock from a holder to a waiter.
func passes(t *testing.T, what string, d *Driver) {
	t.Helper()
	g := mustAcquire(t, d, request(what, time.Minute, true))
	next := make(chan error, 1)
	go func() {
		g, err := d.Acquire(within(t, 20*time.Second), request(what, time.Minute, true))
		if err == nil {
			err = d.Release(within(t, 20*time.Second), g)
		}
		next <- err
	}()
	select {
	case err := <-next:
		t.Fatalf("%s: acquired a held lock, or %v", what, err)
	case <-time.After(120 * time.Millisecond): // polled once or twice
	}
	mustRelease(t, d, g)
	if err := <-next; err != nil {
		t.Errorf("%s: the waiter: %v", what, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	g = mustAcquire(t, d, request(what, time.Minute, false))
	if _, err := d.Acquire(ctx, request(what, time.Minute, true)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%s: a wait that ends by its context: %v", what, err)
	}
	mustRelease(t, d, g)
}

// Users of four kinds: with all rights, without INFO, without subscriptions, and without the script.
func TestRestrictedUsers(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	admin, ctx := s.admin(t), within(t, 20*time.Second)
	for user, rules := range map[string][]string{
		"all":         {"&fencelock:*"},
		"no-info":     {"&fencelock:*", "-info", "-config"},
		"no-channels": {"resetchannels"},
		"no-script":   {"&fencelock:*", "-eval", "-evalsha"},
	} {
		rules = append([]string{"on", ">pw", "~fencelock:*", "+@all"}, rules...)
		if err := admin.ACLSetUser(ctx, user, rules...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	url := func(user, more string) string { return "redis://" + user + ":pw@" + s.addr + "?timeout=5s" + more }
	for _, c := range []struct{ user, more string }{
		{"all", ""}, {"all", "&protocol=2"}, {"no-channels", ""}, {"no-info", "&assume-version=7.0"},
	} {
		d, err := opened(t, url(c.user, c.more))
		if err != nil {
			t.Errorf("%v: %v", c, err)
			continue
		}
		passes(t, c.user+c.more, d)
	}
	nothingLeft(t, s)
	if _, err := opened(t, url("no-info", "")); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("no-info: %v", err)
	}
	if _, err := opened(t, url("no-script", "&assume-version=7.0")); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("no-script, assumed: %v", err)
	}
	_, err := opened(t, url("no-script", "")) // before it takes a lock that it could not release
	if !errors.Is(err, backend.ErrMisconfigured) || !strings.Contains(err.Error(), "EVAL") {
		t.Errorf("no-script: %v", err)
	}
}

// When the server accepts no more connections, the existing ones are enough to wait.
func TestWaitingAtMaxClients(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	admin, d := s.admin(t), s.open(t)
	mustRelease(t, d, mustAcquire(t, d, request("warm-up", time.Minute, false)))
	if err := admin.ConfigSet(within(t, 10*slack), "maxclients", "1").Err(); err != nil {
		t.Fatal(err)
	}
	// A call that needs another connection fails, and may not detect that no request was sent.
	release := func(g backend.Grant) {
		eventually(t, "the release is answered", func() bool {
			err := d.Release(context.Background(), g)
			return err == nil || errors.Is(err, backend.ErrNotHeld)
		})
	}
	g := mustAcquire(t, d, request("n", time.Minute, true))
	next := make(chan backend.Grant, 1)
	go func() {
		defer close(next)
		g, err := d.Acquire(within(t, 20*time.Second), request("n", time.Minute, true))
		if err != nil {
			t.Error(err)
			return
		}
		next <- g
	}()
	select {
	case <-next:
		t.Error("acquired a held lock")
	case <-time.After(120 * time.Millisecond): // polled once or twice
	}
	release(g)
	if g, ok := <-next; ok {
		release(g)
	}
	if err := admin.ConfigSet(within(t, 10*slack), "maxclients", "100").Err(); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t, s)
}

// A policy of volatile-… is refused unless an option accepts it; a policy that evicts any key is always refused.
func TestEvictionPolicies(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru")
	if _, err := opened(t, "redis://"+s.addr); !errors.Is(err, backend.ErrMisconfigured) ||
		!strings.Contains(err.Error(), "allow-volatile-eviction") {
		t.Errorf("volatile-lru: %v", err)
	}
	d, err := opened(t, "redis://"+s.addr+"?allow-volatile-eviction=true")
	if err != nil {
		t.Fatal(err)
	}
	if e := d.Describe().Exclusion; e != backend.ExclusionVolatileServer {
		t.Errorf("exclusion of a server that evicts: %v", e)
	}
	mustRelease(t, d, mustAcquire(t, d, request("n", time.Minute, true)))
	if err := s.admin(t).ConfigSet(within(t, 10*slack), "maxmemory-policy", "allkeys-lru").Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := opened(
		t, "redis://"+s.addr+"?allow-volatile-eviction=true",
	); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("allkeys-lru: %v", err)
	}
}

// After a failover to a server with unfit settings no lock is granted, and existing holds can be renewed and released.
// Once the settings are right, locks are granted again.
func TestUnfitAfterReconnect(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	g := mustAcquire(t, d, request("held", 2*time.Minute, false))
	ctx := within(t, 2*time.Minute)
	set := func(policy string) {
		t.Helper()
		if err := admin.ConfigSet(ctx, "maxmemory-policy", policy).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if err := admin.ConfigSet(ctx, "maxmemory", "100mb").Err(); err != nil {
		t.Fatal(err)
	}
	set("allkeys-lru")
	eventually(t, "the probe may be made again", func() bool {
		return time.Duration(int64(d.service.clock.Now())-d.service.probe.looked.Load()) > suspectInterval
	})
	if err := admin.ClientKillByFilter(ctx, "TYPE", "normal", "SKIPME", "yes").Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the settings are noticed", func() bool {
		free, err := d.Acquire(ctx, request("free", time.Minute, false))
		if err == nil {
			_ = d.Release(ctx, free) // its connection may be the killed one
		}
		return errors.Is(err, backend.ErrMisconfigured)
	})
	eventually(t, "a hold is renewed", func() bool { return d.Renew(ctx, []backend.Grant{g})[0].Err == nil })
	mustRelease(t, d, g)
	if _, err := d.Acquire(ctx, request("free", time.Minute, true)); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("while it lasts: %v", err)
	}
	set("noeviction")
	mustRelease(t, d, mustAcquire(t, d, request("after", time.Minute, false)))
}

// Invalid assumptions about the server are refused.
func TestInvalidAssumptions(t *testing.T) {
	t.Parallel()
	for _, url := range []string{
		"redis://a?assume-version=5.0", "redis://a?assume-version=", "redis://a?assume-cluster=true",
		"redis://a?assume-version=7.0&assume-cluster=yes", "redis://a?allow-volatile-eviction=1",
	} {
		if _, err := opened(t, url); !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%s: %v", url, err)
		}
	}
}

// filter is a proxy that forwards only some commands, like proxies in front of many servers: it refuses commands that
// need a separate connection or concern a whole server.
func filter(t *testing.T, to string, closes bool) (addr string) {
	t.Helper()
	return between(t, to, func(client, server net.Conn) { filterCommands(client, server, closes) })
}

// between is a proxy that handles its connections with carry.
func between(t *testing.T, to string, carry func(client, server net.Conn)) (addr string) {
	t.Helper()
	in, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	t.Cleanup(func() {
		in.Close()
		all.Wait()
	})
	all.Go(func() {
		for {
			client, err := in.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				client.Close()
				continue
			}
			all.Go(func() {
				defer client.Close()
				defer server.Close()
				carry(client, server)
			})
		}
	})
	return in.Addr().String()
}

var filtered = map[string]bool{"eval": true, "evalsha": true, "ping": true, "get": true, "set": true, "del": true}

// filterCommands answers one command after the other, with the server's answer or a refusal: an error or, if closes is
// set, the end of the connection.
func filterCommands(client, server net.Conn, closes bool) {
	in, back := bufio.NewReader(client), bufio.NewReader(server)
	for {
		whole, words, err := readItem(in, nil, nil)
		if err != nil {
			return
		}
		answer := fmt.Appendf(nil, "-ERR unknown command '%s'\r\n", words[0])
		if filtered[strings.ToLower(words[0])] {
			if _, err := server.Write(whole); err != nil {
				return
			}
			if answer, _, err = readItem(back, nil, nil); err != nil {
				return
			}
		} else if closes {
			return
		}
		if _, err := client.Write(answer); err != nil {
			return
		}
	}
}

// readItem reads one value of the protocol, and returns its bytes and its texts.
func readItem(in *bufio.Reader, whole []byte, words []string) ([]byte, []string, error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return nil, nil, err
	}
	whole = append(whole, line...)
	var n int
	switch line[0] {
	case '$':
		if fmt.Sscan(line[1:], &n); n >= 0 {
			text := make([]byte, n+2)
			if _, err := io.ReadFull(in, text); err != nil {
				return nil, nil, err
			}
			whole, words = append(whole, text...), append(words, string(text[:n]))
		}
	case '*':
		fmt.Sscan(line[1:], &n)
		for range n {
			if whole, words, err = readItem(in, whole, words); err != nil {
				return nil, nil, err
			}
		}
	}
	return whole, words, nil
}

// Behind a proxy without INFO and SUBSCRIBE, locks work when the server's version is stated.
func TestBehindAProxy(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	if _, err := opened(
		t, "redis://"+filter(t, s.addr, true)+"?assume-version=7.0",
	); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("behind a proxy that hangs up: %v", err)
	}
	addr := filter(t, s.addr, false)
	if _, err := opened(t, "redis://"+addr); err == nil {
		t.Error("a server that does not answer INFO was accepted")
	}
	for _, more := range []string{"", "&assume-cluster=true", "&protocol=2"} {
		d, err := opened(t, "redis://"+addr+"?assume-version=7.0"+more)
		if err != nil {
			t.Errorf("%q: %v", more, err)
			continue
		}
		passes(t, "proxy"+more, d)
		if d.Describe().Capabilities.Has(backend.CapMultiAcquire) == strings.Contains(more, "cluster") {
			t.Errorf("%q: capabilities %v", more, d.Describe().Capabilities)
		}
	}
	nothingLeft(t, s)
	client := goredis.NewClient(&goredis.Options{Addr: addr})
	defer client.Close()
	d := New(client, &Options{Assume: &Server{Version: "x"}})
	defer d.Close(context.Background())
	if _, err := d.Acquire(
		within(t, 10*slack), request("n", time.Minute, false),
	); !errors.Is(err, backend.ErrInvalidOption) {
		t.Errorf("a version that is none: %v", err)
	}
}

// TLS with both versions of the protocol, waiting included.
func TestTLSWithBothProtocols(t *testing.T) {
	t.Parallel()
	authority := testcert.New(t)
	cert, key := authority.Sign(t, "localhost")
	addr := freeport.Addresses(t, 1)[0]
	_, secure, _ := net.SplitHostPort(addr)
	s := startServer(t, "--tls-port", secure, "--tls-cert-file", cert, "--tls-key-file", key,
		"--tls-ca-cert-file", authority.File, "--tls-auth-clients", "no")
	for _, protocol := range []string{"2", "3"} {
		d, err := opened(t, "rediss://"+addr+"?server-name=localhost&ca="+authority.File+"&protocol="+protocol)
		if err != nil {
			t.Errorf("protocol %s: %v", protocol, err)
			continue
		}
		passes(t, "tls", d)
	}
	nothingLeft(t, s)
}
