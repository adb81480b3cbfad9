package binding_test

import (
	"cmp"
	"errors"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/containers"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/testtier"
	"github.com/fencelock/fencelock/zookeeper/internal/binding"
)

const root = "/fencelock"

func newDriver(t testing.TB, addrs ...string) *binding.Driver {
	t.Helper()
	return binding.New(addrs, &binding.Options{Tick: containers.ZooKeeperTick})
}

// TestConformance runs the suite.
func TestConformance(t *testing.T) {
	t.Parallel()
	server := containers.ZooKeeper(t)
	admin := newAdmin(t, server.Addr())
	conformance.Run(t, conformance.Harness{
		New: func(t testing.TB) backend.Driver { return newDriver(t, server.Addr()) },
		Linked: func(t testing.TB) (backend.Driver, fault.Link) {
			addr, link := server.NewLink(t)
			return newDriver(t, addr), link
		},
		Server: conformance.Server{
			Restart:     containers.Within(server.Restart),
			Stop:        containers.Within(server.Stop),
			Start:       containers.Within(server.Start),
			Pause:       containers.Within(server.Pause),
			Resume:      containers.Within(server.Resume),
			Evict:       func(t testing.TB, name string) { admin.deleteBelow(t, dirOf(name)) },
			EvictWaiter: func(t testing.TB, name string) int { return admin.deleteWaiters(t, dirOf(name)) },
			Wipe:        func(t testing.TB) { admin.deleteBelow(t, "") },
			RefuseRelease: func(t testing.TB, name string) func() {
				acl := admin.allow(t, dirOf(name), zk.WorldACL(zk.PermAll&^zk.PermDelete))
				return func() {
					if admin.stat(t, dirOf(name)) != nil { // the servers remove a name that is empty for a minute
						admin.allow(t, dirOf(name), acl)
					}
				}
			},
		},
		Leftovers: func() ([]string, error) { return admin.ephemerals(root) },
		Intrude: func(t testing.TB, name string) {
			admin.create(t, root+"/foreign")
			admin.create(t, root+"/%zz")
			for _, node := range []string{
				"foreign", "lock-0000000000", "_c_0123456789abcdef0123456789abcdef-lock-0000000001", "0000000002",
				backend.NewRequestID(), backend.NewRequestID() + ".00000000x0",
				backend.NewRequestID() + ".0000000000", // an entry by its name, but nobody's
			} {
				admin.create(t, dirOf(name)+"/"+node)
			}
		},
		TTL: 2400 * time.Millisecond, // six times as much, to which the suite extends a lease, is below 20 ticks
	}.RefusesLong(true), testtier.Some(t, "ownership", "waiting", "ambiguity", "cancellation", "leftovers")...)
}

// dirOf is the node of a name.
func dirOf(name string) string {
	return root + "/lock:" + strings.NewReplacer("+", "%20", ".", "%2E", "~", "%7E", "*", "%2A").Replace(url.QueryEscape(name))
}

// admin is an operator's client.
type admin struct{ *zk.Conn }

func newAdmin(t testing.TB, addrs ...string) admin {
	t.Helper()
	c, events, err := zk.Connect(addrs, 10*time.Second, zk.WithLogInfo(false), zk.WithLogger(quiet{}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		for range events {
		}
	})
	return admin{c}
}

type quiet struct{}

func (quiet) Printf(string, ...any) {}

