package binding_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
	"go.uber.org/zap"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/cluster"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/etcd/internal/binding"
	"github.com/fencelock/fencelock/internal/testtier"
)

// driver is a binding under the engine.
type driver struct{ *engine.Driver }

func (d driver) IssuesFencingTokens() backend.Driver { return d }

type dialer struct {
	prefix string
	dial   func(t testing.TB, addrs ...string) backend.FencingDriver
}

func (w dialer) dir(name string) string { return w.prefix + "+locks/" + url.PathEscape(name) + "/" }

var plain = dialer{"fencelock/", func(t testing.TB, addrs ...string) backend.FencingDriver {
	return driver{engine.New(binding.New(newClient(t, addrs...), binding.Options{
		Prefix: "fencelock/", Clock: backend.SystemClock(), Logger: slog.Default(),
	}))}
}}

// TestConformance runs the suite.
func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Run(t, harnessOfOne(t, plain), testtier.Some(t, "exclusion", "ambiguity")...)
}

// TestConformanceInANamespace runs it on a client of etcd's namespace package.
func TestConformanceInANamespace(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	conformance.Run(t, harnessOfOne(t, dialer{"app/locks/", func(t testing.TB, addrs ...string) backend.FencingDriver {
		c := newClient(t, addrs...)
		c.KV, c.Watcher = namespace.NewKV(c.KV, "app/"), namespace.NewWatcher(c.Watcher, "app/")
		return driver{engine.New(binding.New(c, binding.Options{
			Prefix: "locks/", Clock: backend.SystemClock(), Logger: slog.Default(),
		}))}
	}}))
}

// TestConformanceAsPermits runs it with permits as mutexes: two of three, of which no two fit at once.
func TestConformanceAsPermits(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	conformance.Run(t, conformance.AsPermits(harnessOfOne(t, plain), 2, 3))
}

// TestConformanceCluster runs it on three nodes.
func TestConformanceCluster(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	cluster := containers.EtcdCluster(t)
	conformance.Run(t, harness(t, plain, cluster, cluster.Endpoints(), func(t testing.TB) ([]string, fault.Link) {
		return cluster.NewLinks(t)
	}))
}

