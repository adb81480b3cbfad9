package etcd_test

import (
	"context"
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/cluster"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/etcd"
	"github.com/fencelock/fencelock/internal/testtier"
)

// TestClusterFaults breaks three nodes, and the paths to and between them, under contending clients.
func TestClusterFaults(t *testing.T) {
	testtier.Only(t)
	cluster.Run(t, func(t testing.TB) cluster.Harness { return newCluster(t, false) })
}

// TestAuthUnderClusterFaults injects some of the faults under clients that have a password. The check of a password
// takes a server a tenth of a second.
func TestAuthUnderClusterFaults(t *testing.T) {
	testtier.Only(t)
	cluster.RunAll(t, func(t testing.TB, _ cluster.Fault) cluster.Harness {
		return newCluster(t, true)
	}, "leader-kill", "leader-pause", "overtaken-leader", "rolling-restart")
}

// newCluster returns a new cluster, which requires users and passwords if auth is set.
func newCluster(t testing.TB, auth bool) cluster.Harness {
	c := containers.EtcdCluster(t)
	admin, user := newClient(t, c.Endpoints()...), ""
	if auth {
		etcd.EnableAuth(t, admin)
		admin, user = newClientAs(t, "root", "master", c.Endpoints()...), "ann:secret@"
	}
	return cluster.Harness{
		Nodes: containers.Nodes,
		Client: func(t testing.TB) (backend.FencingDriver, fault.Links) {
			addrs, links := c.NewLinks(t)
			addrs[0] = user + addrs[0]
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
}
