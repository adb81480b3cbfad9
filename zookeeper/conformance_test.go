package zookeeper_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	"github.com/fencelock/fencelock/zookeeper"
)

// dialer makes a driver in one of the ways that the package offers.
type dialer struct {
	root string                                                                      // as the server sees it
	dial func(t testing.TB, network *answers, addrs ...string) backend.FencingDriver // network may be nil
}

// dialers are all ways to make a driver.
var dialers = map[string]dialer{
	"New": {"/fencelock", func(_ testing.TB, network *answers, addrs ...string) backend.FencingDriver {
		o := &zookeeper.Options{Tick: containers.ZooKeeperTick}
		if network != nil {
			o.Dial = network.dial
		}
		return zookeeper.New(addrs, o)
	}},
	"Open-with-user-and-chroot": {"/app/locks/fencelock", func(
		t testing.TB, network *answers, addrs ...string,
	) backend.FencingDriver {
		t.Helper()
		for i, addr := range addrs {
			if network != nil {
				addrs[i] = network.front(t, addr)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		d, err := zookeeper.Open(ctx, fmt.Sprintf("zk://ann:secret@%s/app/locks?timeout=60s&tick=%v",
			strings.Join(addrs, ","), containers.ZooKeeperTick))
		if err != nil {
			t.Fatal(err)
		}
		return d
	}},
}

// TestConformance runs the suite.
func TestConformance(t *testing.T) {
	t.Parallel()
	t.Run("New", func(t *testing.T) {
		conformance.Run(t, harnessOfOne(t, dialers["New"]).RefusesLong(true))
	})
}

// TestConformanceOfOtherWays runs it over every other way to make a driver, each on a server of its own. They are no
// parallel subtests: those would begin when all other tests of the package have begun.
func TestConformanceOfOtherWays(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	for name, way := range dialers {
		if name != "New" {
			t.Run(name, func(t *testing.T) {
				conformance.Run(t, harnessOfOne(t, way),
					testtier.Some(t, "ownership", "names", "errors")...)
			})
		}
	}
}

// harnessOfOne has one server.
func harnessOfOne(t *testing.T, way dialer) conformance.Harness {
	server := containers.ZooKeeper(t)
	return harness(t, way, server, []string{server.Addr()}, func(t testing.TB) ([]string, fault.Link) {
		addr, link := server.NewLink(t)
		return []string{addr}, link
	})
}

// TestConformanceAsPermits runs it with permits as mutexes: two of three, of which no two fit at once.
func TestConformanceAsPermits(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	conformance.Run(t, conformance.AsPermits(harnessOfOne(t, dialers["New"]), 2, 3))
}

func harness(
	t testing.TB, way dialer, s containers.Lifecycle, addrs []string, newLink func(testing.TB) ([]string, fault.Link),
) conformance.Harness {
	admin := newAdmin(t, addrs...)
	network := &answers{}
	return conformance.Harness{
		New: func(t testing.TB) backend.Driver { return way.dial(t, network, slices.Clone(addrs)...) },
		Linked: func(t testing.TB) (backend.Driver, fault.Link) {
			addrs, link := newLink(t)
			return way.dial(t, nil, addrs...), link
		},
		Server: conformance.Server{
			Restart:     containers.Within(s.Restart),
			Stop:        containers.Within(s.Stop),
			Start:       containers.Within(s.Start),
			Pause:       containers.Within(s.Pause),
			Resume:      containers.Within(s.Resume),
			Evict:       func(t testing.TB, name string) { admin.deleteBelow(t, way.root+"/lock:"+escaped(name)) },
			EvictWaiter: func(t testing.TB, name string) int { return admin.deleteWaiters(t, way.root+"/lock:"+escaped(name)) },
			Wipe:        func(t testing.TB) { admin.deleteBelow(t, "") },
			RefuseRelease: func(t testing.TB, name string) func() {
				dir := way.root + "/lock:" + escaped(name)
				acl, err := admin.allow(dir, zk.WorldACL(zk.PermAll&^zk.PermDelete))
				if err != nil {
					t.Fatal(err)
				}
				return func() { // the servers remove a node that is empty for long
					if _, err := admin.allow(dir, acl); err != nil && !errors.Is(err, zk.ErrNoNode) {
						t.Fatal(err)
					}
				}
			},
			// An ACL refuses no renewal, since it is a transaction that checks a version; a server that throttles
			// refuses it.
			RefuseWrites: func(testing.TB, string) func() {
				network.give(throttled, false, opCreate, opDelete, opSetData, opMulti, opCreate2, opCreateContainer)
				return func() { network.pass() }
			},
		},
		Leftovers: func() ([]string, error) { return admin.ephemerals(way.root) },
		Intrude: func(t testing.TB, name string) {
			dir := way.root + "/" + escaped(name)
			admin.create(t, way.root+"/foreign")
			admin.create(t, way.root+"/%zz")
			for _, node := range []string{
				"foreign", "lock-0000000000", "_c_0123456789abcdef0123456789abcdef-lock-0000000001", "0000000002",
				backend.NewRequestID(), backend.NewRequestID() + ".00000000x0",
				backend.NewRequestID() + ".0000000000", // an entry by its name, but nobody's
			} {
				admin.create(t, dir+"/"+node)
			}
		},
		TTL: 2400 * time.Millisecond, // six times as much, to which the suite extends a lease, is below 20 ticks
	}
}

// escaped is the node of a name.
func escaped(name string) string {
	return strings.ReplaceAll(strings.ReplaceAll(strings.ReplaceAll(
		strings.ReplaceAll(url.QueryEscape(name), "+", "%20"), ".", "%2E"), "~", "%7E"), "*", "%2A")
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
	a := admin{c}
	if err := a.try(func() error { return c.AddAuth("digest", []byte("ann:secret")) }); err != nil {
		t.Fatal(err)
	}
	return a
}

type quiet struct{}

func (quiet) Printf(string, ...any) {}

// allow sets the ACL of a node, and returns the one of before.
func (a admin) allow(path string, acl []zk.ACL) (before []zk.ACL, err error) {
	err = a.try(func() (err error) {
		if before, _, err = a.GetACL(path); err == nil {
			_, err = a.SetACL(path, acl, -1)
		}
		return err
	})
	return before, err
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
	if err := a.catchUp(); err != nil {
		t.Fatal(err)
	}
	nodes, err := a.children(dir)
	if err != nil {
		t.Fatal(err)
	}
	made := map[string]int64{}
	for _, node := range nodes {
		if err := a.try(func() error {
			_, stat, err := a.Get(dir + "/" + node)
			if err == nil {
				made[node] = stat.Czxid
			}
			return err
		}); err != nil {
			t.Fatal(err)
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

// catchUp lets the admin's server know all that the leader knows: what others have read is done.
func (a admin) catchUp() error {
	return a.try(func() error {
		_, err := a.Sync("/")
		return err
	})
}

func (a admin) children(path string) (nodes []string, err error) {
	err = a.try(func() error {
		if path == "" {
			path = "/"
		}
		nodes, _, err = a.Children(path)
		return err
	})
	if errors.Is(err, zk.ErrNoNode) {
		return nil, nil
	}
	return nodes, err
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
	if err := a.catchUp(); err != nil {
		t.Fatal(err)
	}
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
	nodes, err := a.children(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes {
		if path != "" || node != "zookeeper" {
			all = append(append(all, a.below(t, path+"/"+node)...), path+"/"+node)
		}
	}
	return all
}

// ephemerals lists the ephemeral nodes below root.
func (a admin) ephemerals(root string) (left []string, err error) {
	if err := a.catchUp(); err != nil {
		return nil, err
	}
	names, err := a.children(root)
	for _, name := range names {
		dir := root + "/" + name
		nodes, err := a.children(dir)
		if err != nil {
			return nil, err
		}
		for _, node := range nodes {
			var stat *zk.Stat
			err := a.try(func() error {
				_, stat, err = a.Get(dir + "/" + node)
				return err
			})
			if err == nil && stat.EphemeralOwner != 0 {
				left = append(left, dir+"/"+node)
			} else if err != nil && !errors.Is(err, zk.ErrNoNode) {
				return nil, err
			}
		}
	}
	return left, err
}