// TestClusterFaults breaks three nodes, and the paths to and between them, under contending clients.
func TestClusterFaults(t *testing.T) {
	testtier.Only(t)
	cluster.Run(t, func(t testing.TB) cluster.Harness {
		c := containers.EtcdCluster(t)
		admin := newClient(t, c.Endpoints()...)
		return cluster.Harness{
			Nodes: containers.Nodes,
			Client: func(t testing.TB) (backend.FencingDriver, fault.Links) {
				addrs, links := c.NewLinks(t)
				return plain.dial(t, addrs...), links
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
			Cut: c.Cut, Heal: c.Heal, Said: c.Said,
			Leftovers: func() ([]string, error) { return leftovers(admin, plain.prefix) },
		}
	})
}

// harnessOfOne has one server.
func harnessOfOne(t *testing.T, way dialer) conformance.Harness {
	server := containers.Etcd(t)
	return harness(t, way, server, []string{server.Addr()}, func(t testing.TB) ([]string, fault.Link) {
		addr, link := server.NewLink(t)
		return []string{addr}, link
	})
}

func newClient(t testing.TB, addrs ...string) *clientv3.Client {
	t.Helper()
	return newClientAs(t, "", "", addrs...)
}

func newClientAs(t testing.TB, user, password string, addrs ...string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{
		Endpoints: addrs, Username: user, Password: password, DialTimeout: 20 * time.Second, Logger: zap.NewNop(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func harness(
	t *testing.T, way dialer, s containers.Lifecycle, addrs []string,
	newLink func(testing.TB) ([]string, fault.Link),
) conformance.Harness {
	admin := newClient(t, addrs...)
	return conformance.Harness{
		New: func(t testing.TB) backend.Driver { return way.dial(t, addrs...) },
		Linked: func(t testing.TB) (backend.Driver, fault.Link) {
			addrs, link := newLink(t)
			return way.dial(t, addrs...), link
		},
		Server: conformance.Server{
			Restart: containers.Within(s.Restart),
			Stop:    containers.Within(s.Stop),
			Start:   containers.Within(s.Start),
			Pause:   containers.Within(s.Pause),
			Resume:  containers.Within(s.Resume),
			Evict: func(t testing.TB, name string) {
				containers.Within(func(ctx context.Context) error {
					_, err := admin.Delete(ctx, way.dir(name), clientv3.WithPrefix())
					return err
				})(t)
			},
			EvictWaiter: func(t testing.TB, name string) (deleted int) {
				containers.Within(func(ctx context.Context) error {
					entries, err := admin.Get(ctx, way.dir(name), clientv3.WithPrefix(),
						clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
					if err != nil {
						return err
					}
					for i, kv := range entries.Kvs {
						if i == 0 {
							continue // the holder
						}
						if _, err := admin.Delete(ctx, string(kv.Key)); err != nil {
							return err
						}
						deleted++
					}
					return nil
				})(t)
				return deleted
			},
			Wipe: containers.Within(func(ctx context.Context) error {
				_, err := admin.Delete(ctx, "\x00", clientv3.WithFromKey())
				return err
			}),
			RefuseWrites: containers.Refusal(
				func(ctx context.Context) error {
					if _, err := admin.UserAdd(ctx, "root", "secret"); err != nil {
						return err
					}
					if _, err := admin.UserGrantRole(ctx, "root", "root"); err != nil {
						return err
					}
					_, err := admin.AuthEnable(ctx)
					return err
				},
				func(ctx context.Context) error {
					root := newClientAs(t, "root", "secret", addrs...)
					if _, err := root.AuthDisable(ctx); err != nil {
						return err
					}
					_, err := admin.UserDelete(ctx, "root")
					return err
				},
			),
			Compact: func(t testing.TB, _ string) {
				containers.Within(func(ctx context.Context) error {
					resp, err := admin.Get(ctx, way.prefix)
					if err != nil {
						return err
					}
					_, err = admin.Compact(ctx, resp.Header.Revision)
					return err
				})(t)
			},
		},
		Leftovers: func() ([]string, error) { return leftovers(admin, way.prefix) },
		Intrude: func(t testing.TB, name string) {
			containers.Within(func(ctx context.Context) error {
				dir := strings.TrimSuffix(way.dir(name), "/")
				for _, key := range []string{
					name, "app/" + name, way.prefix + "foreign", way.prefix + name, dir, dir + "foreign",
					dir + "/", dir + "/foreign", dir + "/foreign/" + backend.NewRequestID(), dir + "0/foreign",
				} {
					if _, err := admin.Put(ctx, key, "foreign"); err != nil {
						return err
					}
				}
				return nil
			})(t)
		},
		TTL: 2 * time.Second, // the least that a server with the default election timeout grants
	}
}

// leftovers lists the keys of drivers, with their leases. The trace of a ForceRelease stays for a minute on a lease of
// its own: it is meant to be read by a victim that was away. Leases without keys are in TestCloseLeavesNoLease: one
// whose grant was not answered, or that could not be revoked over a broken link, ends by itself and closes nothing.
func leftovers(admin *clientv3.Client, prefix string) ([]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var left []string
	resp, err := admin.Get(ctx, prefix, clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	for _, kv := range resp.Kvs {
		if key := string(kv.Key); !meantToStay(key) && !strings.Contains(key, "foreign") &&
			string(kv.Value) != "foreign" {
			left = append(left, fmt.Sprintf("%s since revision %d on lease %x", key, kv.CreateRevision, kv.Lease))
		}
	}
	return left, nil
}

// meantToStay also tells the key of a session, which lives and ends with its lease: see TestCloseLeavesNothing.
func meantToStay(key string) bool {
	return strings.HasSuffix(key, "/forced") || strings.HasSuffix(key, "/+space") || strings.Contains(key, "/+sessions/")
}
