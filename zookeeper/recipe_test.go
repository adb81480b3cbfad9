package zookeeper_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/zookeeper"
)

// waiterEnv makes the test's program a waiter instead: its value is what runWaiter takes.
const waiterEnv = "FENCELOCK_TEST_WAITER"

func TestMain(m *testing.M) {
	fault.RunRole(soakRoles)
	if args := os.Getenv(waiterEnv); args != "" {
		runWaiter(args)
		return
	}
	testtier.Wide(8)
	code := m.Run()
	shared.owner.end()
	os.Exit(code)
}

// runWaiter waits for a lock and says when it has got it, and for how long it may believe so.
func runWaiter(args string) {
	addrs, name, _ := strings.Cut(args, " ")
	d := newDriver(strings.Split(addrs, ",")...)
	fmt.Println("ready")
	r := request(name, true)
	r.TTL = ttl // its session ends soon
	g, err := d.Acquire(context.Background(), r)
	if err != nil {
		fmt.Println("failed", err)
		return
	}
	fmt.Println("granted", int64(g.SentAt.Add(d.Describe().Validity(g.TTL)).Sub(backend.SystemClock().Now())))
	select {} // until killed
}

func newDriver(addrs ...string) *zookeeper.Driver {
	return zookeeper.New(addrs, &zookeeper.Options{Tick: containers.ZooKeeperTick})
}

// The least and the most that the servers of the tests grant.
const (
	ttl     = 2 * containers.ZooKeeperTick
	longTTL = 20 * containers.ZooKeeperTick
)

// request is one whose hold outlives what a busy machine does to it.
func request(name string, wait bool) backend.Request {
	return backend.Request{
		Name: name, Owner: "test", RequestID: backend.NewRequestID(),
		HoldID: "hold-" + backend.NewRequestID(), TTL: longTTL, Wait: wait,
	}
}

// driver returns a driver that the test closes.
func driver(t testing.TB, addrs ...string) *zookeeper.Driver {
	t.Helper()
	d := newDriver(addrs...)
	t.Cleanup(func() {
		if err := d.Close(soon(t, 10*time.Second)); err != nil {
			t.Errorf("Close = %v", err)
		}
	})
	return d
}

