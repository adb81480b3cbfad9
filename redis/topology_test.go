package redis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testtier"
)

// startCluster starts three masters that share the slots.
func startCluster(t *testing.T) []*testServer {
	t.Helper()
	ctx := within(t, 2*time.Minute)
	var nodes []*testServer
	var buses [3]string
	for i := range buses {
		// By default it is 10,000 above the other port, in the range of outgoing connections.
		_, buses[i], _ = net.SplitHostPort(freeport.Addresses(t, 1)[0])
		s := startServer(t, "--cluster-enabled", "yes",
			"--cluster-config-file", fmt.Sprint("nodes-", i, ".conf"), "--cluster-port", buses[i])
		nodes = append(nodes, s)
		first, last := i*16384/3, (i+1)*16384/3-1
		c := s.admin(t)
		if err := c.ClusterAddSlotsRange(ctx, first, last).Err(); err != nil {
			t.Fatal(err)
		}
		if err := c.Do(ctx, "cluster", "set-config-epoch", i+1).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for i, s := range nodes[1:] {
		host, port, _ := net.SplitHostPort(s.addr)
		if err := nodes[0].admin(t).Do(ctx, "cluster", "meet", host, port, buses[i+1]).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range nodes {
		c := s.admin(t)
		eventually(t, "the cluster is complete", func() bool {
			text, err := c.ClusterInfo(ctx).Result()
			return err == nil && strings.Contains(text, "cluster_state:ok") &&
				strings.Contains(text, "cluster_known_nodes:3") &&
				strings.Contains(text, "cluster_slots_assigned:16384")
		})
	}
	return nodes
}

func openCluster(t *testing.T, nodes []*testServer) *Driver {
	t.Helper()
	d, err := Open(within(t, 20*time.Second), "redis+cluster://"+nodes[0].addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close(within(t, 5*time.Second)) })
	return d
}

func TestCluster(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	nodes := startCluster(t)
	ctx := within(t, 2*time.Minute)
	a, err := Open(ctx, "redis+cluster://"+nodes[0].addr+","+nodes[1].addr)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close(ctx)
	plain := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{nodes[2].addr}})
	defer plain.Close()
	b := New(plain, nil)
	defer b.Close(ctx)

	// Names on all nodes, also names with braces, are renewed in one call.
	var grants []backend.Grant
	for i := range 100 {
		grants = append(grants, mustAcquire(t, a, request(fmt.Sprintf("n%d}{%d", i, i%7), 2*time.Minute, i%2 == 0)))
	}
	for i, s := range nodes {
		if n := len(keys(t, s.admin(t))); n == 0 || n == 100 {
			t.Errorf("node %d has %d keys", i, n)
		}
	}
	for i, answer := range a.Renew(ctx, grants) {
		if answer.Err != nil {
			t.Errorf("%d: %v", i, answer.Err)
		}
	}
	// Waiters are granted by push.
	for i, g := range grants {
		if _, err := b.Acquire(ctx, request(g.Name, time.Minute, false)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("%d: %v", i, err)
		}
		got := make(chan backend.Grant, 1)
		if i < 10 {
			go func() {
				g, err := b.Acquire(ctx, request(g.Name, 2*time.Minute, true))
				if err != nil {
					t.Error(err)
				}
				got <- g
			}()
			eventually(t, "it waits", func() bool {
				info, err := b.Look(ctx, g.Name)
				return err == nil && info.Waiters == 1
			})
		}
		mustRelease(t, a, g)
		if i < 10 {
			mustRelease(t, b, <-got)
		}
	}
	// Shares of names on all nodes.
	for i := range 10 {
		name := fmt.Sprintf("shares-%d}{%d", i, i%7)
		for _, kind := range []func(backend.Request) backend.Request{
			reading, func(r backend.Request) backend.Request { return taking(r, 1, 2) },
		} {
			one := mustAcquire(t, a, kind(request(name, 2*time.Minute, false)))
			two := mustAcquire(t, b, kind(request(name, 2*time.Minute, true)))
			rival := request(name, 2*time.Minute, true)
			if one.Kind == backend.KindPermits {
				rival = taking(rival, 2, 2)
			}
			next := inLine(t, a, b, rival, 1)
			for _, answer := range a.Renew(ctx, []backend.Grant{one, two}) {
				if answer.Err != nil {
					t.Error(answer.Err)
				}
			}
			mustRelease(t, a, one)
			mustRelease(t, b, two)
			mustRelease(t, b, <-next)
		}
	}
	if _, err := a.AcquireAll(ctx, set("a", "b")); !errors.Is(err, backend.ErrUnsupported) {
		t.Errorf("several names on a cluster: %v", err)
	}
	for i, s := range nodes {
		if found := keys(t, s.admin(t)); len(found) != 0 {
			t.Errorf("left on node %d: %v", i, found)
		}
	}
	if err := openAt(t, nodes[0].addr).Ping(ctx); !errors.Is(err, backend.ErrMisconfigured) {
		t.Errorf("a plain client on a cluster: %v", err)
	}
}

