package redis

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/testtier"
)

// contention is many workers that want few names, and the results.
type contention struct {
	names []string
	ttl   time.Duration
	hold  time.Duration // at most
	drop  float64       // the share of holds that are not released
	as    func(*backend.Request)

	mu       sync.Mutex // protects the following fields
	holders  map[string]map[string]backend.Instant
	grants   int
	overlaps int           // grants beside a holder that still relied on its hold
	lost     int           // holds whose release found that they had ended
	unknown  int           // releases and acquires without an outcome
	longest  time.Duration // the longest wait for a grant
}

// run lets n workers of each driver contend until end is called.
func (c *contention) run(t *testing.T, n int, drivers ...backend.Driver) (end func()) {
	c.holders = map[string]map[string]backend.Instant{}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for _, d := range drivers {
		for range n {
			all.Go(func() {
				for ctx.Err() == nil {
					c.once(ctx, t, d)
				}
			})
		}
	}
	return func() {
		cancel()
		all.Wait()
	}
}

func (c *contention) once(ctx context.Context, t *testing.T, d backend.Driver) {
	r := request(c.names[rand.N(len(c.names))], c.ttl, true)
	if c.as != nil {
		c.as(&r)
	}
	began := time.Now()
	g, err := d.Acquire(ctx, r)
	if err != nil {
		if ctx.Err() == nil {
			if !errors.Is(err, backend.ErrUnavailable) && !errors.Is(err, backend.ErrUnknown) {
				t.Error(err)
			}
			c.note(func() { c.unknown++ })
		}
		return
	}
	until := g.SentAt.Add(d.Describe().Validity(g.TTL))
	c.note(func() {
		now := d.Describe().Clock.Now()
		if c.holders[g.Name] == nil {
			c.holders[g.Name] = map[string]backend.Instant{}
		}
		for _, other := range c.holders[g.Name] {
			if now < other && now < until {
				c.overlaps++
			}
		}
		c.holders[g.Name][g.RequestID] = until
		c.grants++
		c.longest = max(c.longest, time.Since(began))
	})
	if rand.Float64() < c.drop {
		return
	}
	time.Sleep(rand.N(c.hold + 1))
	c.note(func() { delete(c.holders[g.Name], g.RequestID) })
	bounded, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err = d.Release(bounded, g)
	c.note(func() {
		switch {
		case errors.Is(err, backend.ErrNotHeld):
			c.lost++
		case err != nil:
			c.unknown++
		}
	})
}

func (c *contention) note(what func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	what()
}

// further waits for n more grants.
func (c *contention) further(t *testing.T, n int) {
	t.Helper()
	count := func() (n int) {
		c.note(func() { n = c.grants })
		return n
	}
	before := count()
	eventually(t, fmt.Sprint(n, " more grants"), func() bool { return count() >= before+n })
}

func (c *contention) print(t *testing.T, what string, times int) {
	t.Logf("%s: %d times, %d grants, %d overlaps, %d holds lost, %d calls without an outcome, longest wait %v (TTL %v)",
		what, times, c.grants, c.overlaps, c.lost, c.unknown, c.longest, c.ttl)
}

// moves and failovers return the number of repetitions of these faults.
func moves() int {
	if testtier.Wanted() {
		return 50
	}
	return 2
}

const failovers = 10

