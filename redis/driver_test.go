package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testtier"
)

// bind returns a driver, and the proxy before the server.
func (s *testServer) bind(t testing.TB) (*Driver, *fault.Proxy) {
	t.Helper()
	p, err := fault.NewProxy(s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return openAt(t, p.Addr()), p
}

// A step that was sent on a connection that broke is not repeated, whether it was sent alone or with others.
func TestSendsOnce(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, link := s.bind(t)
	admin := s.admin(t)
	for _, n := range []int{1, 20} {
		// On a busy machine the replies may arrive before the connection breaks.
		eventually(t, fmt.Sprintf("some of %d calls fail", n), func() bool {
			if _, err := d.Look(within(t, 10*slack), "name"); err != nil {
				t.Fatal(err)
			}
			before := calls(t, admin, "pttl")        // a look executes one
			link.Delay(fault.Replies, time.Second/2) // the first call delays the others, which are sent together
			var all sync.WaitGroup
			var broken atomic.Int64
			for range n {
				all.Go(func() {
					if _, err := d.Look(within(t, 10*slack), "name"); err != nil {
						broken.Add(1)
					}
				})
			}
			eventually(t, "the server has run what was sent", func() bool { return calls(t, admin, "pttl")-before >= n })
			link.Reset()
			link.Pass()
			all.Wait()
			if ran := calls(t, admin, "pttl") - before; ran > n {
				t.Errorf("%d calls, of which %d failed, made the server carry out %d steps", n, broken.Load(), ran)
			}
			return broken.Load() > 0
		})
	}
}

// A late push does not count as a hold that begins at its arrival.
func TestDatesPushes(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	holder, admin := s.open(t), s.admin(t)
	d, link := s.bind(t)
	g := mustAcquire(t, holder, request("name", time.Minute, false))
	r := request("name", 10*time.Second, true)
	r.Renews = true
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	answers := make(chan backend.Grant, 1)
	go func() {
		g, _ := d.Acquire(ctx, r)
		answers <- g
	}()
	place := func() string {
		return admin.LIndex(t.Context(), redisscript.KeysOf("fencelock:", "name").Queue, 0).Val()
	}
	eventually(t, "there is a waiter", func() bool { return place() != "" })
	link.Hold(fault.Requests) // a request would prolong the hold
	link.Delay(fault.Replies, 600*time.Millisecond)
	mustRelease(t, holder, g)
	rival := mustAcquire(t, holder, request("name", time.Minute, true)) // granted after the waiter's offer has ended
	cancel()
	if got := <-answers; got.RequestID != "" {
		until := got.SentAt.Add(d.Describe().Validity(got.TTL))
		if until > rival.SentAt {
			t.Errorf("the waiter believes in its hold until %v after its rival got the name", until.Sub(rival.SentAt))
		}
	}
}

// A demoted master keeps the connections of its subscribers, and forwards messages that the new master publishes,
// however late. The hold of such a push counts from the waiter's last request, so it has ended.
func TestDatesHandovers(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	const soon = "--repl-diskless-sync-delay"
	old, next := startServer(t, soon, "0"), startServer(t, soon, "0")
	replicas, err := fault.NewProxy(next.addr) // between the new master and the old one
	if err != nil {
		t.Fatal(err)
	}
	defer replicas.Close()
	follow := func(replica *testServer, master string) {
		t.Helper()
		host, port, _ := net.SplitHostPort(master)
		if err := replica.admin(t).Do(t.Context(), "replicaof", host, port).Err(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the replica follows", func() bool {
			text := replica.admin(t).Info(t.Context(), "replication").Val()
			return strings.Contains(text, "master_link_status:up")
		})
	}
	follow(next, old.addr)
	holder, d := old.open(t), openAt(t, old.addr)
	g := mustAcquire(t, holder, request("name", time.Minute, false))

	r := request("name", 10*time.Second, true)
	r.Renews = true
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	type answer struct {
		grant backend.Grant
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		g, err := d.Acquire(ctx, r)
		answers <- answer{g, err}
	}()
	queue := redisscript.KeysOf("fencelock:", "name").Queue
	eventually(t, "the place is replicated", func() bool {
		return next.admin(t).LLen(t.Context(), queue).Val() == 1
	})

	// The failover. From now on the old master gets every change 3 s late.
	if err := next.admin(t).Do(t.Context(), "replicaof", "no", "one").Err(); err != nil {
		t.Fatal(err)
	}
	follow(old, replicas.Addr())
	replicas.Delay(fault.Replies, 3*time.Second)
	pushes := old.admin(t).PSubscribe(t.Context(), redisscript.Channel("fencelock:", "*"))
	defer pushes.Close()
	if _, err := pushes.Receive(t.Context()); err != nil {
		t.Fatal(err)
	}
	after := next.open(t)
	mustRelease(t, after, g)
	rival := mustAcquire(t, after, request("name", time.Minute, true)) // granted after the waiter's offer has ended
	if _, err := pushes.ReceiveMessage(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond) // for the waiter to act on the push
	cancel()
	got := <-answers
	if got.err == nil {
		t.Errorf("the waiter holds until %v, and its rival has held since %v",
			got.grant.SentAt.Add(d.Describe().Validity(got.grant.TTL)), rival.SentAt)
	}
	if !errors.Is(got.err, context.Canceled) {
		t.Errorf("the waiter at a demoted master: %v", got.err)
	}
}