// While the slot of a name moves from one node to another, calls wait in the client, and the hold stays.
func TestSlotMigration(t *testing.T) {
	t.Parallel()
	nodes := startCluster(t)
	ctx := within(t, 2*time.Minute)
	d, err := Open(ctx, "redis+cluster://"+nodes[0].addr)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close(ctx)
	lock := redisscript.KeysOf("fencelock:", "n").Lock
	slot := int(nodes[0].admin(t).ClusterKeySlot(ctx, lock).Val())
	from := slot * 3 / 16384
	for (from+1)*16384/3 <= slot {
		from++
	}
	source, target := nodes[from].admin(t), nodes[(from+1)%3].admin(t)
	host, port, _ := net.SplitHostPort(nodes[(from+1)%3].addr)
	ids := map[*goredis.Client]string{}
	for _, c := range []*goredis.Client{source, target} {
		id, err := c.Do(ctx, "cluster", "myid").Text()
		if err != nil {
			t.Fatal(err)
		}
		ids[c] = id
	}
	must := func(c *goredis.Client, command ...any) {
		t.Helper()
		if err := c.Do(ctx, command...).Err(); err != nil {
			t.Fatalf("%v: %v", command, err)
		}
	}
	first := mustAcquire(t, d, request("n", 2*time.Minute, true))
	next := inLine(t, d, d, request("n", 2*time.Minute, true), 1)
	mustRelease(t, d, first)
	g := <-next
	if !g.Queued {
		t.Error("the hold has not waited")
	}
	must(target, "cluster", "setslot", slot, "importing", ids[source])
	must(source, "cluster", "setslot", slot, "migrating", ids[target])
	renew := func(when string) {
		t.Helper()
		if answer := d.Renew(ctx, []backend.Grant{g})[0]; answer.Err != nil {
			t.Errorf("renewed %s: %v", when, answer.Err)
		}
	}
	renew("before its key moves")
	released := make(chan error, 1)
	go func() { released <- d.Release(ctx, g) }()
	select {
	case err := <-released:
		t.Errorf("released in the middle of a move: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	must(source, "migrate", host, port, lock, 0, 5000)
	renew("before the move has ended")
	must(target, "cluster", "setslot", slot, "node", ids[target])
	must(source, "cluster", "setslot", slot, "node", ids[target])
	if err := <-released; err != nil {
		t.Errorf("released after the move: %v", err)
	}
	mustRelease(t, d, mustAcquire(t, d, request("n", 2*time.Minute, false)))
	stats := ""
	for _, s := range nodes {
		text, err := s.admin(t).Info(ctx, "errorstats").Result()
		if err != nil {
			t.Fatal(err)
		}
		stats += text
	}
	for _, answer := range []string{"ASK", "TRYAGAIN", "MOVED"} {
		if !strings.Contains(stats, "errorstat_"+answer+":") {
			t.Errorf("no call was answered %s: %s", answer, stats)
		}
	}
}

// startSentinel starts one Sentinel that watches s under the name "mymaster".
func startSentinel(t *testing.T, s *testServer) string { return startSentinelWith(t, s, "") }

// startSentinelWith starts a Sentinel with a password.
func startSentinelWith(t *testing.T, s *testServer, password string) string {
	t.Helper()
	addr := freeport.Addresses(t, 1)[0]
	host, port, _ := net.SplitHostPort(s.addr)
	_, own, _ := net.SplitHostPort(addr)
	file := filepath.Join(t.TempDir(), "sentinel.conf")
	text := fmt.Sprintf("port %s\nbind 127.0.0.1\nsentinel monitor mymaster %s %s 1\n"+
		"sentinel down-after-milliseconds mymaster 1000\n", own, host, port)
	if password != "" {
		text += "requirepass " + password + "\n"
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	fault.Start(t, exec.Command("redis-server", file, "--sentinel"))
	c := goredis.NewSentinelClient(&goredis.Options{Addr: addr, Password: password})
	t.Cleanup(func() { c.Close() })
	eventually(t, "the Sentinel knows the master", func() bool {
		return c.GetMasterAddrByName(context.Background(), "mymaster").Err() == nil
	})
	return addr
}

func TestSentinel(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--appendonly", "yes", "--appendfsync", "always")
	addr := startSentinel(t, s)
	ctx := within(t, 2*time.Minute)
	a, err := Open(ctx, "redis+sentinel://"+addr+"/mymaster")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close(ctx)
	client := goredis.NewFailoverClient(&goredis.FailoverOptions{MasterName: "mymaster", SentinelAddrs: []string{addr}})
	defer client.Close()
	b := New(client, nil)
	defer b.Close(ctx)
	if got := a.Describe().Exclusion; got != backend.ExclusionAsyncReplica {
		t.Errorf("exclusion: %v", got)
	}
	g := mustAcquire(t, a, request("n", 2*time.Minute, true))
	next := waitInLine(t, s, b, request("n", 2*time.Minute, true), 1)
	if answer := a.Renew(ctx, []backend.Grant{g})[0]; answer.Err != nil {
		t.Error(answer.Err)
	}
	mustRelease(t, a, g)
	mustRelease(t, b, <-next)
	if found := keys(t, s.admin(t)); len(found) != 0 {
		t.Errorf("left: %v", found)
	}
}

// The driver and its examination reach Sentinels with a password from a file.
func TestSentinelPasswordFile(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	url := "redis+sentinel://" + startSentinelWith(t, s, "secret") + "/mymaster"
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx := within(t, 2*time.Minute)
	if d, err := Open(ctx, url+"?timeout=500ms"); err == nil {
		t.Error("opened without the password")
		d.Close(ctx)
	}
	d, err := Open(ctx, url+"?sentinel-password-file="+file)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close(ctx)
	mustRelease(t, d, mustAcquire(t, d, request("n", time.Minute, false)))
	report, err := examine(ctx, url+"?sentinel-password-file="+file)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range report.Members {
		if m.Err != nil || len(m.Problems) > 0 {
			t.Errorf("%+v", m)
		}
	}
}

// After a requested failover, waiters continue within seconds, with any kind of client: the old master reports that it
// is a replica, and the client drops its connections.
func TestSentinelFailover(t *testing.T) {
	t.Parallel()
	master := startServer(t)
	replica := startServer(t, "--replicaof", strings.Replace(master.addr, ":", " ", 1))
	addr := startSentinel(t, master)
	sentinel := goredis.NewSentinelClient(&goredis.Options{Addr: addr})
	defer sentinel.Close()
	ctx := within(t, 2*time.Minute)
	eventually(t, "the Sentinel knows the replica", func() bool {
		replicas, err := sentinel.Replicas(ctx, "mymaster").Result()
		return err == nil && len(replicas) == 1 && replicas[0]["master-link-status"] == "ok"
	})
	plain := goredis.NewFailoverClient(&goredis.FailoverOptions{MasterName: "mymaster", SentinelAddrs: []string{addr}})
	defer plain.Close()
	opened, err := Open(ctx, "redis+sentinel://"+addr+"/mymaster")
	if err != nil {
		t.Fatal(err)
	}
	drivers := []*Driver{New(plain, nil), opened}
	var granted [2]atomic.Int64
	const ttl = 3 * time.Second
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var longest atomic.Int64
	for i, d := range drivers {
		defer d.Close(ctx)
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				start := time.Now()
				g, err := d.Acquire(ctx, request("n", ttl, true))
				if err != nil {
					t.Error(err)
					return
				}
				granted[i].Add(1)
				longest.Store(max(longest.Load(), int64(time.Since(start))))
				_ = d.Release(ctx, g) // in the middle of the failover it may not succeed
			}
		})
	}
	after := func(n [2]int64) func() bool {
		return func() bool { return granted[0].Load() > n[0]+20 && granted[1].Load() > n[1]+20 }
	}
	eventually(t, "both work", after([2]int64{}))
	if err := sentinel.Failover(ctx, "mymaster").Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the replica is the master", func() bool {
		text, err := replica.admin(t).Info(ctx, "replication").Result()
		return err == nil && strings.Contains(text, "role:master")
	})
	eventually(t, "the master is a replica", func() bool {
		text, err := master.admin(t).Info(ctx, "replication").Result()
		return err == nil && strings.Contains(text, "role:slave")
	})
	eventually(t, "both work with the new master", after([2]int64{granted[0].Load(), granted[1].Load()}))
	close(stop)
	wg.Wait()
	t.Logf("the longest wait: %v with a TTL of %v", time.Duration(longest.Load()), ttl)
}
