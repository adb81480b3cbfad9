package zookeeper_test

import (
	"errors"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/cluster"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testtier"
)

// TestConformanceCluster runs the suite on three nodes, which fail all at once where the suite stops the service.
func TestConformanceCluster(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	ensemble := containers.ZooKeeperCluster(t)
	conformance.Run(t,
		harness(t, dialers["New"], ensemble, ensemble.Endpoints(), func(t testing.TB) ([]string, fault.Link) {
			return ensemble.NewLinks(t)
		}))
}

// TestClusterFaults breaks three nodes, and the paths to and between them, under contending clients.
func TestClusterFaults(t *testing.T) {
	testtier.Only(t)
	cluster.Run(t, func(t testing.TB) cluster.Harness {
		c := containers.ZooKeeperCluster(t)
		admin := newAdmin(t, c.Endpoints()...)
		return cluster.Harness{
			Nodes: containers.Nodes,
			Client: func(t testing.TB) (backend.FencingDriver, fault.Links) {
				addrs, links := c.NewLinks(t)
				return newDriver(addrs...), links
			},
			Kill:      c.On((*containers.Server).Stop),
			Start:     c.On((*containers.Server).Start),
			Pause:     c.On((*containers.Server).Pause),
			Resume:    c.On((*containers.Server).Resume),
			Leader:    c.Leader,
			HasLeader: c.HasLeader,
			Cut:       c.Cut,
			Heal:      c.Heal,
			Said:      c.Said,
			Leftovers: func() ([]string, error) { return admin.ephemerals("/fencelock") },
		}
	})
}

// TestLeaderDies kills the leader under a holder and a waiter: twice, so that both have been through an election; with
// make deep once for each node.
func TestLeaderDies(t *testing.T) {
	t.Parallel()
	ensemble := containers.ZooKeeperCluster(t)
	holder, next := driver(t, ensemble.Endpoints()...), driver(t, ensemble.Endpoints()...)
	var last fencing.Token
	rounds := 2
	if testtier.Wanted() {
		rounds = containers.Nodes
	}
	for round := range rounds {
		r := request("leader", false)
		r.TTL = 8 * time.Second // an election takes a part of it
		g := take(t, holder, r)
		if got := holder.Describe().Exclusion; got != backend.ExclusionQuorum {
			t.Errorf("an ensemble of three has the exclusion %v", got)
		}
		if g.Token <= last {
			t.Fatalf("round %d: token %v after %v", round, g.Token, last)
		}
		type result struct {
			g   backend.Grant
			err error
		}
		granted := make(chan result, 1)
		waiting := r
		waiting.RequestID, waiting.Wait = backend.NewRequestID(), true
		go func() {
			g, err := next.Acquire(soon(t, 40*time.Second), waiting)
			granted <- result{g, err}
		}()
		if err := queued(soon(t, 20*time.Second), holder, "leader"); err != nil {
			t.Fatalf("Holder = %v", err)
		}
		leader, _, err := ensemble.Leader(soon(t, 20*time.Second), 0)
		if err != nil {
			t.Fatal(err)
		}
		election := stallmeter.Begin()
		containers.Within(ensemble.Node(leader).Stop)(t)
		for ctx := soon(t, 30*time.Second); ; {
			renewal := holder.Renew(ctx, []backend.Grant{g})[0]
			if renewal.Err == nil {
				election.End()
				break
			}
			if errors.Is(renewal.Err, backend.ErrNotHeld) || ctx.Err() != nil {
				election.Errorf(t, r.TTL/8, "round %d: Renew after the leader died = %v, want the hold to live", round, renewal.Err)
				return
			}
		}
		select {
		case got := <-granted:
			t.Fatalf("round %d: the waiter got %+v beside the holder", round, got)
		default:
		}
		if err := holder.Release(soon(t, 20*time.Second), g); err != nil {
			t.Fatalf("round %d: Release = %v", round, err)
		}
		got := <-granted
		if got.err != nil || got.g.Token <= g.Token {
			t.Fatalf("round %d: the waiter = token %v, %v; want more than %v", round, got.g.Token, got.err, g.Token)
		}
		if err := next.Release(soon(t, 20*time.Second), got.g); err != nil {
			t.Fatalf("round %d: Release by the waiter = %v", round, err)
		}
		last = got.g.Token
		containers.Within(ensemble.Node(leader).Start)(t)
	}
}
