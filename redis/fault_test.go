package redis

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// linked returns a driver behind a proxy.
func (s *testServer) linked(t testing.TB) (*Driver, *fault.Proxy) {
	t.Helper()
	p, err := fault.NewProxy(s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return openAt(t, p.Addr()), p
}

// slack allows for a busy machine: the promise is 50 ms, and a call that ignores its context takes go-redis's read
// timeout of 3 s, or a TTL.
const slack = 2 * time.Second

// A hung server does not delay a call beyond the deadline or the cancellation of its context, and the effects of the
// request after the server resumes do not remain.
func TestHungServer(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	g := mustAcquire(t, d, request("held", time.Minute, true))
	s.pause()
	unknown := map[string]error{} // by request id
	acquire := func(ctx context.Context, wait bool) error {
		r := request("n", time.Minute, wait)
		_, err := d.Acquire(ctx, r)
		unknown[r.RequestID] = err
		return err
	}
	calls := map[string]func(context.Context) error{
		"try":    func(ctx context.Context) error { return acquire(ctx, false) },
		"wait":   func(ctx context.Context) error { return acquire(ctx, true) },
		"renew":  func(ctx context.Context) error { return d.Renew(ctx, []backend.Grant{g})[0].Err },
		"holder": func(ctx context.Context) error { _, err := d.Look(ctx, "held"); return err },
		"ping":   d.Ping,
	}
	for name, call := range calls {
		for _, cancelled := range []bool{false, true} {
			ctx, cancel := context.WithCancel(context.Background())
			want := context.Canceled
			if cancelled {
				time.AfterFunc(100*time.Millisecond, cancel)
			} else {
				cancel()
				ctx, cancel = context.WithTimeout(context.Background(), 100*time.Millisecond)
				want = context.DeadlineExceeded
			}
			end := stallmeter.Late(t)
			err := call(ctx)
			end(100*time.Millisecond+slack, fmt.Sprintf("%s, cancelled %v,", name, cancelled))
			if !errors.Is(err, want) { // with a class, unless no request was sent or the call only reads
				t.Errorf("%s, cancelled %v: %v", name, cancelled, err)
			}
			cancel()
		}
	}
	s.resume()
	for id, err := range unknown {
		r := request("n", time.Minute, false)
		r.RequestID = id
		settle(t, d, err, r)
	}
	mustRelease(t, d, g)
	eventually(t, "nothing is left", func() bool { return len(keys(t, admin)) == 0 })
}

// The reply to an acquire is lost once: the caller gets the lock, and not an error that another holder has it.
func TestLostReply(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, link := s.linked(t)
	other, admin := s.open(t), s.admin(t)
	for _, wait := range []bool{false, true} {
		mustRelease(t, d, mustAcquire(t, d, request("warm-up", 10*time.Second, wait)))
		sent := link.Seen(fault.Requests)
		link.Drop(fault.Replies)
		time.AfterFunc(300*time.Millisecond, link.Pass)
		g := mustAcquire(t, d, request("n", 10*time.Second, wait))
		if link.Seen(fault.Requests) == sent {
			t.Error("nothing went through the link")
		}
		if _, err := other.Acquire(
			within(t, 30*time.Second), request("n", time.Minute, false),
		); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("a rival: %v", err)
		}
		mustRelease(t, d, g)
	}
	eventually(t, "nothing is left", func() bool { return len(keys(t, admin)) == 0 })
}

// A request that is delivered after its caller has returned does not close the name.
func TestLateDelivery(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, link := s.linked(t)
	other, admin := s.open(t), s.admin(t)
	for _, wait := range []bool{false, true} {
		// On a busy machine the time may be over before the request is sent: then the outcome is known.
		eventually(t, "a request is sent", func() (sent bool) {
			mustRelease(t, d, mustAcquire(t, d, request("warm-up", 10*time.Second, wait)))
			link.Hold(fault.Requests)
			ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			r := request("n", time.Minute, wait)
			_, err := d.Acquire(ctx, r)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("gave up: %v", err)
			}
			link.Pass()
			sent = settle(t, d, err, r)
			mustRelease(t, other, mustAcquire(t, other, request("n", 10*time.Second, true)))
			return sent
		})
	}
	eventually(t, "nothing is left", func() bool { return len(keys(t, admin)) == 0 })
}

// A driver that is closed after a release whose caller has returned ends the hold, even if a waiter makes the short
// script insufficient.
func TestCloseSendsAbandonedReleases(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, link := s.linked(t)
	other := s.open(t)
	for _, kind := range []backend.Kind{backend.KindExclusive, backend.KindShared} {
		r := request("n", time.Hour, false)
		r.Kind = kind
		g := mustAcquire(t, d, r)
		got := make(chan error, 1)
		go func() {
			g, err := other.Acquire(within(t, 10*time.Second), request("n", time.Hour, true))
			if err == nil {
				err = other.Release(within(t, 10*time.Second), g)
			}
			got <- err
		}()
		awaitQueue(t, s.admin(t), "n", 1)
		link.Hold(fault.Both)
		if err := d.Release(within(t, 50*time.Millisecond), g); !errors.Is(err, backend.ErrUnknown) {
			t.Errorf("a release without an answer: %v", err)
		}
		link.Drop(fault.Both) // and the delayed messages
		link.Pass()
		if err := d.Close(within(t, 30*time.Second)); err != nil {
			t.Error(err)
		}
		if err := <-got; err != nil {
			t.Errorf("a waiter behind the hold of kind %v: %v", kind, err)
		}
		d = openAt(t, link.Addr())
	}
}

