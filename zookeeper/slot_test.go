package zookeeper_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/zookeeper"
)

// TestSessionsOfABusyClient counts the connections of one that is idle, and of one that has much to do. It excludes
// itself.
func TestSessionsOfABusyClient(t *testing.T) {
	t.Parallel()
	server := sharedServer(t)
	var dials atomic.Int32
	d := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{
		Tick: containers.ZooKeeperTick,
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			dials.Add(1)
			return (&net.Dialer{}).DialContext(ctx, network, address)
		},
	})
	t.Cleanup(func() {
		if err := d.Close(soon(t, 10*time.Second)); err != nil {
			t.Errorf("Close = %v", err)
		}
	})
	w := stallmeter.Begin() // a connection that is slow to come is made again
	defer w.End()
	for n := range 20 {
		release(t, d, take(t, d, request(fmt.Sprint("idle/", n), false)))
	}
	const perSession = 2 // the other one asks the server for its tick
	if n := dials.Load(); n != perSession {
		w.Errorf(t, 500*time.Millisecond, "a client that does one thing at a time has made %d connections", n)
	}

	const callers, names = 128, 8
	var all sync.WaitGroup
	var mu sync.Mutex
	holders, last := map[string]bool{}, map[string]fencing.Token{}
	for n := range callers {
		name := fmt.Sprint("busy/", n%names)
		all.Go(func() {
			for range 10 {
				r := request(name, true)
				g, err := d.Acquire(soon(t, time.Minute), r)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if holders[name] || g.Token <= last[name] {
					t.Errorf("token %v of %s beside a holder (%v), after %v", g.Token, name, holders[name], last[name])
				}
				holders[name], last[name] = true, g.Token
				mu.Unlock()
				again, err := d.Acquire(soon(t, time.Minute), r) // wherever that looks
				if err != nil || again.Token != g.Token {
					t.Errorf("the same again = token %v, %v; want %v", again.Token, err, g.Token)
				}
				mu.Lock()
				holders[name] = false
				mu.Unlock()
				if err := d.Release(soon(t, time.Minute), again); err != nil && !errors.Is(err, backend.ErrNotHeld) {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if n := dials.Load(); n != perSession {
		w.Errorf(t, 500*time.Millisecond, "a busy client has made %d connections", n)
	}
}
