package binding_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/zookeeper"
	"github.com/fencelock/fencelock/zookeeper/internal/binding"
)

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func request(name string, wait bool) backend.Request {
	id := backend.NewRequestID()
	return backend.Request{
		Name: name, RequestID: id, HoldID: backend.NewRequestID(), Owner: "test", TTL: 10 * time.Second, Wait: wait,
	}
}

func closed(t testing.TB, d *binding.Driver) *binding.Driver {
	t.Cleanup(func() { _ = d.Close(within(t, 10*time.Second)) })
	return d
}

func acquire(t testing.TB, d backend.Driver, r backend.Request) backend.Grant {
	t.Helper()
	g, err := d.Acquire(within(t, 30*time.Second), r)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// TestDriver runs what the suite does not ask, all on one server.
func TestDriver(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	for name, test := range map[string]func(*testing.T, *containers.ZooKeeperServer){
		"old-and-new-exclude-each-other":               oldAndNewExcludeEachOther,
		"hold-moves-between-old-and-new":               holdMovesBetweenOldAndNew,
		"slow-replies":                                 slowReplies,
		"spare-session-ends":                           spareSessionEnds,
		"repeated-acquire-is-quick":                    repeatedAcquireIsQuick,
		"cancelled-waiter-leaves-another-clients-hold": cancelledWaiterLeavesAnotherClientsHold,
		"foreign-nodes-do-not-block-waiters":           foreignNodesDoNotBlockWaiters,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, server)
		})
	}
}