// A server that may evict holds grants no holds, even if that was configured later. Existing holds can be renewed and
// released.
func TestRefusesUnfitServers(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, link := s.bind(t)
	g, err := d.Acquire(t.Context(), request("held", time.Minute, false))
	if err != nil {
		t.Fatal(err)
	}
	for setting, value := range map[string]string{"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"} {
		if err := s.admin(t).ConfigSet(t.Context(), setting, value).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Ping(t.Context()); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("ping = %v, want ErrMisconfigured", err)
	}
	link.Reset() // after a fault the next attempt examines the server, within a second of the last examination
	eventually(t, "an attempt is refused", func() bool {
		g, err := d.Acquire(within(t, slack), request("refused", time.Minute, false))
		if err == nil {
			_ = d.Release(within(t, slack), g)
		}
		return errors.Is(err, backend.ErrMisconfigured)
	})
	if err := d.Renew(t.Context(), []backend.Grant{g})[0].Err; err != nil {
		t.Errorf("renewal of what was held before = %v", err)
	}
	if err := d.Release(t.Context(), g); err != nil {
		t.Errorf("release of what was held before = %v", err)
	}
}

// A grant that no replica confirms is released, and the request fails, even if it waits.
func TestRefusesWithoutReplicas(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d := newDriver(goredis.NewClient(fitOptions(s.addr)), true, nil, &Options{
		Replicas: 1, ReplicaTimeout: 10 * time.Millisecond,
	})
	defer d.Close(within(t, slack))
	refused := func(what string, err error) {
		t.Helper()
		var replicas *ReplicasError
		if !errors.As(err, &replicas) || !errors.Is(err, backend.ErrUnavailable) || errors.Is(err, backend.ErrUnknown) ||
			errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v, want a ReplicasError and ErrUnavailable", what, err)
		}
	}
	for _, wait := range []bool{false, true} {
		r := request("name", time.Minute, false)
		r.Wait = wait
		_, err := d.Acquire(within(t, time.Minute), r)
		refused(fmt.Sprintf("one name, Wait: %v", wait), err)
	}
	_, err := d.AcquireAll(within(t, time.Minute), set("name", "another"))
	refused("two names", err)
	for _, name := range []string{"name", "another"} {
		if state, err := d.Look(within(t, time.Minute), name); err != nil || state.Held {
			t.Errorf("after that %s is held: %v, %v", name, state.Held, err)
		}
	}
}

// Every call reports the invalid option, and sends no request.
func TestReportsInvalidOptions(t *testing.T) {
	t.Parallel()
	unfit := &backend.ConfigError{Setting: "an option", Value: "this", Want: "that", Why: "of a test"}
	d := newDriver(goredis.NewClient(fitOptions("127.0.0.1:1")), true, unfit, &Options{})
	defer d.Close(within(t, slack))
	_, acquired := d.Acquire(within(t, time.Minute), request("name", time.Minute, true))
	_, looked := d.Look(within(t, time.Minute), "name")
	for what, err := range map[string]error{
		"Acquire": acquired, "Look": looked, "Ping": d.Ping(within(t, time.Minute)),
	} {
		if !errors.Is(err, unfit) || errors.Is(err, backend.ErrUnavailable) {
			t.Errorf("%s = %v, want %v", what, err, unfit)
		}
	}
}
