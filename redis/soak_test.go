package redis

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	goredis "github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/conformance/nemesis"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testtier"
)

func TestMain(m *testing.M) {
	fault.RunRole(map[string]fault.Role{nemesis.Role: nemesis.Client(openSoak)})
	testtier.Wide(8)
	goleak.VerifyTestMain(m)
}

func openSoak(ctx context.Context, addr string) (backend.Driver, error) {
	d, err := Open(ctx, "redis://"+addr+"/0")
	if err != nil {
		return nil, err // and not a nil *Driver in an interface
	}
	return d, nil
}

// TestSoak breaks a durable server, and the links and processes of its clients, at random.
func TestSoak(t *testing.T) {
	testtier.Only(t)
	nemesis.Run(t, soakService)
}

// TestSoakReported deletes held locks without notice to their clients, and counts the overlaps.
func TestSoakReported(t *testing.T) {
	testtier.Only(t)
	nemesis.RunReported(t, soakService)
}

func soakService(t testing.TB) nemesis.Service {
	server := containers.Redis(t, containers.Args("--appendonly", "yes", "--appendfsync", "always"))
	admin := goredis.NewClient(&goredis.Options{Addr: server.Addr(), ContextTimeoutEnabled: true, MaxRetries: -1})
	t.Cleanup(func() { _ = admin.Close() })
	only := func(act func(context.Context) error) func(context.Context, int) error {
		return func(ctx context.Context, _ int) error { return act(ctx) }
	}
	return nemesis.Service{
		Driver: "redis",
		Client: func(t testing.TB) (string, fault.Links) {
			addr, link := server.NewLink(t)
			return addr, fault.Links{link}
		},
		Open: openSoak,
		Kill: only(server.Stop), Start: only(server.Start), Pause: only(server.Pause), Resume: only(server.Resume),
		Probe: func(ctx context.Context, _ int) (string, error) {
			info, err := admin.InfoMap(ctx, "server").Result()
			return info["Server"]["run_id"], err
		},
		// No RefuseRelease: a release with a waiter sets the key to the offer, so it does not need the right to delete.
		RefuseWrites: containers.Refusal(
			func(ctx context.Context) error { return admin.ConfigSet(ctx, "min-replicas-to-write", "1").Err() },
			func(ctx context.Context) error { return admin.ConfigSet(ctx, "min-replicas-to-write", "0").Err() },
		),
		More: []nemesis.Kind{
			nemesis.NewLapse("delete", "the key of a lock is deleted", func(ctx context.Context, name string) error {
				return admin.Del(ctx, redisscript.KeysOf("fencelock:", name).Lock).Err()
			}),
			nemesis.NewLapse("flush", "all keys are deleted (FLUSHALL)", func(ctx context.Context, _ string) error {
				return admin.FlushAll(ctx).Err()
			}),
			nemesis.NewLapse("evict", "the server runs out of memory and evicts what expires",
				func(ctx context.Context, _ string) error {
					return evict(ctx, admin)
				}),
			nemesis.NewLapse("clock-jump", "the server's clock jumps beyond every TTL",
				func(ctx context.Context, _ string) error {
					return expireAll(ctx, admin)
				}),
			nemesis.NewLapse("restart-empty", "the server ends without warning and comes back without its data, "+
				"as a failover to a replica that had nothing yet",
				func(ctx context.Context, _ string) error {
					return errors.Join(admin.FlushAll(ctx).Err(), server.Restart(ctx))
				}),
		},
		Leftovers: func() ([]string, error) {
			keys, err := admin.Keys(context.Background(), "fencelock:*").Result()
			// Places of killed clients expire.
			return slices.DeleteFunc(keys, func(key string) bool {
				return strings.HasSuffix(key, ":q") || strings.HasSuffix(key, ":s")
			}), err
		},
		Logs: func(ctx context.Context) map[string]string { return map[string]string{"redis": server.Logs(ctx)} },
	}
}

// evict leaves the server without memory for a moment. With this policy, the driver would refuse the server at first.
func evict(ctx context.Context, admin *goredis.Client) error {
	before, err := evicted(ctx, admin)
	if err != nil {
		return err
	}
	set := func(policy, most string) error {
		return errors.Join(
			admin.ConfigSet(ctx, "maxmemory-policy", policy).Err(), admin.ConfigSet(ctx, "maxmemory", most).Err())
	}
	err = set("volatile-ttl", "1")
	if after, countErr := evicted(ctx, admin); err == nil && countErr == nil && after == before {
		err = errors.New("nothing was evicted")
	} else {
		err = errors.Join(err, countErr)
	}
	return errors.Join(err, set("noeviction", "0"))
}

func evicted(ctx context.Context, admin *goredis.Client) (string, error) {
	info, err := admin.InfoMap(ctx, "stats").Result()
	return info["Stats"]["evicted_keys"], err
}

// expireAll expires every key with a time to live, as a jump of the clock does.
func expireAll(ctx context.Context, admin *goredis.Client) error {
	keys, err := admin.Keys(ctx, "fencelock:*").Result()
	for _, key := range keys {
		err = errors.Join(err, admin.Do(ctx, "PEXPIRE", key, 1, "LT").Err())
	}
	return err
}
