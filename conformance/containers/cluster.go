package containers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
)

// Nodes is the number of nodes of a cluster, which survives the loss of one.
const Nodes = 3

// cluster holds the nodes of a service that needs a majority of them. Methods are safe for concurrent use.
type cluster struct{ nodes [Nodes]*Server }

// startNodes starts a node for each spec that specOf returns; clients has the ports of all nodes for clients. The
// nodes end with the test t, followed by peers, if not nil.
func startNodes(t testing.TB, create create, peers *peerNet,
	specOf func(i int, clients []*freeport.Port) spec) (cluster, error) {
	t.Helper()
	begin := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout+pullTimeout)
	defer cancel()
	c := cluster{}
	ports, err := reservePorts(Nodes)
	for i := 0; i < Nodes && err == nil; i++ {
		c.nodes[i], err = prepare(ctx, specOf(i, ports), create)
	}
	if err == nil {
		err = c.Start(ctx)
	}
	end := func() {
		if peers != nil {
			peers.close()
		}
		closePorts(ports)
	}
	if err != nil {
		for _, n := range c.nodes {
			if n != nil {
				err = errors.Join(err, n.close(ctx))
			}
		}
		end()
		return cluster{}, err
	}
	t.Cleanup(end)
	for _, n := range c.nodes {
		n.endWith(t)
	}
	t.Logf("three nodes of %s, in %v", c.nodes[0], time.Since(begin).Round(time.Millisecond))
	return c, nil
}

func reservePorts(n int) (all []*freeport.Port, err error) {
	for range n {
		p, err := freeport.Reserve()
		if err != nil {
			closePorts(all)
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

func closePorts(all []*freeport.Port) {
	for _, p := range all {
		p.Close()
	}
}

// awaitLeader polls all nodes until their status shows a leader of a term after the given one.
func awaitLeader[S any](ctx context.Context, after uint64, status func(ctx context.Context, node int) (S, error),
	leader func(said *[Nodes]S) (node int, term uint64, leads bool),
) (node int, term uint64, err error) {
	for {
		var said [Nodes]S
		var all sync.WaitGroup
		for i := range said {
			all.Go(func() { said[i], _ = status(ctx, i) })
		}
		all.Wait()
		if node, term, leads := leader(&said); leads && term > after {
			return node, term, nil
		}
		select {
		case <-time.After(10 * time.Millisecond): // no notification when a leader is elected
		case <-ctx.Done():
			return 0, 0, fmt.Errorf("nobody leads after term %d: %v: %w", after, said, ctx.Err())
		}
	}
}

// Node returns a node, 0 ≤ i < Nodes. Start returns when the node serves, which takes a majority: if more than one
// node is stopped, use Start of the cluster.
func (c *cluster) Node(i int) *Server { return c.nodes[i] }

// On returns act as a function of a node's number, for packages cluster and nemesis: On((*Server).Pause).
func (c *cluster) On(act func(*Server, context.Context) error) func(ctx context.Context, node int) error {
	return func(ctx context.Context, node int) error { return act(c.nodes[node], ctx) }
}

// Logs returns each node's log, by the node's name: node0, node1, …
func (c *cluster) Logs(ctx context.Context) map[string]string {
	logs := map[string]string{}
	for i, n := range c.nodes {
		logs[fmt.Sprintf("node%d", i)] = n.Logs(ctx)
	}
	return logs
}

// Endpoints returns the addresses of all nodes, host:port. They never change.
func (c *cluster) Endpoints() []string {
	var all []string
	for _, n := range c.nodes {
		all = append(all, n.Addr())
	}
	return all
}

// NewLinks returns a new address of each node, for one client, and the links between the client and each node, which
// can cut the client off from some or all nodes. They end with the test t.
func (c *cluster) NewLinks(t testing.TB) ([]string, fault.Links) {
	t.Helper()
	var addrs []string
	var links fault.Links
	for _, n := range c.nodes {
		addr, link := n.NewLink(t)
		addrs, links = append(addrs, addr), append(links, link)
	}
	return addrs, links
}

// Start starts all nodes that are stopped, and returns when they serve.
func (c *cluster) Start(ctx context.Context) error { return c.each(ctx, (*Server).Start) }

// Stop kills all nodes (SIGKILL).
func (c *cluster) Stop(ctx context.Context) error { return c.each(ctx, (*Server).Stop) }

// Pause freezes all nodes.
func (c *cluster) Pause(ctx context.Context) error { return c.each(ctx, (*Server).Pause) }

// Resume ends Pause.
func (c *cluster) Resume(ctx context.Context) error { return c.each(ctx, (*Server).Resume) }

// Restart is Stop and Start: the whole cluster fails at once.
func (c *cluster) Restart(ctx context.Context) error {
	if err := c.Stop(ctx); err != nil {
		return err
	}
	return c.Start(ctx)
}

// each calls act for all nodes concurrently: a node cannot serve before two have started.
func (c *cluster) each(ctx context.Context, act func(*Server, context.Context) error) error {
	var errs [Nodes]error
	var all sync.WaitGroup
	for i, n := range c.nodes {
		all.Go(func() { errs[i] = act(n, ctx) })
	}
	all.Wait()
	return errors.Join(errs[:]...)
}
