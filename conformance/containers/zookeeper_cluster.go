package containers

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/port"
)

// ZooKeeperNodes is an ensemble of three ZooKeepers, in which every path can be broken: from a client to a node
// (NewLinks), and from a node to another, one way too (Cut). Each node is a Server; its Stop is a kill -9. Methods are
// safe for concurrent use.
//
// The nodes run in containers that share the host's network, where each has ports of its own and reaches the others
// through proxies of the test's process: that needs Linux, or a Docker Desktop with host networking switched on. There
// is no fallback to processes.
type ZooKeeperNodes struct {
	cluster
	*peerNet
}

// The ports of a node for its peers.
const (
	toLeader = iota
	forElections
	peerPorts // how many
)

// ZooKeeperCluster starts an ensemble of its own for the test t, and stops it at the end. A node that hears nothing
// from the leader, or a leader from a majority, gives up after two to three seconds. Options are as for ZooKeeper, and
// apply to each node.
func ZooKeeperCluster(t testing.TB, opts ...Option) *ZooKeeperNodes {
	t.Helper()
	var c *ZooKeeperNodes
	opts = append(append([]Option(nil), opts...), AsContainer())
	firstWay(t, zooKeeperSpec(), opts, newContainer, newZooKeeperProcess, func(sp spec, create create) (err error) {
		c, err = tryEnsemble(t, sp, create)
		return err
	})
	return c
}

func tryEnsemble(t testing.TB, sp spec, create create) (*ZooKeeperNodes, error) {
	t.Helper()
	begin := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout+pullTimeout)
	defer cancel()
	peers, err := newPeerNet(peerPorts, func(_ int, p *port.Port) string { return p.Addr() })
	if err != nil {
		return nil, err
	}
	c := &ZooKeeperNodes{peerNet: peers}
	var ports []*port.Port // of the nodes, for clients
	closePorts := func() {
		for _, p := range ports {
			p.Close()
		}
	}
	failed := func(err error) (*ZooKeeperNodes, error) {
		for _, n := range c.nodes {
			if n != nil {
				err = errors.Join(err, n.close(ctx))
			}
		}
		peers.close()
		closePorts()
		return nil, err
	}
	for range Nodes {
		p, err := port.Reserve()
		if err != nil {
			return failed(err)
		}
		ports = append(ports, p)
	}
	for i := range c.nodes {
		if c.nodes[i], err = prepare(ctx, ensembleSpec(sp, peers, i, ports), create); err != nil {
			return failed(err)
		}
	}
	for _, of := range peers.ports {
		for _, p := range of {
			p.Lend()
		}
	}
	if err := c.Start(ctx); err != nil {
		return failed(err)
	}
	t.Cleanup(func() {
		peers.close()
		closePorts()
	})
	for _, n := range c.nodes {
		n.endWith(t) // before the peers' network ends
	}
	t.Logf("three nodes of %s, in %v", c.nodes[0], time.Since(begin).Round(time.Millisecond))
	return c, nil
}

// ensembleSpec returns the spec of node i.
func ensembleSpec(sp spec, peers *peerNet, i int, ports []*port.Port) spec {
	var all []string
	for j := range Nodes {
		host, leader, _ := strings.Cut(peers.ports[j][toLeader].Addr(), ":")
		_, election, _ := strings.Cut(peers.ports[j][forElections].Addr(), ":")
		all = append(all, fmt.Sprintf("server.%d=%s:%s:%s;%s", j+1, host, leader, election, ports[j].Addr()))
	}
	sp.name = fmt.Sprintf("ZooKeeper, node %d", i)
	sp.fixed = ports[i]
	proxy, proxyPort, _ := strings.Cut(peers.dialer(i), ":")
	// All that a node dials are its peers. Java would dial loopback addresses without the proxy.
	java := append(append([]string(nil), zooKeeperJava...),
		"-DsocksProxyHost="+proxy, "-DsocksProxyPort="+proxyPort, "-DsocksNonProxyHosts=")
	sp.environ = append(append([]string(nil), sp.environ...),
		"ZOO_MY_ID="+strconv.Itoa(i+1), "ZOO_SERVERS="+strings.Join(all, " "), "ZOO_INIT_LIMIT=8", "ZOO_SYNC_LIMIT=3",
		"JVMFLAGS="+strings.Join(java, " "))
	return sp
}

// status is what a node says of itself.
type status struct {
	serves, leads bool
	epoch         uint64 // of the leader whose change it has applied last; a leader's own
}

// status returns what node i says of itself: whether it serves clients, which takes a leader, and whether it leads.
func (c *ZooKeeperNodes) status(ctx context.Context, i int) (s status, err error) {
	text, err := zooKeeperSays(ctx, c.nodes[i].spec.fixed.Addr())
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "Mode":
			s.serves, s.leads = true, value == "leader"
		case "Zxid":
			zxid, _ := strconv.ParseUint(strings.TrimPrefix(value, "0x"), 16, 64)
			s.epoch = zxid >> 32
		}
	}
	return s, err
}

// HasLeader reports whether node i follows a leader, or leads.
func (c *ZooKeeperNodes) HasLeader(ctx context.Context, i int) (bool, error) {
	s, err := c.status(ctx, i)
	return s.serves, err
}

// Leader waits until a node leads in an epoch after the given one, which takes a majority, and returns it with its
// epoch.
func (c *ZooKeeperNodes) Leader(ctx context.Context, after uint64) (node int, epoch uint64, err error) {
	for {
		var said [Nodes]status
		var all sync.WaitGroup
		for i := range said {
			all.Go(func() { said[i], _ = c.status(ctx, i) })
		}
		all.Wait()
		serve, latest := 0, status{}
		for i, s := range said {
			if s.serves {
				serve++
			}
			if s.leads && s.epoch > latest.epoch { // a former leader may not know better yet
				node, latest = i, s
			}
		}
		if serve > Nodes/2 && latest.epoch > after {
			return node, latest.epoch, nil
		}
		select {
		case <-time.After(10 * time.Millisecond): // nobody tells when a leader is elected
		case <-ctx.Done():
			return 0, 0, fmt.Errorf("no node leads after epoch %d: %v: %w", after, said, ctx.Err())
		}
	}
}
