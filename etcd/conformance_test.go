package etcd_test

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
	"go.uber.org/zap"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/etcd"
	"github.com/fencelock/fencelock/internal/testtier"
)

// dialer makes a driver in one of the ways that the package offers.
type dialer struct {
	prefix string   // the prefix of every key, as the server sees it
	groups []string // the groups of clauses for which it may differ from New
	dial   func(t testing.TB, addrs ...string) backend.FencingDriver
}

// dir returns the prefix of the keys of a name.
func (w dialer) dir(name string) string { return w.prefix + "+locks/" + url.PathEscape(name) + "/" }

// dialers are all ways to make a driver.
var dialers = map[string]dialer{
	"New": {"fencelock/", nil, func(t testing.TB, addrs ...string) backend.FencingDriver {
		return etcd.New(newClient(t, addrs...), nil)
	}},
	"New-in-a-namespace": {"app/locks/", []string{"ownership", "names", "capabilities", "leftovers"},
		func(t testing.TB, addrs ...string) backend.FencingDriver {
			c := newClient(t, addrs...)
			c.KV, c.Watcher = namespace.NewKV(c.KV, "app/"), namespace.NewWatcher(c.Watcher, "app/")
			return etcd.New(c, &etcd.Options{KeyPrefix: "locks/"})
		}},
	"Open": {"fencelock/", []string{"ownership", "errors"}, openDriver},
}

// openDriver is etcd.Open.
func openDriver(t testing.TB, addrs ...string) backend.FencingDriver {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	d, err := etcd.Open(ctx, "etcd://"+strings.Join(addrs, ",")+"?timeout=20s")
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// TestConformance runs the suite.
func TestConformance(t *testing.T) {
	t.Parallel()
	t.Run("New", func(t *testing.T) { conformance.Run(t, harnessOfOne(t, dialers["New"])) })
}

// TestConformanceOfOtherWays runs the suite over every other way to make a driver, each on its own server. The
// subtests are not parallel: parallel ones would begin only after all other tests of the package have begun.
func TestConformanceOfOtherWays(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	for name, way := range dialers {
		if name != "New" {
			t.Run(name, func(t *testing.T) { conformance.Run(t, harnessOfOne(t, way), way.some(t)...) })
		}
	}
}

// harnessOfOne returns the harness of one server.
func harnessOfOne(t *testing.T, way dialer) conformance.Harness {
	server := containers.Etcd(t)
	return harness(t, way, server, []string{server.Addr()}, func(t testing.TB) ([]string, fault.Link) {
		addr, link := server.NewLink(t)
		return []string{addr}, link
	})
}

// some returns the groups that run every time.
func (w dialer) some(t *testing.T) []string {
	if w.groups == nil {
		return nil
	}
	return testtier.Some(t, w.groups...)
}

// TestConformanceAsPermits runs the suite with two of three permits as a mutex: two such holds do not fit.
func TestConformanceAsPermits(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	conformance.Run(t, conformance.AsPermits(harnessOfOne(t, dialers["New"]), 2, 3))
}

// TestConformanceCluster runs the suite on three nodes, all of which stop when the suite stops the service.
// TestClusterFaults covers failures of single nodes.
func TestConformanceCluster(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	cluster := containers.EtcdCluster(t)
	conformance.Run(t,
		harness(t, dialers["Open"], cluster, cluster.Endpoints(), func(t testing.TB) ([]string, fault.Link) {
			return cluster.NewLinks(t)
		}))
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
	t testing.TB, way dialer, s containers.Lifecycle, addrs []string,
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
			RefuseRelease: func(testing.TB, string) func() { return nil }, // see TestConformanceWithRoles
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
		TTL: 2 * time.Second, // the minimum that a server with the default election timeout grants
	}
}

// leftovers lists the keys of drivers, with their leases. It skips the trace of a ForceRelease, which stays for a
// minute on a separate lease for a victim that was cut off. TestCloseLeavesNoLease checks leases without keys: a lease
// whose grant got no answer, or whose revocation failed over a broken link, expires and blocks nothing.
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

// meantToStay also reports true for the key of a session, and for the marks of attempts that ended without an answer.
// They end with their lease (see TestCloseLeavesNothing), and block nothing.
func meantToStay(key string) bool {
	return strings.HasSuffix(key, "/forced") || strings.HasSuffix(key, "/+space") ||
		strings.Contains(key, "/+sessions/") || strings.Contains(key, "/+over/")
}

// A driver that closes over a working link revokes its leases.
func TestCloseLeavesNoLease(t *testing.T) {
	t.Parallel()
	server := containers.Etcd(t)
	admin := newClient(t, server.Addr())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for name, way := range dialers {
		d := way.dial(t, server.Addr())
		for _, ttl := range []time.Duration{30 * time.Second, time.Minute} {
			r := backend.Request{Name: name + ttl.String(), Owner: "test", RequestID: backend.NewRequestID(), TTL: ttl}
			g, err := d.Acquire(ctx, r)
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Release(ctx, g); err != nil {
				t.Fatal(err)
			}
		}
		before, err := admin.Leases(ctx)
		if err != nil || len(before.Leases) != 2 {
			t.Fatalf("%s: while the driver is open there are %d leases, %v; want 2", name, len(before.Leases), err)
		}
		if err := d.Close(ctx); err != nil {
			t.Fatal(err)
		}
		after, err := admin.Leases(ctx)
		if err != nil || len(after.Leases) != 0 {
			t.Errorf("%s: after Close there are the leases %v, %v", name, after.Leases, err)
		}
	}
}
