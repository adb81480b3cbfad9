package main

import (
	"context"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	fencezookeeper "github.com/fencelock/fencelock/zookeeper"
)

func (s *zooKeeperSystem) peers() []peer {
	return []peer{
		{name: "raw", role: roleFloor, open: openRawZooKeeper},
		{name: ours, role: roleOurs, waits: true, open: openOurZooKeeper,
			renewEvery: func(ttl time.Duration) time.Duration { return (ttl - zooKeeperTick) / 3 },
			key:        func(name string) string { return "/fencelock/lock:" + strings.ReplaceAll(name, "/", "%2F") }},
		{name: "zk.Lock", role: rolePeer, waits: true, open: openLockZooKeeper,
			renewEvery: func(ttl time.Duration) time.Duration { return ttl / 3 }, // the library pings
			key:        zooKeeperNode},
	}
}

// zooKeeperNode is the node of a name without any library's escaping.
func zooKeeperNode(name string) string { return "/" + name }

func openOurZooKeeper(o clientOptions) (client, error) {
	d := fencezookeeper.New([]string{o.addr}, &fencezookeeper.Options{Tick: zooKeeperTick, Dial: o.dial})
	return newOurs(d, zooKeeperTTL(o), func() {})
}

// openRawZooKeeper is the floor without contention: an ephemeral node is created, and deleted.
func openRawZooKeeper(o clientOptions) (client, error) {
	c, err := dialZooKeeper(o)
	if err != nil {
		return nil, err
	}
	return library{end: c.Close, take: func(_ context.Context, name string) (hold, error) {
		path, text := "/"+strings.ReplaceAll(name, "/", "-"), []byte("one-of-some-length-like-a-uuid")
		_, err := c.Create(path, text, zk.FlagEphemeral, zk.WorldACL(zk.PermAll))
		return untold(func(context.Context) error { return c.Delete(path, -1) }), err
	}}, nil
}

// openLockZooKeeper is the recipe of the client library, one connection for all locks of the client. It knows no
// contexts, and tells nobody of a loss.
func openLockZooKeeper(o clientOptions) (client, error) {
	c, err := dialZooKeeper(o)
	if err != nil {
		return nil, err
	}
	return library{end: c.Close, take: func(_ context.Context, name string) (hold, error) {
		l := zk.NewLock(c, zooKeeperNode(name), zk.WorldACL(zk.PermAll))
		err := l.Lock()
		return untold(func(context.Context) error { return l.Unlock() }), err
	}}, nil
}