func TestLostRenewalIsNoLoss(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, link := s.linked(t)
	g := mustAcquire(t, d, request("n", 10*time.Second, true))
	for _, dir := range []fault.Direction{fault.Requests, fault.Replies} {
		link.Drop(dir)
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		err := d.Renew(ctx, []backend.Grant{g})[0].Err
		cancel()
		if !errors.Is(err, backend.ErrUnknown) && !errors.Is(err, backend.ErrUnavailable) ||
			errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("renewal: %v", err)
		}
		link.Pass()
	}
	if answer := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0]; answer.Err != nil {
		t.Error(answer.Err)
	}
	mustRelease(t, d, g)
}

func TestServerIsDown(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	s.kill()
	d := s.open(t)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if _, err := d.Acquire(ctx, request("n", time.Minute, false)); !errors.Is(err, backend.ErrUnavailable) ||
		errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("try: %v", err)
	}
	if err := d.Ping(ctx); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("ping: %v", err)
	}
	if _, err := Open(ctx, "redis://"+s.addr); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("open: %v", err)
	}
	end := stallmeter.Late(t)
	short, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	_, err := d.Acquire(short, request("n", time.Minute, true))
	if !errors.Is(err, backend.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait: %v", err)
	}
	if took := end(200*time.Millisecond+slack, "a wait"); took < 200*time.Millisecond {
		t.Errorf("wait ended after %v", took)
	}

	// A wait outlives the outage.
	got := make(chan error, 1)
	go func() {
		g, err := d.Acquire(within(t, 20*time.Second), request("n", 10*time.Second, true))
		if err == nil {
			err = d.Release(within(t, 20*time.Second), g)
		}
		got <- err
	}()
	s.start(t)
	if err := <-got; err != nil {
		t.Errorf("a wait from before the start: %v", err)
	}
}

// If the context of a lone caller ends before the request is sent, the outcome is known.
func TestContextEndsBeforeSending(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, err := Open(t.Context(), "redis://"+s.addr) // the driver's own client, on which callers send directly
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close(context.Background()) })
	for _, want := range []error{context.Canceled, context.DeadlineExceeded} {
		ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
		defer cancel()
		if errors.Is(want, context.Canceled) {
			ctx, cancel = context.WithCancel(t.Context())
			cancel()
		}
		_, _, err := d.service.lines.Do(ctx, lines.NewStep(redisscript.Cancel, redisscript.KeysOf("", "n"), "owner"))
		var f *redisconn.Failure
		if !errors.Is(err, want) || !errors.As(err, &f) || f.Sent {
			t.Errorf("%v: %+v, want a failure that sent nothing", want, err)
		}
	}
}

