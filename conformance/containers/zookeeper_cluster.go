package containers

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
)

// ZooKeeperNodes is an ensemble of three ZooKeepers, whose paths a test can break: from a client to a node
// (NewLinks), and from a node to another, even in one direction (Cut). Each node is a Server; its Stop is a kill -9.
// Methods are safe for concurrent use.
//
// The nodes run in containers that share the host's network, where each has its own ports and reaches the others
// through proxies in the test's process: this needs Linux, or Docker Desktop with host networking. There is no
// fallback to processes, but a test that needs the nodes' files can ask for processes (AsProcess).
type ZooKeeperNodes struct {
	cluster
	*peerNet
}

// The ports of a node for its peers.
const (
	toLeader = iota
	forElections
	peerPorts // number of ports
)

// ZooKeeperCluster starts an ensemble for the test t, and stops it at the end. A follower without messages from the
// leader, or a leader without messages from a majority, steps down after two to three seconds. Options are as for
// ZooKeeper, and apply to each node.
func ZooKeeperCluster(t testing.TB, opts ...Option) *ZooKeeperNodes {
	t.Helper()
	var c *ZooKeeperNodes
	opts = append([]Option{AsContainer()}, opts...)
	firstWay(t, zooKeeperSpec(), opts, newContainer, newZooKeeperProcess, func(sp spec, create create) (err error) {
		c, err = tryEnsemble(t, sp, create)
		return err
	})
	return c
}

func tryEnsemble(t testing.TB, sp spec, create create) (*ZooKeeperNodes, error) {
	t.Helper()
	peers, err := newPeerNet(peerPorts, func(_ int, p *freeport.Port) string { return p.Addr() })
	if err != nil {
		return nil, err
	}
	c, err := startNodes(t, create, peers, func(i int, clients []*freeport.Port) spec {
		for _, p := range peers.ports[i] {
			p.Lend()
		}
		return ensembleSpec(sp, peers, i, clients)
	})
	return &ZooKeeperNodes{c, peers}, err
}

// ensembleSpec returns the spec of node i.
func ensembleSpec(sp spec, peers *peerNet, i int, ports []*freeport.Port) spec {
	var all []string
	for j := range Nodes {
		host, leader, _ := strings.Cut(peers.ports[j][toLeader].Addr(), ":")
		_, election, _ := strings.Cut(peers.ports[j][forElections].Addr(), ":")
		role := "participant"
		if sp.observer && j == Nodes-1 {
			role = "observer"
		}
		all = append(all, fmt.Sprintf("server.%d=%s:%s:%s:%s;%s", j+1, host, leader, election, role, ports[j].Addr()))
	}
	sp.name = fmt.Sprintf("ZooKeeper, node %d", i)
	sp.fixed = ports[i]
	proxy, proxyPort, _ := strings.Cut(peers.dialer(i), ":")
	// A node dials only its peers. By default Java dials loopback addresses without the proxy.
	java := append(append([]string(nil), zooKeeperJava...),
		"-DsocksProxyHost="+proxy, "-DsocksProxyPort="+proxyPort, "-DsocksNonProxyHosts=")
	sp.environ = append(append([]string(nil), sp.environ...),
		"ZOO_MY_ID="+strconv.Itoa(i+1), "ZOO_SERVERS="+strings.Join(all, " "), "ZOO_INIT_LIMIT=8", "ZOO_SYNC_LIMIT=3",
		"JVMFLAGS="+strings.Join(java, " "))
	if i < Nodes-1 {
		sp.last = nil
	} else if len(sp.last) > 0 {
		sp.environ = append(sp.environ, "ZOO_CFG_EXTRA="+strings.Join(slices.Concat(sp.settings, sp.last), " "))
	}
	// The same for a process.
	sp.java = java[len(zooKeeperJava):]
	sp.ensemble = append(all, "initLimit=8", "syncLimit=3")
	sp.files = map[string][]byte{"myid": fmt.Appendln(nil, i+1)}
	return sp
}

// status is the status that a node reports.
type status struct {
	serves, leads bool
	epoch         uint64 // of the last applied change's leader; a leader's own
}

// status returns the status of node i: whether it serves clients, which takes a leader, and whether it leads.
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

// HasLeader reports whether node i leads or follows a leader.
func (c *ZooKeeperNodes) HasLeader(ctx context.Context, i int) (bool, error) {
	s, err := c.status(ctx, i)
	return s.serves, err
}

// Leader waits until a node leads in an epoch after the given one, which takes a majority, and returns it with its
// epoch.
func (c *ZooKeeperNodes) Leader(ctx context.Context, after uint64) (node int, epoch uint64, err error) {
	return awaitLeader(ctx, after, c.status, func(said *[Nodes]status) (int, uint64, bool) {
		serve, node, latest := 0, 0, status{}
		for i, s := range said {
			if s.serves {
				serve++
			}
			if s.leads && s.epoch > latest.epoch { // a former leader may not have noticed yet
				node, latest = i, s
			}
		}
		return node, latest.epoch, serve > Nodes/2
	})
}
