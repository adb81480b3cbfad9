package redis_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/redis"
)

// TestConformance runs the suite over every way to make a driver, each on a separate server.
func TestConformance(t *testing.T) {
	t.Parallel()
	for name, dial := range map[string]func(t testing.TB, addr string) backend.Driver{
		"New": func(t testing.TB, addr string) backend.Driver {
			return redis.New(newClient(t, &goredis.Options{Addr: addr}), nil)
		},
		"New-with-fitting-client": func(t testing.TB, addr string) backend.Driver {
			return redis.New(newClient(t, &goredis.Options{
				Addr: addr, MaxRetries: -1, ContextTimeoutEnabled: true, PoolSize: 4,
			}), &redis.Options{KeyPrefix: "fencelock:"})
		},
		"Open": func(t testing.TB, addr string) backend.Driver {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			d, err := redis.Open(ctx, "redis://"+addr+"/0")
			if err != nil {
				t.Fatal(err)
			}
			return d
		},
	} {
		t.Run(name, func(t *testing.T) {
			var groups []string
			if name != "New" {
				testtier.NotShort(t)
				groups = testtier.Some(t, "ownership", "waiting", "errors")
			}
			t.Parallel()
			conformance.Run(t, harness(t, dial).RefusesLong(name == "New"), groups...)
		})
	}
}

// TestConformanceAsPermits runs the suite with two of three permits as a mutex: two such holds do not fit.
func TestConformanceAsPermits(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	conformance.Run(t, conformance.AsPermits(harness(t, func(t testing.TB, addr string) backend.Driver {
		return redis.New(newClient(t, &goredis.Options{Addr: addr}), nil)
	}), 2, 3), testtier.Some(t, "exclusion", "ownership", "waiting", "ambiguity")...)
}

func newClient(t testing.TB, o *goredis.Options) *goredis.Client {
	c := goredis.NewClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// prefix is the default prefix of the drivers.
const prefix = "fencelock:"

func harness(t *testing.T, dial func(testing.TB, string) backend.Driver) conformance.Harness {
	// The server must keep its holds across a restart, as a carefully configured server does.
	server := containers.Redis(t, containers.Args("--appendonly", "yes", "--appendfsync", "always"))
	admin := newClient(t, &goredis.Options{Addr: server.Addr()})
	return conformance.Harness{
		New: func(t testing.TB) backend.Driver { return dial(t, server.Addr()) },
		Linked: func(t testing.TB) (backend.Driver, fault.Link) {
			addr, link := server.NewLink(t)
			return dial(t, addr), link
		},
		Server: conformance.Server{
			Restart: containers.Within(server.Restart),
			Stop:    containers.Within(server.Stop),
			Start:   containers.Within(server.Start),
			Pause:   containers.Within(server.Pause),
			Resume:  containers.Within(server.Resume),
			Evict: func(t testing.TB, name string) {
				containers.Within(func(ctx context.Context) error {
					return admin.Del(ctx, redisscript.KeysOf(prefix, name).Lock).Err()
				})(t)
			},
			EvictWaiter: func(t testing.TB, name string) (deleted int) {
				containers.Within(func(ctx context.Context) error {
					n, err := admin.Del(ctx, redisscript.KeysOf(prefix, name).Queue).Result()
					deleted = int(n)
					return err
				})(t)
				return deleted
			},
			Wipe: containers.Within(func(ctx context.Context) error { return admin.FlushAll(ctx).Err() }),
			RefuseRelease: containers.Refusal(
				func(ctx context.Context) error { return admin.Do(ctx, "acl", "setuser", "default", "-del").Err() },
				func(ctx context.Context) error { return admin.Do(ctx, "acl", "setuser", "default", "+del").Err() },
			),
			RefuseWrites: containers.Refusal(
				func(ctx context.Context) error { return admin.ConfigSet(ctx, "min-replicas-to-write", "1").Err() },
				func(ctx context.Context) error { return admin.ConfigSet(ctx, "min-replicas-to-write", "0").Err() },
			),
		},
		Leftovers: func() ([]string, error) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			keys, err := admin.Keys(ctx, prefix+"*").Result()
			return slices.DeleteFunc(keys, func(key string) bool { return strings.Contains(key, "foreign") }), err
		},
		Intrude: func(t testing.TB, name string) {
			containers.Within(func(ctx context.Context) error {
				lock := redisscript.KeysOf(prefix, name).Lock
				for _, key := range []string{
					name, prefix + "foreign", lock + ":foreign", lock + ":q:foreign", lock + "foreign",
				} {
					if err := admin.Set(ctx, key, "foreign", time.Minute).Err(); err != nil {
						return err
					}
				}
				return admin.HSet(ctx, "foreign:"+name, "a", "b").Err()
			})(t)
		},
	}
}