// The server restarts and loses the locks, the queue and the script.
func TestRestartedEmpty(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, other := s.open(t), s.open(t)
	g := mustAcquire(t, d, request("n", time.Minute, true))
	got := make(chan backend.Grant, 1)
	go func() { got <- mustAcquire(t, other, request("n", time.Minute, true)) }()
	awaitQueue(t, s.admin(t), "n", 1)
	s.kill()
	s.start(t)
	next := <-got // its look finds no place
	answer := d.Renew(within(t, 30*time.Second), []backend.Grant{g})[0]
	var lost *backend.NotHeldError
	if !errors.As(answer.Err, &lost) && !errors.Is(answer.Err, backend.ErrUnknown) ||
		lost != nil && lost.Reason != backend.ReasonEvicted {
		t.Errorf("renewed after a restart: %v", answer.Err)
	}
	if err := d.Release(within(t, 30*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("released after a restart: %v", err)
	}
	mustRelease(t, other, next)
}

// Describe returns the exclusion of the server's configuration once the server was examined.
func TestExclusion(t *testing.T) {
	t.Parallel()
	durable := []string{"--appendonly", "yes", "--appendfsync", "always"}
	replicated := startServer(t, durable...)
	replica := startServer(t, "--replicaof", strings.Replace(replicated.addr, ":", " ", 1))
	eventually(t, "the replica is connected", func() bool {
		text, err := replica.admin(t).Info(context.Background(), "replication").Result()
		return err == nil && strings.Contains(text, "master_link_status:up")
	})
	for name, c := range map[string]struct {
		server *testServer
		want   backend.Exclusion
	}{
		"memory":       {startServer(t), backend.ExclusionVolatileServer},
		"every second": {startServer(t, "--appendonly", "yes"), backend.ExclusionVolatileServer},
		"not on rewrites": {
			startServer(t, append(durable, "--no-appendfsync-on-rewrite", "yes")...), backend.ExclusionVolatileServer,
		},
		"durable": {startServer(t, durable...), backend.ExclusionDurableServer},
		"replica": {replicated, backend.ExclusionAsyncReplica},
	} {
		d := c.server.open(t)
		if got := d.Describe().Exclusion; got != backend.ExclusionVolatileServer {
			t.Errorf("%s: before the probe %v", name, got)
		}
		if err := d.Ping(within(t, 30*time.Second)); err != nil || d.Describe().Exclusion != c.want {
			t.Errorf("%s: %v, %v; want %v", name, d.Describe().Exclusion, err, c.want)
		}
	}
}

func TestScriptFlush(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	for range 3 {
		g := mustAcquire(t, d, request("n", 10*time.Second, true))
		if err := admin.ScriptFlush(context.Background()).Err(); err != nil {
			t.Fatal(err)
		}
		mustRelease(t, d, g)
	}
}

func TestUnfitServers(t *testing.T) {
	t.Parallel()
	master := startServer(t)
	for name, s := range map[string]*testServer{
		"maxmemory-policy": startServer(t, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"),
		"role":             startServer(t, "--replicaof", "127.0.0.1 "+master.addr[len("127.0.0.1:"):]),
		"credentials":      startServer(t, "--requirepass", "secret"),
	} {
		d := s.open(t)
		_, acquire := d.Acquire(within(t, 30*time.Second), request("n", time.Minute, true))
		_, open := Open(within(t, 30*time.Second), "redis://"+s.addr)
		for call, err := range map[string]error{
			"acquire": acquire, "open": open, "ping": d.Ping(within(t, 30*time.Second)),
		} {
			var config *backend.ConfigError
			if !errors.Is(err, backend.ErrMisconfigured) || !errors.As(err, &config) || config.Setting != name {
				t.Errorf("%s: %s: %v", name, call, err)
			}
		}
	}
	s := startServer(t, "--maxmemory", "100mb", "--maxmemory-policy", "noeviction")
	if err := s.open(t).Ping(within(t, 30*time.Second)); err != nil {
		t.Errorf("noeviction: %v", err)
	}
}

// A full server refuses new holds, and existing holds can be released.
func TestServerOutOfMemory(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	g := mustAcquire(t, d, request("n", 10*time.Second, true))
	ctx := within(t, 20*time.Second)
	if err := admin.ConfigSet(ctx, "maxmemory", "1").Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Acquire(ctx, request("other", time.Minute, false)); !errors.Is(err, backend.ErrUnavailable) {
		t.Errorf("full: %v", err)
	}
	mustRelease(t, d, g)
}

// Clients whose settings would retry silently or outlive contexts are replaced or refused.
func TestUnfitClients(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	plain := goredis.NewClient(&goredis.Options{Addr: s.addr})
	defer plain.Close()
	d := New(plain, nil)
	mustRelease(t, d, mustAcquire(t, d, request("n", time.Minute, true)))
	own, ok := d.service.client.(*goredis.Client)
	if !ok || own == plain || own.Options().MaxRetries != 0 || !own.Options().ContextTimeoutEnabled {
		t.Errorf("default settings: %+v", own.Options())
	}
	if err := d.Close(within(t, 5*time.Second)); err != nil {
		t.Error(err)
	}
	if err := plain.Ping(context.Background()).Err(); err != nil {
		t.Errorf("the caller's client after Close: %v", err)
	}
	fitting := goredis.NewClient(fitOptions(s.addr))
	defer fitting.Close()
	d = New(fitting, nil)
	if d.service.client != goredis.UniversalClient(fitting) {
		t.Error("a fitting client was not used as it is")
	}
	if err := d.Close(within(t, 5*time.Second)); err != nil {
		t.Error(err)
	}
	if err := fitting.Ping(context.Background()).Err(); err != nil {
		t.Errorf("the caller's client after Close: %v", err)
	}

	ring := goredis.NewRing(&goredis.RingOptions{Addrs: map[string]string{"a": s.addr}})
	defer ring.Close()
	for name, client := range map[string]goredis.UniversalClient{"ring": ring, "nil": nil} {
		d := New(client, nil)
		_, err := d.Acquire(within(t, 30*time.Second), request("n", time.Minute, true))
		if !errors.Is(err, backend.ErrMisconfigured) && !errors.Is(err, backend.ErrInvalidOption) {
			t.Errorf("%s: %v", name, err)
		}
		if err := d.Close(within(t, 5*time.Second)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A cancelled acquire leaves no key, whenever the cancellation comes.
func TestCancelledAnytime(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	d, admin := s.open(t), s.admin(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := d.Acquire(ctx, request("n", time.Minute, true))
	if !errors.Is(err, context.Canceled) || errors.Is(err, backend.ErrUnknown) {
		t.Errorf("cancelled before: %v", err)
	}
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*50*time.Microsecond)
			defer cancel()
			r := request(fmt.Sprint("n", i%8), time.Minute, i%3 > 0)
			g, err := d.Acquire(ctx, r)
			if err == nil {
				mustRelease(t, d, g)
			} else if settle(t, d, err, r); !errors.Is(err, backend.ErrHeld) && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	wg.Wait()
	eventually(t, "nothing is left", func() bool { return len(keys(t, admin)) == 0 })
}