// While the keys of a slot move from node to node under load, no two holders have a name concurrently, and no hold is
// lost.
func TestOverlapsInSlotMigration(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	nodes := startCluster(t)
	ctx := within(t, 5*time.Minute)
	c := &contention{names: []string{"n"}, ttl: 30 * time.Second, hold: 2 * time.Millisecond}
	lock := redisscript.KeysOf("fencelock:", "n").Lock
	slot := redisscript.Slot(lock)
	ids := make([]string, len(nodes))
	at := 0
	for i, s := range nodes {
		id, err := s.admin(t).Do(ctx, "cluster", "myid").Text()
		if err != nil {
			t.Fatal(err)
		}
		ids[i] = id
		if slot >= i*redisscript.Slots/3 {
			at = i
		}
	}
	must := func(s *testServer, command ...any) {
		t.Helper()
		if err := s.admin(t).Do(ctx, command...).Err(); err != nil && !strings.Contains(err.Error(), "NOKEY") {
			t.Fatalf("%v: %v", command, err)
		}
	}
	end := c.run(t, 4, openCluster(t, nodes), openCluster(t, nodes))
	times := 0
	for range moves() {
		c.further(t, 20)
		from, to := nodes[at], nodes[(at+1)%3]
		host, port, _ := net.SplitHostPort(to.addr)
		must(to, "cluster", "setslot", slot, "importing", ids[at])
		must(from, "cluster", "setslot", slot, "migrating", ids[(at+1)%3])
		eventually(t, "all keys have moved", func() bool {
			keys, err := from.admin(t).ClusterGetKeysInSlot(ctx, slot, 100).Result()
			if err != nil {
				t.Fatal(err)
			}
			for _, key := range keys {
				must(from, "migrate", host, port, key, 0, 5000)
			}
			return len(keys) == 0
		})
		for _, s := range []*testServer{to, from, nodes[(at+2)%3]} {
			must(s, "cluster", "setslot", slot, "node", ids[(at+1)%3])
		}
		at = (at + 1) % 3
		times++
	}
	c.further(t, 20)
	end()
	c.print(t, "slot migration", times)
	if c.overlaps > 0 || c.lost > 0 { // a move that takes seconds on this machine ends calls without an outcome
		t.Error("a slot's move is to cost nothing but time")
	}
}

// The cost of requested failovers by Sentinel: replication is asynchronous, so a hold may be lost, and two clients may
// hold one name concurrently; doc.go has the rates. There are no other errors, and locks keep working.
func TestOverlapsInSentinelFailover(t *testing.T) {
	testtier.Only(t)
	t.Parallel()
	servers := []*testServer{startServer(t)}
	servers = append(servers, startServer(t, "--replicaof", strings.Replace(servers[0].addr, ":", " ", 1)))
	addr := startSentinel(t, servers[0])
	sentinel := goredis.NewSentinelClient(&goredis.Options{Addr: addr})
	defer sentinel.Close()
	ctx := within(t, 8*time.Minute)
	ready := func() bool {
		replicas, err := sentinel.Replicas(ctx, "mymaster").Result()
		return err == nil && len(replicas) == 1 && replicas[0]["master-link-status"] == "ok" &&
			!strings.Contains(replicas[0]["flags"], "down")
	}
	eventually(t, "the Sentinel knows the replica", ready)
	var drivers []backend.Driver
	for range 2 {
		d, err := Open(ctx, "redis+sentinel://"+addr+"/mymaster")
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close(ctx)
		drivers = append(drivers, d)
	}
	c := &contention{names: []string{"a", "b", "c", "d"}, ttl: 2 * time.Second, hold: 20 * time.Millisecond}
	end := c.run(t, 4, drivers...)
	times := 0
	for range failovers {
		c.further(t, 50)
		eventually(t, "a failover is possible", func() bool {
			return ready() && sentinel.Failover(ctx, "mymaster").Err() == nil
		})
		master := servers[(times+1)%2]
		eventually(t, "the replica is the master", func() bool {
			text, err := master.admin(t).Info(ctx, "replication").Result()
			return err == nil && strings.Contains(text, "role:master")
		})
		times++
	}
	c.further(t, 50)
	end()
	c.print(t, "Sentinel failover", times)
}

// Two clients never hold a name concurrently, whatever the kinds of their holds.
func TestOverlapsOfKinds(t *testing.T) {
	testtier.NotShort(t)
	t.Parallel()
	d := 2 * time.Second
	if testtier.Wanted() {
		d = time.Minute
	}
	for name, as := range map[string]func(*backend.Request){
		"exclusive":   nil,
		"handed over": func(r *backend.Request) { r.Renews = true },
		"permits": func(r *backend.Request) { // two of these do not fit
			r.Kind, r.Permits, r.Limit = backend.KindPermits, 2, 3
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			drivers := []backend.Driver{s.open(t), s.open(t), s.open(t), s.open(t)}
			c := &contention{
				names: []string{"a", "b"}, ttl: 500 * time.Millisecond, hold: 5 * time.Millisecond, drop: 0.01, as: as,
			}
			end := c.run(t, 4, drivers...)
			time.Sleep(d)
			end()
			c.print(t, name, 1)
			if c.overlaps > 0 || c.grants == 0 {
				t.Error("one client at a time has to hold a name")
			}
		})
	}
}