func soon(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func take(t testing.TB, d backend.Driver, r backend.Request) backend.Grant {
	t.Helper()
	g, err := d.Acquire(soon(t, 20*time.Second), r)
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	return g
}

// queued waits until somebody waits for name.
func queued(ctx context.Context, d *zookeeper.Driver, name string) error {
	for {
		info, err := d.Look(ctx, name)
		if err != nil || info.Waiters > 0 {
			return err
		}
		time.Sleep(10 * time.Millisecond) // no event announces it
	}
}

// TestPausedWaiterIsNotGranted stops a waiting process for longer than its session lasts, while the lock goes on to
// somebody else. The client library's own Lock says "acquired" in such a waiter when it has several addresses: what it
// asked before the pause is sent on a new session.
func TestPausedWaiterIsNotGranted(t *testing.T) {
	t.Parallel()
	rounds := 4
	if text := os.Getenv("FENCELOCK_ROUNDS"); text != "" {
		var err error
		if rounds, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	server := sharedServer(t)
	var addrs []string
	for range 3 {
		addr, _ := server.NewLink(t)
		addrs = append(addrs, addr)
	}
	holder, rival := driver(t, server.Addr()), driver(t, server.Addr())
	beside := make(chan struct{}, 8)
	var all sync.WaitGroup
	var mu sync.Mutex
	falsely := 0
	for n := range rounds {
		beside <- struct{}{}
		all.Go(func() {
			defer func() { <-beside }()
			if pauseWaiter(t, holder, rival, addrs, fmt.Sprintf("paused/%d", n)) {
				mu.Lock()
				falsely++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	t.Logf("%d false acquisitions in %d rounds", falsely, rounds)
	if falsely > 0 {
		t.Errorf("a waiter that had been paused believed to hold the lock beside its holder in %d of %d rounds",
			falsely, rounds)
	}
}

// pauseWaiter plays one round, and reports whether the waiter believed in a grant while the rival held the lock.
func pauseWaiter(t *testing.T, holder, rival *zookeeper.Driver, addrs []string, name string) (falsely bool) {
	g, err := holder.Acquire(soon(t, 20*time.Second), request(name, false))
	if err != nil {
		t.Errorf("%s: Acquire = %v", name, err)
		return false
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), waiterEnv+"="+strings.Join(addrs, ",")+" "+name)
	child, err := fault.Spawn(cmd)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return false
	}
	defer child.Close()
	if line, err := child.Line(soon(t, 20*time.Second)); err != nil || line != "ready" {
		t.Errorf("%s: waiter = %q, %v", name, line, err)
		return false
	}
	if err := queued(soon(t, 20*time.Second), holder, name); err != nil {
		t.Errorf("%s: Holder = %v", name, err)
		return false
	}
	if err := child.Pause(); err != nil {
		t.Errorf("%s: %v", name, err)
		return false
	}
	if err := holder.Release(soon(t, 20*time.Second), g); err != nil {
		t.Errorf("%s: Release = %v", name, err)
	}
	// The rival stands behind the waiter until that one's session has ended.
	g, err = rival.Acquire(soon(t, 20*time.Second), request(name, true))
	if err != nil {
		t.Errorf("%s: Acquire by the rival = %v", name, err)
		return false
	}
	if err := child.Resume(); err != nil {
		t.Errorf("%s: %v", name, err)
	}
	// What it says now, it says while the rival holds.
	line, err := child.Line(soon(t, 700*time.Millisecond))
	if valid, _ := strconv.ParseInt(strings.TrimPrefix(line, "granted "), 10, 64); err == nil && valid > 0 {
		falsely = true
	}
	if err := rival.Release(soon(t, 20*time.Second), g); err != nil {
		t.Errorf("%s: Release by the rival = %v", name, err)
	}
	if err != nil { // it goes on waiting, on a new session, and gets the lock now
		if line, err = child.Line(soon(t, 20*time.Second)); err != nil || !strings.HasPrefix(line, "granted ") {
			t.Errorf("%s: the waiter, after the rival = %q, %v; want it granted", name, line, err)
		}
	}
	return falsely
}

// TestLostSessionLosesItsHoldsAndNothingElse cuts a client off until its session has ended.
func TestLostSessionLosesItsHoldsAndNothingElse(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	addr, link := server.NewLink(t)
	victim, rival := driver(t, addr), driver(t, server.Addr())
	lost := make(chan backend.Reason, 4)
	r := request("lost", false)
	r.TTL = ttl
	r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
	g := take(t, victim, r)
	link.Hold(fault.Both)
	next := take(t, rival, request("lost", true))
	link.Pass()
	select {
	case reason := <-lost:
		if reason != backend.ReasonSessionExpired {
			t.Errorf("reason = %q, want %q", reason, backend.ReasonSessionExpired)
		}
	case <-soon(t, 10*time.Second).Done():
		t.Error("the holder was not notified that its session has ended")
	}
	for call, do := range map[string]func(context.Context) error{
		"Renew":   func(ctx context.Context) error { return victim.Renew(ctx, []backend.Grant{g})[0].Err },
		"Release": func(ctx context.Context) error { return victim.Release(ctx, g) },
	} {
		ctx := soon(t, 20*time.Second)
		err := do(ctx)
		for ctx.Err() == nil && (errors.Is(err, backend.ErrUnknown) || errors.Is(err, backend.ErrUnavailable)) {
			err = do(ctx) // the connection of a slow machine was lost
		}
		if !errors.Is(err, backend.ErrNotHeld) {
			t.Errorf("%s after the end of the session = %v, want ErrNotHeld", call, err)
		}
	}
	again := take(t, victim, request("another", false))
	if err := victim.Release(soon(t, 10*time.Second), again); err != nil {
		t.Errorf("Release = %v", err)
	}
	if err := rival.Release(soon(t, 10*time.Second), next); err != nil {
		t.Errorf("Release by the rival = %v", err)
	}
	again = take(t, victim, request("lost", false))
	if again.Token <= next.Token {
		t.Errorf("token = %v after %v", again.Token, next.Token)
	}
}

// TestHoldGrantedAgainHasANewValidity acquires with the id of a living hold, from its client and from another one: at
// most a third of the TTL is over, whatever the former grant was worth.
func TestHoldGrantedAgainHasANewValidity(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	a, b := driver(t, server.Addr()), driver(t, server.Addr())
	r := request("again", false) // its session is proved every third of the TTL
	for _, d := range []*zookeeper.Driver{a, b} {
		other := r
		other.Name, other.RequestID = "before", backend.NewRequestID()
		if err := d.Release(soon(t, 10*time.Second), take(t, d, other)); err != nil {
			t.Fatal(err)
		}
	}
	g := take(t, a, r)
	for _, d := range []*zookeeper.Driver{a, b, a} {
		before := backend.SystemClock().Now()
		again := take(t, d, r)
		if before.Sub(again.SentAt) > r.TTL/3 || again.Token != g.Token {
			t.Errorf("token %v, want %v; the validity counts from %v before the call",
				again.Token, g.Token, before.Sub(again.SentAt))
		}
		g = again
	}
	if err := a.Release(soon(t, 10*time.Second), g); err != nil {
		t.Errorf("Release = %v", err)
	}
}

// TestSessionClosedFromElsewhere lets somebody who knows a session's id and password close it, under a holder and a
// waiter.
func TestSessionClosedFromElsewhere(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	b := &breaker{}
	victim := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: b.dial})
	t.Cleanup(func() { _ = victim.Close(soon(t, 10*time.Second)) })
	rival := driver(t, server.Addr())
	lost := make(chan backend.Reason, 4)
	r := request("closed", false)
	r.Lost = func(loss backend.Loss) { lost <- loss.Reason }
	g := take(t, victim, r)
	id, password := b.session() // the waiter may get another one
	blocking := take(t, rival, request("waited for", false))
	waited := make(chan backend.Grant, 1)
	go func() {
		r := r
		r.Name, r.RequestID, r.Wait, r.Lost = "waited for", backend.NewRequestID(), true, nil
		got, err := victim.Acquire(soon(t, 40*time.Second), r)
		if err != nil {
			t.Errorf("Acquire by the waiter = %v", err)
		}
		waited <- got
	}()
	if err := queued(soon(t, 20*time.Second), rival, "waited for"); err != nil {
		t.Fatal(err)
	}
	if err := closeSession(soon(t, 20*time.Second), server.Addr(), id, password); err != nil {
		t.Fatal(err)
	}
	next, err := rival.Acquire(soon(t, 20*time.Second), request("closed", true)) // the victim keeps alive what it has
	if err != nil || next.Token <= g.Token {
		t.Fatalf("Acquire by a rival = token %v, %v; want more than %v, since the session was closed",
			next.Token, err, g.Token)
	}
	select {
	case reason := <-lost:
		if reason != backend.ReasonSessionExpired {
			t.Errorf("reason = %q, want %q", reason, backend.ReasonSessionExpired)
		}
	case <-soon(t, 10*time.Second).Done():
		t.Error("the holder was not notified that its session has ended")
	}
	if r := victim.Renew(soon(t, 10*time.Second), []backend.Grant{g})[0]; !errors.Is(r.Err, backend.ErrNotHeld) {
		t.Errorf("Renew = %v, want ErrNotHeld", r.Err)
	}
	if err := victim.Release(soon(t, 10*time.Second), g); !errors.Is(err, backend.ErrNotHeld) {
		t.Errorf("Release = %v, want ErrNotHeld", err)
	}
	// The waiter has a place again, on another session.
	if err := queued(soon(t, 20*time.Second), rival, "waited for"); err != nil {
		t.Fatal(err)
	}
	if err := rival.Release(soon(t, 10*time.Second), blocking); err != nil {
		t.Errorf("Release = %v", err)
	}
	if got := <-waited; got.Token <= blocking.Token {
		t.Errorf("token %v of the waiter after %v", got.Token, blocking.Token)
	} else if err := victim.Release(soon(t, 10*time.Second), got); err != nil {
		t.Errorf("Release by the waiter = %v", err)
	}
}

// closeSession takes a session over and closes it, as a client does that has its id and password, until the server does
// not know it any more: the victim takes it back meanwhile, which closes the other's connection.
func closeSession(ctx context.Context, addr string, id uint64, password []byte) error {
	for {
		got, err := tryCloseSession(addr, id, password)
		if err == nil && got == 0 {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("the server has session %x, %w", got, errors.Join(err, ctx.Err()))
		}
	}
}

// tryCloseSession returns the session that the server gave: the one asked for, or 0.
func tryCloseSession(addr string, id uint64, password []byte) (uint64, error) {
	c, err := net.DialTimeout("tcp", addr, 10*time.Second)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return 0, err
	}
	var requests bytes.Buffer
	const version, seen, timeout, number, opClose = int32(0), int64(0), int32(10_000), int32(1), int32(-11)
	for _, field := range []any{
		int32(4 + 8 + 4 + 8 + 4 + len(password)), version, seen, timeout, id, int32(len(password)), password,
		int32(4 + 4), number, opClose,
	} {
		if err := binary.Write(&requests, binary.BigEndian, field); err != nil {
			return 0, err
		}
	}
	if _, err := c.Write(requests.Bytes()); err != nil {
		return 0, err
	}
	hello := make([]byte, 20)
	if _, err := io.ReadFull(c, hello); err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, c) // until the server closes the connection
	return binary.BigEndian.Uint64(hello[12:]), err
}

