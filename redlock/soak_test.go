package redlock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/conformance/nemesis"
	"github.com/fencelock/fencelock/internal/testtier"
)

func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{nemesis.Role: nemesis.Client(openSoak)})
	testtier.Wide(8)
	os.Exit(m.Run())
}

// openSoak opens a driver for addresses separated by commas. A quarter of the TTL is not enough for servers that sync
// five files to one busy disk.
func openSoak(ctx context.Context, addrs string) (backend.Driver, error) {
	d, err := Open(ctx, "redlock://"+addrs+"?node-timeout=1s")
	if err != nil {
		return nil, err // and not a nil *Driver in an interface
	}
	return d, nil
}

// RefuseWrites has every server refuse commands that change keys, because it lacks a replica.
func RefuseWrites(admins []*goredis.Client) func(testing.TB, string) func() {
	want := func(replicas string) func(context.Context) error {
		return func(ctx context.Context) error {
			errs := make([]error, len(admins))
			for i, admin := range admins {
				errs[i] = admin.ConfigSet(ctx, "min-replicas-to-write", replicas).Err()
			}
			return errors.Join(errs...)
		}
	}
	return containers.Refusal(want("1"), want("0"))
}

// TestSoak breaks five durable servers, at most two at a time, and the links and processes of their clients, at
// random.
func TestSoak(t *testing.T) {
	testtier.Only(t)
	nemesis.Run(t, func(t testing.TB) nemesis.Service {
		nodes := start(t, 5, "--appendonly", "yes", "--appendfsync", "always")
		var admins []*goredis.Client
		for _, n := range nodes {
			admin := goredis.NewClient(&goredis.Options{Addr: n.Addr(), ContextTimeoutEnabled: true, MaxRetries: -1})
			t.Cleanup(func() { _ = admin.Close() })
			admins = append(admins, admin)
		}
		on := func(act func(*containers.RedisServer, context.Context) error) func(context.Context, int) error {
			return func(ctx context.Context, node int) error { return act(nodes[node], ctx) }
		}
		return nemesis.Service{
			Driver: "redlock",
			Nodes:  len(nodes),
			Client: func(t testing.TB) (string, fault.Links) {
				var addrs []string
				var links fault.Links
				for _, n := range nodes {
					addr, link := n.NewLink(t)
					addrs, links = append(addrs, addr), append(links, link)
				}
				return nemesis.Addresses(addrs, links)
			},
			Open:   openSoak,
			Kill:   on(func(s *containers.RedisServer, ctx context.Context) error { return s.Stop(ctx) }),
			Start:  on(func(s *containers.RedisServer, ctx context.Context) error { return s.Start(ctx) }),
			Pause:  on(func(s *containers.RedisServer, ctx context.Context) error { return s.Pause(ctx) }),
			Resume: on(func(s *containers.RedisServer, ctx context.Context) error { return s.Resume(ctx) }),
			Probe: func(ctx context.Context, node int) (string, error) {
				info, err := admins[node].InfoMap(ctx, "server").Result()
				return info["Server"]["run_id"], err
			},
			// No RefuseRelease, as with one Redis.
			RefuseWrites: RefuseWrites(admins),
			Leftovers: func() (left []string, err error) {
				for i, admin := range admins {
					keys, keysErr := admin.Keys(context.Background(), "fencelock:*").Result()
					for _, key := range keys {
						if strings.HasSuffix(key, ":q") || strings.HasSuffix(key, ":s") {
							continue // places of killed clients, or late ones, which expire
						}
						left = append(left, fmt.Sprintf("%s on node %d", key, i))
					}
					err = errors.Join(err, keysErr)
				}
				return left, err
			},
			Logs: func(ctx context.Context) map[string]string {
				logs := map[string]string{}
				for i, n := range nodes {
					logs[fmt.Sprintf("node%d", i)] = n.Logs(ctx)
				}
				return logs
			},
		}
	})
}
