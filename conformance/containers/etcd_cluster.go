package containers

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
)

// EtcdNodes is a cluster of three etcd nodes, whose paths a test can break: from a client to a node (NewLinks), and
// from a node to another, even in one direction (Cut). Each node is a Server; its Stop is a kill -9. Methods are safe
// for concurrent use.
//
// In containers the nodes share the host's network, because their traffic goes through proxies in the test's process
// on the loopback interface: this needs Linux, or Docker Desktop with host networking. Docker networks, namespaces
// and packet filters cannot replace the proxies: they break whole interfaces, not one direction of one path, and some
// need root.
type EtcdNodes struct {
	cluster
	*peerNet
}

// EtcdCluster starts a cluster for the test t, and stops it at the end. It elects a leader within about a second
// after the loss of the former one (election timeout 500 ms, heartbeats every 50 ms; so leases last at least one
// second), and writes to disk as in production. Options are as for Etcd, and apply to each node.
func EtcdCluster(t testing.TB, opts ...Option) *EtcdNodes {
	t.Helper()
	var c *EtcdNodes
	firstWay(t, etcdSpec(), opts, newContainer, newProcess, func(sp spec, create create) (err error) {
		c, err = tryCluster(t, sp, create)
		return err
	})
	return c
}

func tryCluster(t testing.TB, sp spec, create create) (*EtcdNodes, error) {
	t.Helper()
	peers, err := newPeerNet(1, func(i int, _ *freeport.Port) string { return peerHost(i) })
	if err != nil {
		return nil, err
	}
	c, err := startNodes(t, create, peers, func(i int, clients []*freeport.Port) spec {
		return nodeSpec(sp, peers, i, clients[i])
	})
	return &EtcdNodes{c, peers}, err
}

// peerHost returns the name of node i for its peers. The name does not resolve, so no connection bypasses the
// proxies.
func peerHost(i int) string { return fmt.Sprintf("node%d.invalid:2380", i) }

func peerURL(i int) string { return "http://" + peerHost(i) }

// socksEnviron returns the environment that sends the peer traffic of a node, as of most Go programs, through a SOCKS
// proxy. Connections to loopback addresses, from clients and from the node itself, never use the proxy.
func socksEnviron(addr string) []string {
	proxy := "socks5://" + addr
	return []string{"HTTP_PROXY=" + proxy, "http_proxy=" + proxy, "NO_PROXY=none.invalid", "no_proxy=none.invalid"}
}

// PeerLink returns the link of the connections that node from opens to node to. In each direction, raft messages use
// connections that the receiver has dialled, and snapshots and probes use the sender's: see Cut.
func (c *EtcdNodes) PeerLink(from, to int) fault.Link { return c.links[from][to][0] }

// nodeSpec returns the spec of node i.
func nodeSpec(sp spec, peers *peerNet, i int, client *freeport.Port) spec {
	var all []string
	for j := range Nodes {
		all = append(all, fmt.Sprintf("node%d=%s", j, peerURL(j)))
	}
	sp.name = fmt.Sprintf("etcd, node %d", i)
	sp.fixed = client
	sp.process = func(_, dir string) []string { return []string{"--data-dir", dir + "/data"} }
	sp.environ = socksEnviron(peers.dialer(i))
	sp.args = append([]string{
		"--name", fmt.Sprintf("node%d", i),
		"--listen-client-urls", "http://" + client.Addr(),
		"--advertise-client-urls", "http://" + client.Addr(),
		"--listen-peer-urls", "http://" + peers.ports[i][0].Addr(),
		"--initial-advertise-peer-urls", peerURL(i),
		"--initial-cluster", strings.Join(all, ","),
		"--heartbeat-interval", "50", "--election-timeout", "500",
	}, sp.args...)
	return sp
}

// Status returns the status that node i reports, or an error if it does not answer.
func (c *EtcdNodes) Status(ctx context.Context, i int) (EtcdStatus, error) {
	return etcdStatus(ctx, c.nodes[i].spec.fixed.Addr())
}

// Leader waits until a majority of nodes, among them the leader itself, agree on a leader of a term after the given
// one, and returns it with its term.
func (c *EtcdNodes) Leader(ctx context.Context, after uint64) (node int, term uint64, err error) {
	return awaitLeader(ctx, after, c.Status, func(said *[Nodes]EtcdStatus) (int, uint64, bool) {
		for i, leader := range said {
			votes := 0
			for _, s := range said {
				if leader.Member != 0 && s.Leader == leader.Member && s.Term == leader.Term {
					votes++
				}
			}
			if votes > Nodes/2 && leader.Leader == leader.Member {
				return i, leader.Term, true
			}
		}
		return 0, 0, false
	})
}
