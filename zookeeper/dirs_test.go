package zookeeper_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/zookeeper"
)

// TestUnusedNamesAreRemoved uses many names once, and some that go on being used. The servers look for empty containers
// once a minute only.
func TestUnusedNamesAreRemoved(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	admin := newAdmin(t, server.Addr())
	drivers := []*zookeeper.Driver{driver(t, server.Addr()), driver(t, server.Addr())}
	take(t, drivers[0], request("held", false))
	release(t, drivers[1], take(t, drivers[1], reader("shared", false)))
	take(t, drivers[0], reader("shared", false)) // and stays, where the other has left
	var all sync.WaitGroup
	for w := range 8 {
		all.Go(func() {
			for n := range 50 {
				d := drivers[n%2]
				g, err := d.Acquire(soon(t, time.Minute), request(fmt.Sprintf("once/%d/%d", w, n), false))
				if err != nil {
					t.Error(err)
					return
				}
				release(t, d, g)
			}
		})
	}
	all.Wait()
	for ctx := soon(t, time.Minute); ; time.Sleep(10 * time.Millisecond) { // no event announces it
		left, err := admin.children(rootNode)
		if err != nil {
			t.Fatal(err)
		}
		if len(left) == 2 {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("%d names are left, such as %s", len(left), strings.Join(left[:min(3, len(left))], ", "))
		}
	}
	for _, d := range drivers { // what was removed comes back
		g := take(t, d, request("once/0/0", false))
		release(t, d, g)
	}
}

// TestNameIsRemovedAllTheTime lets clients take a name that an operator removes whenever it is empty.
func TestNameIsRemovedAllTheTime(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	admin := newAdmin(t, server.Addr())
	done := make(chan struct{})
	var operator, clients sync.WaitGroup
	operator.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				_ = admin.Delete(rootNode+"/lock:removed", -1)
			}
		}
	})
	for range 2 {
		d := driver(t, server.Addr())
		clients.Go(func() {
			for range 100 {
				r := request("removed", true)
				g, err := d.Acquire(soon(t, time.Minute), r)
				if err != nil {
					t.Errorf("Acquire = %v", err)
					return
				}
				release(t, d, g)
			}
		})
	}
	clients.Wait()
	close(done)
	operator.Wait()
}
