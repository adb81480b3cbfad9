package containers

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
)

// FencelockNodes is a cluster of three bundled lock servers, in which a test can break every path from a client to a
// node (NewLinks). Each node is a Server; its Stop is a kill -9. Methods are safe for concurrent use.
//
// The nodes advertise names that do not resolve, so that no client connection bypasses the links. A test cannot break
// the paths between the nodes: they dial each other directly. The tests of package builtin break such paths, with
// servers whose peer connections the tests dial.
//
// In containers the nodes share the host's network, as those of EtcdCluster.
type FencelockNodes struct{ cluster }

// FencelockCluster starts a cluster for the test t, and stops it at the end. It elects a leader within about
// a second after the loss of the former one. Options are as for Fencelock, and apply to each node.
func FencelockCluster(t testing.TB, opts ...Option) *FencelockNodes {
	t.Helper()
	var c *FencelockNodes
	firstWay(t, fencelockSpec(), opts, newContainer, newFencelockProcess(t), func(sp spec, create create) (err error) {
		c, err = tryFencelockCluster(t, sp, create)
		return err
	})
	return c
}

func tryFencelockCluster(t testing.TB, sp spec, create create) (*FencelockNodes, error) {
	t.Helper()
	peers, err := reservePorts(Nodes)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { closePorts(peers) }) // after the nodes
	c, err := startNodes(t, create, nil, func(i int, clients []*freeport.Port) spec {
		return fencelockNodeSpec(sp, i, clients[i], peers)
	})
	return &FencelockNodes{c}, err
}

// fencelockNodeSpec returns the spec of node i, which listens for clients at client and for the others at peers[i].
func fencelockNodeSpec(sp spec, i int, client *freeport.Port, peers []*freeport.Port) spec {
	var all []string
	for _, p := range peers {
		all = append(all, p.Addr())
		p.Lend()
	}
	sp.name = fmt.Sprintf("fencelock, node %d", i)
	sp.fixed = client
	sp.process = func(_, dir string) []string { return []string{"serve", "--data-dir", dir + "/data"} }
	sp.args = append([]string{
		"--listen", client.Addr(), "--advertise", fmt.Sprintf("node%d.invalid:7480", i),
		"--peer-listen", peers[i].Addr(), "--join", strings.Join(all, ","), "--bootstrap-expect", fmt.Sprint(Nodes),
	}, sp.args...)
	return sp
}

// Status returns the status of node i, without the links.
func (c *FencelockNodes) Status(ctx context.Context, i int) (FencelockStatus, error) {
	return fencelockStatus(ctx, c.nodes[i].spec.fixed.Addr())
}

// Leader waits until a majority of nodes, among them the leader itself, agree on a leader that serves, of a term after
// the given one, and returns it with its term.
func (c *FencelockNodes) Leader(ctx context.Context, after uint64) (node int, term uint64, err error) {
	return awaitLeader(ctx, after, c.Status, func(said *[Nodes]FencelockStatus) (int, uint64, bool) {
		for i, leader := range said {
			votes := 0
			for _, s := range said {
				if s.Leader == leader.Node && s.Term == leader.Term {
					votes++
				}
			}
			if votes > Nodes/2 && leader.Serves {
				return i, leader.Term, true
			}
		}
		return 0, 0, false
	})
}
