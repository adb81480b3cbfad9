package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"
)

// zooKeeperTick is the server's tickTime: sessions last between 1 s and 10 s, so that longer TTLs of scenarios are cut.
const zooKeeperTick = 500 * time.Millisecond

// zooKeeperSystem is one ZooKeeper server, started here. Its trips are the packets that it received, pings included;
// its commands are transactions.
type zooKeeperSystem struct {
	address string
	admin   *zk.Conn
	server  *process
	info    string
}

// startZooKeeper starts the server of Debian's package with its own settings, fsync and all, but the tick.
func startZooKeeper(ctx context.Context, _ string) (system, error) {
	const classes = "/usr/share/java/zookeeper.jar"
	if _, err := os.Stat(classes); err != nil {
		return nil, fmt.Errorf("install ZooKeeper (Debian: libzookeeper-java, default-jre-headless): %w", err)
	}
	addrs, err := freeAddrs(1)
	if err != nil {
		return nil, err
	}
	s := &zooKeeperSystem{address: addrs[0]}
	_, port, err := net.SplitHostPort(s.address)
	if err != nil {
		return nil, err
	}
	s.server, err = startProcess("java", func(dir string) []string {
		return []string{"-Xmx512m",
			"-Dzookeeper.admin.enableServer=false", "-Dzookeeper.4lw.commands.whitelist=srvr",
			"-cp", filepath.Dir(classes) + "/*", "org.apache.zookeeper.server.ZooKeeperServerMain",
			port, dir, strconv.FormatInt(zooKeeperTick.Milliseconds(), 10), "0"}
	})
	if err != nil {
		return nil, err
	}
	err = s.server.answers(ctx, func(ctx context.Context) error {
		text, err := s.srvr(ctx)
		if err == nil && !strings.Contains(text, "Mode: ") {
			err = errors.New("it does not serve yet")
		}
		version, _, _ := strings.Cut(strings.TrimPrefix(text, "Zookeeper version: "), "-")
		s.info = "ZooKeeper " + version
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ZooKeeper at %s: %w", s.address, err), s.close())
	}
	if s.admin, err = dialZooKeeper(clientOptions{addr: s.address, ttl: 10 * time.Second}); err == nil {
		err = s.warm()
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// warm lets Java compile what will be measured.
func (s *zooKeeperSystem) warm() error {
	var all sync.WaitGroup
	errs := make([]error, 16)
	for i := range errs {
		all.Go(func() {
			path := fmt.Sprint("/warm", i)
			for range 1000 {
				if _, errs[i] = s.admin.Create(path, nil, zk.FlagEphemeral, zk.WorldACL(zk.PermAll)); errs[i] != nil {
					return
				}
				if _, _, errs[i] = s.admin.Children("/"); errs[i] != nil {
					return
				}
				if errs[i] = s.admin.Delete(path, -1); errs[i] != nil {
					return
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// dialZooKeeper returns a connection with the library's defaults.
func dialZooKeeper(o clientOptions) (*zk.Conn, error) {
	dial := net.DialTimeout
	if o.dial != nil {
		dial = func(network, addr string, timeout time.Duration) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			return o.dial(ctx, network, addr)
		}
	}
	c, events, err := zk.Connect([]string{o.addr}, zooKeeperTTL(o), zk.WithDialer(dial),
		zk.WithLogInfo(false), zk.WithLogger(noLog{}))
	if err != nil {
		return nil, err
	}
	go func() {
		for range events { // until the connection is closed
		}
	}()
	return c, nil
}

// zooKeeperTTL is what the server grants of what a scenario asks for.
func zooKeeperTTL(o clientOptions) time.Duration {
	return min(max(o.ttl, 2*zooKeeperTick), 20*zooKeeperTick)
}

type noLog struct{}

func (noLog) Printf(string, ...any) {}

func (s *zooKeeperSystem) name() string    { return "zookeeper" }
func (s *zooKeeperSystem) version() string { return s.info }
func (s *zooKeeperSystem) addr() string    { return s.address }

// srvr asks the server for its counters.
func (s *zooKeeperSystem) srvr(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.address)
	if err != nil {
		return "", err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, "srvr"); err != nil {
		return "", err
	}
	text, err := io.ReadAll(c)
	return string(text), err
}

func (s *zooKeeperSystem) counters(ctx context.Context) (counters, error) {
	text, err := s.srvr(ctx)
	if err != nil {
		return counters{}, err
	}
	var c counters
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		var n uint64
		switch key {
		case "Received":
			n, err = strconv.ParseUint(value, 10, 64)
			c.trips = float64(n)
		case "Zxid":
			n, err = strconv.ParseUint(value, 0, 64)
			c.commands = float64(n)
		}
		if err != nil {
			return counters{}, fmt.Errorf("counter %s: %w", key, err)
		}
	}
	c.cpu, err = s.server.cpu()
	return c, err
}

func (s *zooKeeperSystem) reset(context.Context) error { return s.deleteBelow("/") }

// deleteBelow deletes all nodes below path but the server's own. What others delete meanwhile is as good.
func (s *zooKeeperSystem) deleteBelow(path string) error {
	nodes, _, err := s.admin.Children(path)
	if errors.Is(err, zk.ErrNoNode) {
		return nil
	}
	for _, node := range nodes {
		if node = strings.TrimSuffix(path, "/") + "/" + node; node == "/zookeeper" || err != nil {
			continue
		}
		if err = s.deleteBelow(node); err == nil {
			err = s.admin.Delete(node, -1)
		}
		if errors.Is(err, zk.ErrNoNode) {
			err = nil
		}
	}
	return err
}

// erase implements system. A key is the node that a library keeps a name's nodes under.
func (s *zooKeeperSystem) erase(_ context.Context, key string) error {
	nodes, _, err := s.admin.Children(key)
	if err == nil && len(nodes) == 0 {
		err = fmt.Errorf("there is no node below %q", key)
	}
	if err != nil {
		return err
	}
	return s.deleteBelow(key)
}

func (s *zooKeeperSystem) missing(_ context.Context, keys []string) (int, error) {
	gone := 0
	for _, key := range keys {
		nodes, _, err := s.admin.Children(key)
		if err != nil && !errors.Is(err, zk.ErrNoNode) {
			return 0, err
		}
		if len(nodes) == 0 {
			gone++
		}
	}
	return gone, nil
}

func (s *zooKeeperSystem) pause() bool { return s.server.pause() }
func (s *zooKeeperSystem) resume()     { s.server.resume() }

func (s *zooKeeperSystem) close() error {
	if s.admin != nil {
		s.admin.Close()
	}
	return s.server.close()
}
