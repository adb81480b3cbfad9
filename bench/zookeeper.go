package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	fencezookeeper "github.com/fencelock/fencelock/zookeeper"
)

// zooKeeperTick is the server's tickTime: sessions last between 1 s and 10 s, so that longer TTLs of scenarios are cut.
const zooKeeperTick = 500 * time.Millisecond

// startZooKeeper starts the server of Debian's package with its own settings but for the tick, and with fsync. Its
// trips are the packets that it received, pings included; its commands are transactions.
func startZooKeeper(life *scope) *system {
	const classes = "/usr/share/java/zookeeper.jar"
	if _, err := os.Stat(classes); err != nil {
		life.must(fmt.Errorf("install ZooKeeper (Debian: libzookeeper-java, default-jre-headless): %w", err))
	}
	s := &system{name: "zookeeper", addresses: life.addrs(1)}
	s.servers = []*process{life.process("java", func(dir string) []string {
		return []string{"-Xmx512m", "-Dzookeeper.admin.enableServer=false", "-Dzookeeper.4lw.commands.whitelist=srvr",
			"-cp", filepath.Dir(classes) + "/*", "org.apache.zookeeper.server.ZooKeeperServerMain",
			portOf(s.addr()), dir, strconv.FormatInt(zooKeeperTick.Milliseconds(), 10), "0"}
	})}
	s.serves = func(ctx context.Context, _ int) (string, error) {
		fields, err := askZooKeeper(ctx, s.addr())
		if err == nil && fields["Mode"] == "" {
			err = errors.New("it does not serve yet")
		}
		version, _, _ := strings.Cut(fields["Zookeeper version"], "-")
		return "ZooKeeper " + version, err
	}
	life.must(s.serving(life.ctx, 0))
	admin := dialZooKeeper(life, clientOptions{addr: s.addr(), ttl: 10 * time.Second})
	life.must(each(16, func(i int) error { // lets Java compile the measured code
		path, err := fmt.Sprint("/warm", i), error(nil)
		for n := 0; n < 1000 && err == nil; n++ {
			_, err = admin.Create(path, nil, zk.FlagEphemeral, zk.WorldACL(zk.PermAll))
			_, _, err2 := admin.Children("/")
			err = errors.Join(err, err2, admin.Delete(path, -1))
		}
		return err
	}))
	s.count = func(by *scope) (commands, trips float64) {
		fields, err := askZooKeeper(by.ctx, s.addr())
		by.must(err)
		executed, err := strconv.ParseUint(fields["Zxid"], 0, 64)
		received, err2 := strconv.ParseUint(fields["Received"], 0, 64)
		by.must(errors.Join(err, err2))
		return float64(executed), float64(received)
	}
	s.reset = func(by *scope) { by.must(deleteBelow(admin, "/")) }
	// A key is the node under which a library keeps the nodes of a name.
	s.erase = func(by *scope, key string) { by.must(deleteBelow(admin, key)) }
	s.missing = func(by *scope, keys []string) (gone int) {
		for _, key := range keys {
			nodes, _, err := admin.Children(key)
			if len(nodes) == 0 {
				gone++
			}
			if !errors.Is(err, zk.ErrNoNode) {
				by.must(err)
			}
		}
		return gone
	}
	return s
}

// askZooKeeper asks the server for its counters, by their names.
func askZooKeeper(ctx context.Context, addr string) (map[string]string, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * time.Second))
	_, err = io.WriteString(c, "srvr")
	fields := map[string]string{}
	for lines := bufio.NewScanner(c); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), ": ")
		fields[key] = value
	}
	return fields, err
}

// deleteBelow deletes all nodes below path but the server's own. Another client may delete some of them meanwhile.
func deleteBelow(admin *zk.Conn, path string) error {
	nodes, _, err := admin.Children(path)
	for _, node := range nodes {
		if node = strings.TrimSuffix(path, "/") + "/" + node; node == "/zookeeper" {
			continue
		}
		if err = deleteBelow(admin, node); err == nil {
			err = admin.Delete(node, -1)
		}
		if err != nil && !errors.Is(err, zk.ErrNoNode) {
			return err
		}
	}
	if errors.Is(err, zk.ErrNoNode) {
		return nil
	}
	return err
}

// dialZooKeeper returns a connection with the library's defaults.
func dialZooKeeper(c *scope, o clientOptions) *zk.Conn {
	dial := net.DialTimeout
	if o.dial != nil {
		dial = func(network, addr string, timeout time.Duration) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			return o.dial(ctx, network, addr)
		}
	}
	conn, _, err := zk.Connect([]string{o.addr}, zooKeeperTTL(o), zk.WithDialer(dial),
		zk.WithLogInfo(false), zk.WithLogger(noLog{}))
	c.must(err)
	c.later(conn.Close)
	return conn
}

// zooKeeperTTL returns the server's timeout for a scenario's TTL.
func zooKeeperTTL(o clientOptions) time.Duration {
	return min(max(o.ttl, 2*zooKeeperTick), 20*zooKeeperTick)
}

type noLog struct{}

func (noLog) Printf(string, ...any) {}

func zooKeeperPeers(*system) []peer {
	return []peer{
		{name: "raw", role: roleFloor, open: openRawZooKeeper},
		{name: ours, role: roleOurs, waits: true, open: openOurZooKeeper,
			renewEvery: func(ttl time.Duration) time.Duration { return (ttl - zooKeeperTick) / 3 },
			key:        func(name string) string { return "/fencelock/lock:" + strings.ReplaceAll(name, "/", "%2F") }},
		{name: "zk.Lock", role: rolePeer, waits: true, open: openLockZooKeeper,
			renewEvery: func(ttl time.Duration) time.Duration { return ttl / 3 }, // the library pings
			key:        func(name string) string { return "/" + name }},
	}
}

func openOurZooKeeper(c *client, o clientOptions) lock {
	d := fencezookeeper.New([]string{o.addr}, &fencezookeeper.Options{Tick: zooKeeperTick, Dial: o.dial})
	return c.ours(d, zooKeeperTTL(o))
}

// openRawZooKeeper is the floor without contention: an ephemeral node is created, and deleted.
func openRawZooKeeper(c *client, o clientOptions) lock {
	conn := dialZooKeeper(&c.scope, o)
	return func(_ context.Context, name string) (hold, error) {
		path, text := "/"+strings.ReplaceAll(name, "/", "-"), []byte("one-of-some-length-like-a-uuid")
		_, err := conn.Create(path, text, zk.FlagEphemeral, zk.WorldACL(zk.PermAll))
		return theirs{free: func(context.Context) error { return conn.Delete(path, -1) }}, err
	}
}

// openLockZooKeeper is the recipe of the client library, one connection for all locks of the client. It ignores
// contexts, and reports no loss.
func openLockZooKeeper(c *client, o clientOptions) lock {
	conn := dialZooKeeper(&c.scope, o)
	return func(_ context.Context, name string) (hold, error) {
		l := zk.NewLock(conn, "/"+name, zk.WorldACL(zk.PermAll))
		err := l.Lock()
		return theirs{free: func(context.Context) error { return l.Unlock() }}, err
	}
}
