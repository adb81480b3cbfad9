package etcd_test

import (
	"context"
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/cluster"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/deep"
)

// TestClusterFaults breaks three nodes, and the paths to and between them, under contending clients.
func TestClusterFaults(t *testing.T) {
	deep.Only(t)
	cluster.Run(t, func(t testing.TB) cluster.Harness {
		c := containers.EtcdCluster(t)
		admin := newClient(t, c.Endpoints()...)
		return cluster.Harness{
			Nodes: containers.Nodes,
			Client: func(t testing.TB) (backend.FencingDriver, fault.Links) {
				addrs, links := c.NewLinks(t)
				return openDriver(t, addrs...), links
			},
			Kill:   c.On((*containers.Server).Stop),
			Start:  c.On((*containers.Server).Start),
			Pause:  c.On((*containers.Server).Pause),
			Resume: c.On((*containers.Server).Resume),
			Leader: c.Leader,
			HasLeader: func(ctx context.Context, node int) (bool, error) {
				s, err := c.Status(ctx, node)
				return s.Leader != 0, err
			},
			Cut:       c.Cut,
			Heal:      c.Heal,
			Said:      c.Said,
			Leftovers: func() ([]string, error) { return leftovers(admin, dialers["Open"].prefix) },
		}
	})
}