// TestTokenGrowsWhereTheNumberStartsAgain deletes a name's node, as the server does with containers that are empty.
func TestTokenGrowsWhereTheNumberStartsAgain(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	admin := newAdmin(t, server.Addr())
	d := driver(t, server.Addr())
	var last backend.Grant
	for n := range 3 {
		g := take(t, d, request("again", false))
		if node, _, _ := strings.Cut(g.Incarnation, "/"); !strings.HasSuffix(node, ".0000000000") {
			t.Errorf("round %d: the node is %q, want its number to start again", n, node)
		}
		if g.Token <= last.Token {
			t.Errorf("round %d: token %v after %v", n, g.Token, last.Token)
		}
		if err := d.Release(soon(t, 10*time.Second), g); err != nil {
			t.Fatalf("Release = %v", err)
		}
		if err := admin.try(func() error { return admin.Delete("/fencelock/lock:again", -1) }); err != nil {
			t.Fatal(err)
		}
		last = g
	}
}

// TestMoreThanTheServerGrants asks for a session that is longer than the server lets sessions be.
func TestMoreThanTheServerGrants(t *testing.T) {
	t.Parallel()
	d := zookeeper.New([]string{sharedServer(t).Addr()}, &zookeeper.Options{Tick: 2 * time.Second})
	t.Cleanup(func() { _ = d.Close(soon(t, 10*time.Second)) })
	r := request("bounds", false)
	r.TTL = 30 * time.Second
	bound := longTTL.String()
	_, err := d.Acquire(soon(t, 20*time.Second), r)
	if !errors.Is(err, backend.ErrInvalidTTL) || !strings.Contains(err.Error(), bound) {
		t.Errorf("Acquire beyond what the server grants = %v, want ErrInvalidTTL with the bound of %s", err, bound)
	}
}

