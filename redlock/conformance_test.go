package redlock_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/redlock"
)

const (
	servers = 5
	prefix  = "fencelock:" // the default prefix of the drivers

	// nodeTimeout is the default for TTLs of four seconds and more. The suite's TTLs are shorter, and a quarter of them
	// is not enough for servers that sync five files to one busy disk.
	nodeTimeout = time.Second
)

// TestConformance runs the suite over both ways to make a driver, each on five separate servers.
func TestConformance(t *testing.T) {
	t.Parallel()
	for name, dial := range map[string]func(t testing.TB, addrs []string) backend.Driver{
		"New": func(t testing.TB, addrs []string) backend.Driver {
			return redlock.New(clientsOf(t, addrs), &redlock.Options{NodeTimeout: nodeTimeout})
		},
		"Open": func(t testing.TB, addrs []string) backend.Driver {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			d, err := redlock.Open(ctx, "redlock://"+strings.Join(addrs, ",")+"/0?node-timeout="+nodeTimeout.String())
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
				groups = testtier.Some(t, "ownership", "errors")
			}
			t.Parallel()
			conformance.Run(t, harness(t, dial).RefusesLong(name == "New"), groups...)
		})
	}
}

func clientsOf(t testing.TB, addrs []string) []goredis.UniversalClient {
	var clients []goredis.UniversalClient
	for _, addr := range addrs {
		c := goredis.NewClient(&goredis.Options{Addr: addr})
		t.Cleanup(func() { _ = c.Close() })
		clients = append(clients, c)
	}
	return clients
}

// refusal returns a hook of conformance.Server.
func refusal(begin, end func(testing.TB)) func(testing.TB, string) func() {
	return func(t testing.TB, _ string) func() {
		begin(t)
		return func() { end(t) }
	}
}

func harness(t *testing.T, dial func(testing.TB, []string) backend.Driver) conformance.Harness {
	// The servers must keep their holds across a restart, as carefully configured servers do; such servers keep their
	// votes, too.
	var nodes [servers]*containers.RedisServer
	var admins [servers]*goredis.Client
	var addrs []string
	for i := range nodes {
		nodes[i] = containers.Redis(t, containers.Args("--appendonly", "yes", "--appendfsync", "always"))
		admins[i] = goredis.NewClient(&goredis.Options{Addr: nodes[i].Addr()})
		t.Cleanup(func() { _ = admins[i].Close() })
		addrs = append(addrs, nodes[i].Addr())
	}
	all := func(act func(ctx context.Context, i int) error) func(testing.TB) {
		return containers.Within(func(ctx context.Context) error {
			var errs [servers]error
			var wg sync.WaitGroup
			for i := range nodes {
				wg.Go(func() { errs[i] = act(ctx, i) })
			}
			wg.Wait()
			return errors.Join(errs[:]...)
		})
	}
	return conformance.Harness{
		New: func(t testing.TB) backend.Driver { return dial(t, addrs) },
		Linked: func(t testing.TB) (backend.Driver, fault.Link) {
			var links fault.Links
			var addrs []string
			for _, n := range nodes {
				addr, link := n.NewLink(t)
				addrs, links = append(addrs, addr), append(links, link)
			}
			return dial(t, addrs), links
		},
		Server: conformance.Server{
			Restart: all(func(ctx context.Context, i int) error { return nodes[i].Restart(ctx) }),
			Stop:    all(func(ctx context.Context, i int) error { return nodes[i].Stop(ctx) }),
			Start:   all(func(ctx context.Context, i int) error { return nodes[i].Start(ctx) }),
			Pause:   all(func(ctx context.Context, i int) error { return nodes[i].Pause(ctx) }),
			Resume:  all(func(ctx context.Context, i int) error { return nodes[i].Resume(ctx) }),
			RefuseRelease: refusal(
				all(func(ctx context.Context, i int) error {
					return admins[i].Do(ctx, "acl", "setuser", "default", "-del").Err()
				}),
				all(func(ctx context.Context, i int) error {
					return admins[i].Do(ctx, "acl", "setuser", "default", "+del").Err()
				}),
			),
			RefuseWrites: redlock.RefuseWrites(admins[:]),
			Evict: func(t testing.TB, name string) {
				all(func(ctx context.Context, i int) error {
					return admins[i].Del(ctx, redisscript.KeysOf(prefix, name).Lock).Err()
				})(t)
			},
			EvictWaiter: func(t testing.TB, name string) int {
				var deleted atomic.Int64
				all(func(ctx context.Context, i int) error {
					n, err := admins[i].Del(ctx, redisscript.KeysOf(prefix, name).Queue).Result()
					deleted.Add(n)
					return err
				})(t)
				return int(deleted.Load())
			},
			Wipe: all(func(ctx context.Context, i int) error { return admins[i].FlushAll(ctx).Err() }),
		},
		Leftovers: func() ([]string, error) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			var left []string
			for _, admin := range admins {
				keys, err := admin.Keys(ctx, prefix+"*").Result()
				if err != nil {
					return nil, err
				}
				left = append(left, keys...)
			}
			return slices.DeleteFunc(left, func(key string) bool { return strings.Contains(key, "foreign") }), nil
		},
		Intrude: func(t testing.TB, name string) {
			all(func(ctx context.Context, i int) error {
				lock := redisscript.KeysOf(prefix, name).Lock
				for _, key := range []string{
					name, prefix + "foreign", lock + ":foreign", lock + ":q:foreign", lock + "foreign",
				} {
					if err := admins[i].Set(ctx, key, "foreign", time.Minute).Err(); err != nil {
						return err
					}
				}
				return admins[i].HSet(ctx, "foreign:"+name, "a", "b").Err()
			})(t)
		},
	}
}