// allow sets the ACL of a node, and returns the one of before.
func (a admin) allow(t testing.TB, path string, acl []zk.ACL) (before []zk.ACL) {
	t.Helper()
	if err := a.try(func() (err error) {
		if before, _, err = a.GetACL(path); err == nil {
			_, err = a.SetACL(path, acl, -1)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return before
}

// try repeats what a lost connection or session interrupted.
func (a admin) try(f func() error) error {
	for deadline := time.Now().Add(30 * time.Second); ; {
		err := f()
		again := errors.Is(err, zk.ErrConnectionClosed) || errors.Is(err, zk.ErrSessionExpired) ||
			errors.Is(err, zk.ErrNoServer) || errors.Is(err, zk.ErrSessionMoved)
		if !again || time.Now().After(deadline) {
			return err
		}
	}
}

// deleteWaiters deletes all entries of a name but the oldest, which holds it, and returns how many.
func (a admin) deleteWaiters(t testing.TB, dir string) int {
	t.Helper()
	nodes := a.children(t, dir)
	made := map[string]int64{}
	for _, node := range nodes {
		if stat := a.stat(t, dir+"/"+node); stat != nil {
			made[node] = stat.Czxid
		}
	}
	slices.SortFunc(nodes, func(x, y string) int { return cmp.Compare(made[x], made[y]) })
	for _, node := range nodes[1:] {
		if err := a.try(func() error { return a.Delete(dir+"/"+node, -1) }); err != nil {
			t.Fatal(err)
		}
	}
	return len(nodes) - 1
}

func (a admin) stat(t testing.TB, path string) (stat *zk.Stat) {
	t.Helper()
	if err := a.try(func() error {
		there, s, err := a.Exists(path)
		if stat = nil; there {
			stat = s
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return stat
}

// children lists the nodes below a node, with all that the leader knows.
func (a admin) children(t testing.TB, path string) (nodes []string) {
	t.Helper()
	err := a.try(func() (err error) {
		if _, err = a.Sync("/"); err == nil {
			nodes, _, err = a.Children(cmp.Or(path, "/"))
		}
		return err
	})
	if err != nil && !errors.Is(err, zk.ErrNoNode) {
		t.Fatal(err)
	}
	return nodes
}

// create makes a persistent node, and those above it.
func (a admin) create(t testing.TB, path string) {
	t.Helper()
	for i := 1; i <= len(path); i++ {
		if i < len(path) && path[i] != '/' {
			continue
		}
		err := a.try(func() error {
			_, err := a.Create(path[:i], nil, zk.FlagPersistent, zk.WorldACL(zk.PermAll))
			return err
		})
		if err != nil && !errors.Is(err, zk.ErrNodeExists) {
			t.Fatalf("create %s: %v", path[:i], err)
		}
	}
}

// deleteBelow deletes all nodes below path in one step; "" is the root.
func (a admin) deleteBelow(t testing.TB, path string) {
	t.Helper()
	for {
		var ops []any
		for _, node := range a.below(t, path) {
			ops = append(ops, &zk.DeleteRequest{Path: node, Version: -1})
		}
		if len(ops) == 0 {
			return
		}
		err := a.try(func() error {
			results, err := a.Multi(ops...)
			for _, r := range results {
				if err == nil || errors.Is(err, zk.ErrAPIError) {
					err = r.Error
				}
			}
			return err
		})
		switch {
		case err == nil:
			return
		case !errors.Is(err, zk.ErrNoNode) && !errors.Is(err, zk.ErrNotEmpty): // changed since they were read
			t.Fatalf("delete below %s: %v", path, err)
		}
	}
}

// below lists all nodes below path, children before their parents.
func (a admin) below(t testing.TB, path string) (all []string) {
	t.Helper()
	for _, node := range a.children(t, path) {
		if path != "" || node != "zookeeper" {
			all = append(append(all, a.below(t, path+"/"+node)...), path+"/"+node)
		}
	}
	return all
}

// ephemerals lists the entries below root.
func (a admin) ephemerals(root string) (left []string, err error) {
	err = a.try(func() error {
		left = nil
		if _, err := a.Sync("/"); err != nil {
			return err
		}
		names, _, err := a.Children(root)
		if err != nil && !errors.Is(err, zk.ErrNoNode) {
			return err
		}
		for _, name := range names {
			nodes, _, err := a.Children(root + "/" + name)
			if err != nil && !errors.Is(err, zk.ErrNoNode) {
				return err
			}
			for _, node := range nodes {
				there, stat, err := a.Exists(root + "/" + name + "/" + node)
				if err != nil {
					return err
				}
				if there && stat.EphemeralOwner != 0 {
					left = append(left, root+"/"+name+"/"+node)
				}
			}
		}
		return nil
	})
	return left, err
}
