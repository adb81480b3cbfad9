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
	return rawZooKeeper{c}, nil
}

type rawZooKeeper struct{ c *zk.Conn }

func (c rawZooKeeper) close() { c.c.Close() }

func (c rawZooKeeper) lock(ctx context.Context, name string) (hold, error) {
	return c.tryLock(ctx, name)
}

func (c rawZooKeeper) tryLock(_ context.Context, name string) (hold, error) {
	path := "/" + strings.ReplaceAll(name, "/", "-")
	text := []byte("one-of-some-length-like-a-uuid")
	if _, err := c.c.Create(path, text, zk.FlagEphemeral, zk.WorldACL(zk.PermAll)); err != nil {
		return nil, err
	}
	return rawZooKeeperNode{c.c, path}, nil
}

type rawZooKeeperNode struct {
	c    *zk.Conn
	path string
}

func (h rawZooKeeperNode) unlock(context.Context) error { return h.c.Delete(h.path, -1) }
func (h rawZooKeeperNode) lost() <-chan struct{}        { return nil }

// openLockZooKeeper is the recipe of the client library, one connection for all locks of the client. It knows no
// contexts, and tells nobody of a loss.
func openLockZooKeeper(o clientOptions) (client, error) {
	c, err := dialZooKeeper(o)
	if err != nil {
		return nil, err
	}
	return lockZooKeeper{c}, nil
}

type lockZooKeeper struct{ c *zk.Conn }

func (c lockZooKeeper) close() { c.c.Close() }

func (c lockZooKeeper) tryLock(ctx context.Context, name string) (hold, error) {
	return c.lock(ctx, name)
}

func (c lockZooKeeper) lock(_ context.Context, name string) (hold, error) {
	l := zk.NewLock(c.c, zooKeeperNode(name), zk.WorldACL(zk.PermAll))
	if err := l.Lock(); err != nil {
		return nil, err
	}
	return lockZooKeeperHold{l}, nil
}

type lockZooKeeperHold struct{ l *zk.Lock }

func (h lockZooKeeperHold) unlock(context.Context) error { return h.l.Unlock() }
func (h lockZooKeeperHold) lost() <-chan struct{}        { return nil }
