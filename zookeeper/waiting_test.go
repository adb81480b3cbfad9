package zookeeper_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/zookeeper"
)

// TestIdleWaitersReadNoQueue lets some wait for so long that each has looked for itself.
func TestIdleWaitersReadNoQueue(t *testing.T) {
	t.Parallel()
	const waiters = 20
	server := sharedServer(t)
	holder := driver(t, server.Addr())
	r := request("idle", false)
	take(t, holder, r)

	var mu sync.Mutex
	asked := map[string]int{}
	b := &breaker{requestID: "nobody's", before: func(step string) {
		mu.Lock()
		defer mu.Unlock()
		asked[step]++
	}}
	d := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: b.dial})
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for range waiters {
		w := r
		w.RequestID, w.Wait = backend.NewRequestID(), true
		all.Go(func() {
			if _, err := d.Acquire(ctx, w); !errors.Is(err, context.Canceled) {
				t.Errorf("Acquire = %v", err)
			}
		})
	}
	until := func(step string, n int) {
		for ctx := soon(t, time.Minute); ; time.Sleep(10 * time.Millisecond) { // no event announces it
			mu.Lock()
			so := asked[step]
			mu.Unlock()
			if so >= n {
				return
			}
			if ctx.Err() != nil {
				t.Fatalf("%d waiters came to %q %d times in a minute, want %d", waiters, step, so, n)
			}
		}
	}
	until("list", waiters)              // none has yet to read it first
	until("watch another's", 2*waiters) // that before it at once, and its own when it looks
	until("look", waiters)
	mu.Lock()
	if asked["list"] > waiters {
		t.Errorf("%d waiters read the queue %d times while nothing happened", waiters, asked["list"])
	}
	mu.Unlock()
	cancel()
	all.Wait()
	if err := d.Close(soon(t, 10*time.Second)); err != nil {
		t.Errorf("Close = %v", err)
	}
}

// TestLostNotificationIsNoticed keeps what the server says about watches from a waiter of each kind.
func TestLostNotificationIsNoticed(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	holder := driver(t, server.Addr())
	b := &breaker{deaf: true}
	deaf := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: b.dial})
	t.Cleanup(func() { _ = deaf.Close(soon(t, 10*time.Second)) })
	var all sync.WaitGroup
	for name, r := range map[string]backend.Request{
		"writer": writer("writer", true), "reader": reader("reader", true),
		"one of many": some("one of many", true, 1, 40), // which needs more looks than are made one by one
	} {
		first := writer(name, false)
		if r.Kind == backend.KindPermits {
			first = some(name, false, 1, 40)
		}
		held := []backend.Grant{take(t, holder, first)}
		for r.Kind == backend.KindPermits && len(held) < r.Limit {
			first.RequestID = backend.NewRequestID()
			held = append(held, take(t, holder, first))
		}
		all.Go(func() {
			g, err := deaf.Acquire(soon(t, 40*time.Second), r)
			if err != nil {
				t.Errorf("%s: Acquire = %v", name, err)
				return
			}
			release(t, deaf, g)
		})
		stands(t, holder, name, len(held), 1)
		release(t, holder, held[0])
	}
	all.Wait()
}

// TestManyWatchesThroughASmallBuffer resets the link of a client whose watches together are more than the server takes
// in one request.
func TestManyWatchesThroughASmallBuffer(t *testing.T) {
	t.Parallel()
	const waiters = 200 // with some 75 bytes each
	server := containers.ZooKeeper(t, containers.Java("-Djute.maxbuffer=8192"))
	holder := driver(t, server.Addr())
	held := take(t, holder, request("small", false))
	addr, link := server.NewLink(t)
	var watches atomic.Int32
	b := &breaker{requestID: "nobody's", before: func(step string) {
		if step == "watch another's" {
			watches.Add(1)
		}
	}}
	d := zookeeper.New([]string{addr}, &zookeeper.Options{Tick: containers.ZooKeeperTick, Dial: b.dial})
	t.Cleanup(func() { _ = d.Close(soon(t, 20*time.Second)) })
	var all sync.WaitGroup
	for range waiters {
		all.Go(func() {
			g, err := d.Acquire(soon(t, time.Minute), request("small", true))
			if err != nil {
				t.Errorf("Acquire = %v", err)
				return
			}
			release(t, d, g)
		})
	}
	for ctx := soon(t, time.Minute); watches.Load() < waiters; time.Sleep(10 * time.Millisecond) { // no event announces it
		if ctx.Err() != nil {
			t.Fatalf("%d of %d waiters watch", watches.Load(), waiters)
		}
	}
	stands(t, holder, "small", 1, waiters)
	link.Reset()
	release(t, holder, held)
	all.Wait()
}