// Clients of the shipped driver and of this package contend for one name. The layout of both is one.
func oldAndNewExcludeEachOther(t *testing.T, server *containers.ZooKeeperServer) {
	old := func() backend.Driver {
		d := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{Tick: containers.ZooKeeperTick})
		t.Cleanup(func() { _ = d.Close(within(t, 10*time.Second)) })
		return d
	}
	drivers := []backend.Driver{old(), closed(t, newDriver(t, server.Addr())), old(), closed(t, newDriver(t, server.Addr()))}
	var inside, last atomic.Int64
	var grants [4]int
	var all sync.WaitGroup
	until := time.Now().Add(4 * time.Second)
	for i, d := range drivers {
		for n := range 3 {
			all.Go(func() {
				for time.Now().Before(until) {
					g, err := d.Acquire(within(t, 30*time.Second), request("shared-layout", n > 0))
					if errors.Is(err, backend.ErrHeld) {
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					if others := inside.Add(1); others != 1 {
						t.Errorf("%d hold at once", others)
					}
					if before := last.Swap(int64(g.Token)); before >= int64(g.Token) {
						t.Errorf("token %v after %d", g.Token, before)
					}
					grants[i] += 1 // alone
					inside.Add(-1)
					if err := d.Release(within(t, 30*time.Second), g); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	all.Wait()
	t.Log("grants of old, new, old, new:", grants)
	for i, n := range grants {
		if n == 0 {
			t.Errorf("driver %d was never granted", i)
		}
	}
}

// A hold moves between an old client and a new one with its token and its place, when its request is repeated there.
func holdMovesBetweenOldAndNew(t *testing.T, server *containers.ZooKeeperServer) {
	d := closed(t, newDriver(t, server.Addr()))
	old := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{Tick: containers.ZooKeeperTick})
	t.Cleanup(func() { _ = old.Close(within(t, 10*time.Second)) })
	r := request("moves", false)
	g := acquire(t, d, r)
	for _, next := range []backend.Driver{old, d, old, d} {
		again := acquire(t, next, r)
		if again.Token != g.Token || again.Incarnation != g.Incarnation || again.Nonce != g.Nonce {
			t.Fatalf("the same request: %v, %v, want %v, %v", again.Token, again.Incarnation, g.Token, g.Incarnation)
		}
	}
	if err := d.Release(within(t, 10*time.Second), g); err != nil {
		t.Fatal(err)
	}
	acquire(t, old, request("moves", false))
}

// A service that needs three seconds for each reply is slow, and not down: a release, and calls that look, take as long
// as their callers allow.
func slowReplies(t *testing.T, server *containers.ZooKeeperServer) {
	addr, link := server.NewLink(t)
	d := closed(t, newDriver(t, addr))
	g := acquire(t, d, request("slow", false))
	link.Delay(fault.Replies, 3*time.Second)
	if s, err := d.Look(within(t, 30*time.Second), "slow"); err != nil || !s.Held {
		t.Errorf("Look = %+v, %v", s, err)
	}
	for s, err := range d.List(within(t, 30*time.Second), "slow") {
		if err != nil || s.Name != "slow" {
			t.Errorf("List = %+v, %v", s, err)
		}
	}
	if err := d.Release(within(t, 30*time.Second), g); err != nil {
		t.Errorf("Release = %v", err)
	}
	link.Pass()
}

// A request that is longer than the servers take fails with the reason, and is not repeated until its context ends.
func TestTooLongRequest(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t, containers.Java("-Djute.maxbuffer=8192"))
	d := closed(t, newDriver(t, server.Addr()))
	acquire(t, d, request("short", false))
	r := request("long", true)
	r.Metadata = map[string]string{"text": strings.Repeat("x", 12<<10)}
	_, err := d.Acquire(within(t, 30*time.Second), r)
	if !errors.Is(err, backend.ErrMisconfigured) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Acquire = %v, want ErrMisconfigured", err)
	}
	acquire(t, d, request("short-again", false))
}

// A session that served calls without a hold ends when it is not used.
func spareSessionEnds(t *testing.T, server *containers.ZooKeeperServer) {
	proxy, err := fault.NewProxy(server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proxy.Close() })
	d := closed(t, newDriver(t, proxy.Addr()))
	if _, err := d.Look(within(t, 10*time.Second), "nothing"); err != nil {
		t.Fatal(err)
	}
	for ctx := within(t, 30*time.Second); proxy.Conns() > 0; time.Sleep(50 * time.Millisecond) {
		if ctx.Err() != nil {
			t.Fatalf("%d connections stay open", proxy.Conns())
		}
	}
}

// An acquire that is repeated is answered at once: no proof waits for a part of a tick.
func repeatedAcquireIsQuick(t *testing.T, server *containers.ZooKeeperServer) {
	d := closed(t, newDriver(t, server.Addr()))
	r := request("quick", false)
	g := acquire(t, d, r)
	shortest := time.Hour
	for range 5 {
		began := time.Now()
		if again := acquire(t, d, r); again.Incarnation != g.Incarnation {
			t.Fatalf("another hold: %v", again)
		}
		shortest = min(shortest, time.Since(began))
	}
	if shortest > 300*time.Millisecond {
		t.Errorf("a repeated acquire took %v or more", shortest)
	}
}

// A waiter whose request moves to another client does not end the hold there when it is cancelled.
func cancelledWaiterLeavesAnotherClientsHold(t *testing.T, server *containers.ZooKeeperServer) {
	first, second := closed(t, newDriver(t, server.Addr())), closed(t, newDriver(t, server.Addr()))
	holder := acquire(t, second, request("twice", false))
	r := request("twice", true)
	ctx, cancel := context.WithCancel(within(t, 30*time.Second))
	ended := make(chan error, 1)
	go func() {
		_, err := first.Acquire(ctx, r)
		ended <- err
	}()
	for s, err := second.Look(ctx, "twice"); s.Waiters != 1; s, err = second.Look(ctx, "twice") {
		if err != nil {
			t.Fatal(err)
		}
	}
	got := make(chan backend.Grant, 1)
	go func() {
		g, err := second.Acquire(within(t, 30*time.Second), r)
		if err != nil {
			t.Error(err)
		}
		got <- g
	}()
	admin := newAdmin(t, server.Addr())
	owned := func() (owners map[int64]int) {
		owners = map[int64]int{}
		for _, node := range admin.children(t, dirOf("twice")) {
			if stat := admin.stat(t, dirOf("twice")+"/"+node); stat != nil {
				owners[stat.EphemeralOwner]++
			}
		}
		return owners
	}
	for len(owned()) != 1 { // both entries are the second client's
		if ctx.Err() != nil {
			t.Fatal("the wait does not move")
		}
	}
	cancel()
	<-ended
	if err := second.Release(within(t, 10*time.Second), holder); err != nil {
		t.Fatal(err)
	}
	g := <-got
	time.Sleep(300 * time.Millisecond) // a deletion would have come by now
	if out := second.Renew(within(t, 10*time.Second), []backend.Grant{g}); out[0].Err != nil {
		t.Errorf("Renew = %v", out[0].Err)
	}
}

// Foreign nodes that look like entries keep nobody waiting.
func foreignNodesDoNotBlockWaiters(t *testing.T, server *containers.ZooKeeperServer) {
	d, admin := closed(t, newDriver(t, server.Addr())), newAdmin(t, server.Addr())
	holder := acquire(t, d, request("foreign", false))
	dir := dirOf("foreign")
	admin.create(t, dir+"/"+backend.NewRequestID()+".0000000000")
	if _, err := admin.Create(dir+"/"+backend.NewRequestID()+".", nil, zk.FlagSequence, zk.WorldACL(zk.PermAll)); err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() {
		_, err := d.Acquire(within(t, 20*time.Second), request("foreign", true))
		got <- err
	}()
	for s, err := d.Look(within(t, 20*time.Second), "foreign"); s.Waiters == 0; s, err = d.Look(within(t, 20*time.Second), "foreign") {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Release(within(t, 10*time.Second), holder); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(fmt.Errorf("the waiter behind foreign nodes: %w", err))
	}
}
