package zookeeper_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/conformance/nemesis"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/zookeeper"
)

// soakRoles are what TestMain makes of the processes that TestSoak starts.
var soakRoles = map[string]fault.Role{nemesis.Role: nemesis.Client(openSoak)}

// openSoak opens a driver for addresses with commas between them.
func openSoak(ctx context.Context, addrs string) (backend.Driver, error) {
	d, err := zookeeper.Open(ctx, fmt.Sprintf("zk://%s?tick=%v", addrs, containers.ZooKeeperTick))
	if err != nil {
		return nil, err // and not a nil *Driver in an interface
	}
	return d, nil
}

// TestSoak breaks three nodes, the paths to and between them, and the processes of their clients, at random.
func TestSoak(t *testing.T) {
	testtier.Only(t)
	nemesis.Run(t, func(t testing.TB) nemesis.Service {
		c := containers.ZooKeeperCluster(t)
		admin := newAdmin(t, c.Endpoints()...)
		return nemesis.Service{
			Driver: "zookeeper",
			Nodes:  containers.Nodes,
			Client: func(t testing.TB) (string, fault.Links) { return nemesis.Addresses(c.NewLinks(t)) },
			Open:   openSoak,
			Kill:   c.On((*containers.Server).Stop),
			Start:  c.On((*containers.Server).Start),
			Pause:  c.On((*containers.Server).Pause),
			Resume: c.On((*containers.Server).Resume),
			Probe: func(ctx context.Context, node int) (string, error) {
				_, err := c.HasLeader(ctx, node)
				return "", err
			},
			// No RefuseWrites: an ACL refuses no renewal, and the clients are other processes.
			RefuseRelease: harness(t, dialers["New"], c, c.Endpoints(), nil).Server.RefuseRelease,
			Leader:        c.Leader,
			Cut:           c.Cut,
			Heal:          c.Heal,
			Said:          c.Said,
			Leftovers:     func() ([]string, error) { return admin.ephemerals("/fencelock") },
			Logs:          c.Logs,
		}
	})
}
