package postgres_test

import (
	"context"
	"os"
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/conformance/nemesis"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/postgres"
)

func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{nemesis.Role: nemesis.Client(openSoak)})
	testtier.Wide(4) // each connection is a process of the server
	os.Exit(m.Run())
}

func openSoak(ctx context.Context, addr string) (backend.Driver, error) {
	d, err := postgres.Open(ctx, urlOf(addr)+"&pool_max_conns=3")
	if err != nil {
		return nil, err // and not a nil *Driver in an interface
	}
	return d, nil
}

// TestSoak breaks a server, and the links and processes of its clients, at random.
func TestSoak(t *testing.T) {
	testtier.Only(t)
	nemesis.Run(t, func(t testing.TB) nemesis.Service {
		server := migrated(t)
		pool := newPool(t, server.URL())
		hooks := harness(server, nil).Server
		only := func(act func(context.Context) error) func(context.Context, int) error {
			return func(ctx context.Context, _ int) error { return act(ctx) }
		}
		return nemesis.Service{
			Driver: "postgres",
			Client: func(t testing.TB) (string, fault.Links) {
				addr, link := server.NewLink(t)
				return addr, fault.Links{link}
			},
			Open: openSoak,
			Kill: only(server.Stop), Start: only(server.Start), Pause: only(server.Pause), Resume: only(server.Resume),
			Probe: func(ctx context.Context, _ int) (process string, err error) {
				err = pool.QueryRow(ctx, `select pg_postmaster_start_time()::text`).Scan(&process)
				return process, err
			},
			RefuseRelease: hooks.RefuseRelease,
			RefuseWrites:  hooks.RefuseWrites,
			Leftovers:     func() ([]string, error) { return leftovers(server) },
			Logs: func(ctx context.Context) map[string]string {
				return map[string]string{"postgres": server.Logs(ctx)}
			},
		}
	})
}