// TestTickIsRead uses ticks that are shorter than the servers', as far as these let theirs be seen: in the shortest
// session that they grant. Every call says what is wrong, and so does Open.
func TestTickIsRead(t *testing.T) {
	t.Parallel()
	const tick = containers.ZooKeeperTick
	servers := map[string]*containers.ZooKeeperServer{
		"two ticks by default": sharedServer(t),
		"minSessionTimeout": containers.ZooKeeper(t,
			containers.Settings(fmt.Sprintf("minSessionTimeout=%d", (3*tick).Milliseconds()))),
	}
	for name, test := range map[string]struct {
		tick, want time.Duration
	}{
		"two ticks by default": {tick - time.Millisecond, tick},
		"minSessionTimeout":    {tick, tick * 3 / 2},
	} {
		addr := servers[name].Addr()
		refused := func(call string, err error) {
			t.Helper()
			var where *backend.CallError
			var config *backend.ConfigError
			if !errors.Is(err, backend.ErrMisconfigured) || !errors.As(err, &where) || !errors.As(err, &config) {
				t.Fatalf("%s: %s with a tick of %v = %v, want a CallError with a ConfigError",
					name, call, test.tick, err)
			}
			if where.Call != call || config.Value != test.tick.String() ||
				!strings.HasPrefix(config.Want, test.want.String()+" ") {
				t.Errorf("%s: %s with a tick of %v = %v, want it to name the call, that tick, and %v",
					name, call, test.tick, err, test.want)
			}
		}
		d := zookeeper.New([]string{addr}, &zookeeper.Options{Tick: test.tick})
		r := request("tick", false)
		r.TTL = 3 * test.want
		_, err := d.Acquire(soon(t, 20*time.Second), r)
		refused("acquire", err)
		_, err = d.Look(soon(t, 20*time.Second), r.Name)
		refused("look", err)
		if err := d.Close(soon(t, 20*time.Second)); err != nil {
			t.Errorf("%s: Close = %v", name, err)
		}
		_, err = zookeeper.Open(soon(t, 20*time.Second), fmt.Sprintf("zk://%s?timeout=20s&tick=%v", addr, test.tick))
		refused("ping", err)
		good, err := zookeeper.Open(soon(t, 20*time.Second),
			fmt.Sprintf("zk://%s?timeout=20s&tick=%v", addr, test.want))
		if err != nil {
			t.Fatalf("%s: Open with a tick of %v = %v", name, test.want, err)
		}
		release(t, good, take(t, good, r))
		if err := good.Close(soon(t, 20*time.Second)); err != nil {
			t.Errorf("%s: Close = %v", name, err)
		}
	}
}
