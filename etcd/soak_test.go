package etcd_test

import (
	"context"
	"os"
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/conformance/nemesis"
	"github.com/fencelock/fencelock/etcd"
	"github.com/fencelock/fencelock/internal/testtier"
)

func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{nemesis.Role: nemesis.Client(openSoak)})
	testtier.Wide(8)
	os.Exit(m.Run())
}

// openSoak opens a driver for addresses separated by commas.
func openSoak(ctx context.Context, addrs string) (backend.Driver, error) {
	d, err := etcd.Open(ctx, "etcd://"+addrs)
	if err != nil {
		return nil, err // and not a nil *Driver in an interface
	}
	return d, nil
}

// TestSoak breaks three nodes, the paths to and between them, and the processes of their clients, at random.
func TestSoak(t *testing.T) {
	testtier.Only(t)
	nemesis.Run(t, func(t testing.TB) nemesis.Service {
		c := containers.EtcdCluster(t)
		admin := newClient(t, c.Endpoints()...)
		return nemesis.Service{
			Driver: "etcd",
			Nodes:  containers.Nodes,
			Client: func(t testing.TB) (string, fault.Links) { return nemesis.Addresses(c.NewLinks(t)) },
			Open:   openSoak,
			Kill:   c.On((*containers.Server).Stop),
			Start:  c.On((*containers.Server).Start),
			Pause:  c.On((*containers.Server).Pause),
			Resume: c.On((*containers.Server).Resume),
			Probe: func(ctx context.Context, node int) (string, error) {
				_, err := c.Status(ctx, node)
				return "", err
			},
			// No RefuseRelease: a user without the right to delete keys may not put them either.
			RefuseWrites: harness(t, dialers["Open"], c, c.Endpoints(), nil).Server.RefuseWrites,
			Leader:       c.Leader,
			Cut:          c.Cut,
			Heal:         c.Heal,
			Said:         c.Said,
			Leftovers:    func() ([]string, error) { return leftovers(admin, dialers["Open"].prefix) },
			Logs:         c.Logs,
		}
	})
}
