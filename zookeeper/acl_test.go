package zookeeper_test

import (
	"errors"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/zookeeper"
)

// TestNodesBelongToTheUser looks at every node of a user's locks as somebody else, in a part of the tree beside which
// the user may make nothing.
func TestNodesBelongToTheUser(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	ann := newAdmin(t, server.Addr()) // she may do all
	ann.create(t, "/app")
	if err := ann.try(func() error {
		_, err := ann.SetACL("/app", zk.AuthACL(zk.PermAll), -1)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := ann.try(func() error {
		_, err := ann.SetACL("/", zk.WorldACL(zk.PermRead), -1)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	as := func(user, password string) *zookeeper.Driver {
		d := zookeeper.New([]string{server.Addr()}, &zookeeper.Options{
			Tick: containers.ZooKeeperTick, Chroot: "/app", KeyPrefix: "/team/locks", User: user, Password: password,
		})
		t.Cleanup(func() { _ = d.Close(soon(t, 10*time.Second)) })
		return d
	}
	d := as("ann", "secret")
	r := request("hers", false)
	g := take(t, d, r)

	stranger, events, err := zk.Connect([]string{server.Addr()}, 10*time.Second,
		zk.WithLogInfo(false), zk.WithLogger(quiet{}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stranger.Close()
		for range events {
		}
	})
	nodes := ann.below(t, "/app")
	if len(nodes) != 4 { // team, locks, the name, the hold
		t.Errorf("the nodes are %q", nodes)
	}
	for _, node := range nodes {
		_, _, err := stranger.Get(node)
		if !errors.Is(err, zk.ErrNoAuth) {
			t.Errorf("a stranger reads %s: %v", node, err)
		}
		if err := stranger.Delete(node, -1); !errors.Is(err, zk.ErrNoAuth) && !errors.Is(err, zk.ErrNotEmpty) {
			t.Errorf("a stranger deletes %s: %v", node, err)
		}
	}
	for _, other := range []*zookeeper.Driver{as("", ""), as("bob", "secret"), as("ann", "guess")} {
		_, err := other.Acquire(soon(t, 10*time.Second), request("hers", false))
		if !errors.Is(err, backend.ErrMisconfigured) || !errors.Is(err, zk.ErrNoAuth) {
			t.Errorf("Acquire by somebody else = %v, want ErrMisconfigured, since it has no right", err)
		}
	}
	release(t, d, g)
}
