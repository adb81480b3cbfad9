package server

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/testtier"
)

// cluster is several servers in this process, which know each other by loopback addresses.
type cluster struct {
	t       testing.TB
	configs []Config
	servers []*Server // nil: stopped
}

// joinKey is that of all clusters here: servers that lost their data come back.
var joinKey = []byte("of sixteen bytes and more")

// calm keeps the leader of a cluster in office: the members tolerate silence for longer than the usual half second,
// which a busy machine may well exceed.
func calm(c *Config) { c.Timing, c.MinTTL = replica.Timing{Heartbeat: 2 * time.Second}, 10*time.Second }

// newCluster starts n servers, and waits for one of them to lead. configure, if not nil, changes their settings.
func newCluster(t testing.TB, n int, configure func(*Config)) *cluster {
	t.Helper()
	c := &cluster{t: t, configs: make([]Config, n), servers: make([]*Server, n)}
	addresses := freeport.Addresses(t, 2*n)
	for i := range c.configs {
		c.configs[i] = Config{
			DataDir: t.TempDir(), Listen: addresses[i], PeerListen: addresses[n+i],
			Join: addresses[n:], BootstrapExpect: n, JoinKey: joinKey, MinTTL: 200 * time.Millisecond,
			askTime: patience, Log: quiet(t).With("server", i),
		}
		if configure != nil {
			configure(&c.configs[i])
		}
		c.start(i)
	}
	t.Cleanup(func() {
		var stopping sync.WaitGroup
		for i := range c.servers {
			stopping.Go(func() { c.stop(i) })
		}
		stopping.Wait()
	})
	c.leader()
	return c
}

func (c *cluster) start(i int) {
	c.t.Helper()
	if err := freeport.Again(func() (err error) {
		c.servers[i], err = Start(context.Background(), c.configs[i])
		return err
	}); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) stop(i int) {
	if s := c.servers[i]; s != nil {
		c.servers[i] = nil
		if err := s.Close(context.Background()); err != nil {
			c.t.Errorf("stopping server %d: %v", i, err)
		}
	}
}

// leader waits for a leader and returns its number.
func (c *cluster) leader() int {
	c.t.Helper()
	found := -1
	eventually(c.t, "a server leads", func() bool {
		for i, s := range c.servers {
			if s != nil && s.Leads() {
				found = i
				return true
			}
		}
		return false
	})
	return found
}

// lead makes a server lead.
func (c *cluster) lead(i int) {
	c.t.Helper()
	eventually(c.t, fmt.Sprintf("server %d leads", i), func() bool {
		_ = c.servers[c.leader()].replica.Transfer(c.t.Context(), c.servers[i].replica.ID()) // a busy machine may refuse it
		return c.leader() == i
	})
}

// expectKnown waits until a follower knows where clients find the leader.
func (c *cluster) expectKnown(leader, follower int) {
	c.t.Helper()
	eventually(c.t, "the follower knows where the leader is", func() bool {
		return c.servers[follower].leaderAddress() == c.configs[leader].Listen
	})
}

// connect returns a client of the leader, or nil without a leader.
func (c *cluster) connect() *client { return leading(c.t, c.servers...)() }

// leading returns a function that connects to the leader among servers, and returns nil without one. Servers may be
// nil.
func leading(t testing.TB, servers ...*Server) func() *client {
	return func() *client {
		for _, s := range servers {
			if s != nil && s.Leads() {
				return attach(t, s)
			}
		}
		return nil
	}
}

func TestThreeServersSurviveTheStopOfAny(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, nil)
	x := newCaller(t, c.connect)
	last := uint64(0)
	for round := range 2 {
		for i := range c.servers {
			g := x.lock("x")
			if g.Token <= last {
				t.Fatalf("token %d after %d", g.Token, last)
			}
			last = g.Token
			c.stop(i)
			if again := x.must(acquireOf(nil, "x", g.RequestId, false)).GetAcquired().GetGrants(); len(again) != 1 ||
				again[0].Token != last {
				t.Fatalf("round %d, server %d stopped: the hold with token %d is %v now", round, i, last, again)
			}
			c.start(i)
			x.unlock(g)
		}
	}
}

func TestFollowersNameTheLeader(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	leader := c.leader()
	want := c.configs[leader].Listen
	for i, s := range c.servers {
		x := dial(t, c.configs[i].Listen)
		eventually(t, fmt.Sprintf("server %d knows all members", i), func() bool {
			w := x.call(&lockpb.Request{Call: &lockpb.Request_Hello{Hello: &lockpb.Hello{Client: "test"}}}).GetWelcome()
			return w.ClusterId != "" && w.Durable && w.Leader == (i == leader) && len(w.MemberAddresses) == 3 &&
				w.LeaderAddress == want && w.NodeId == s.replica.ID()
		})
		if i == leader {
			continue
		}
		r := x.call(acquireOf(sessionID(), "x", backend.NewRequestID(), false))
		if codeOf(r) != lockpb.Code_CODE_NOT_LEADER || r.GetError().LeaderAddress != want || r.Renewed {
			t.Errorf("server %d answers %v; want that %s leads", i, r, want)
		}
	}
}

// A leader that stops hands over at once: nobody has to notice first that it is gone.
func TestStoppedLeaderSaysGoodbye(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	leader := c.leader()
	x := dial(t, c.configs[leader].Listen)
	x.open(time.Minute)
	c.stop(leader)
	g := x.next().GetGoodbye()
	if g == nil || g.Code != lockpb.Code_CODE_NOT_LEADER && g.Code != lockpb.Code_CODE_UNAVAILABLE {
		t.Errorf("the leader said %v", g)
	}
}

// A server that lost its data comes back as another member in the same place.
func TestServerWithoutItsDataJoinsAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, nil)
	x := newCaller(t, c.connect)
	token := x.lock("x").Token
	lost := (c.leader() + 1) % 3
	c.stop(lost)
	c.configs[lost].DataDir = t.TempDir()
	c.start(lost)
	s := c.servers[lost]
	eventually(t, "the new member has a vote and the state", func() bool {
		leader := c.servers[c.leader()]
		if len(s.replica.Members()) != 3 || leader.replica.Voters() != 3 {
			return false
		}
		holders := s.replica.State.Machine.Holder("x").Holders
		return len(holders) == 1 && uint64(holders[0].Token) == token &&
			s.replica.State.Cluster() == leader.replica.State.Cluster()
	})
}

func TestNoClusterWithoutAllOfItsMembers(t *testing.T) {
	t.Parallel()
	addresses := freeport.Addresses(t, 3)
	var servers []*Server
	for i := range 2 {
		servers = append(servers, start(t, Config{PeerListen: addresses[i], Join: addresses, BootstrapExpect: 3}))
	}
	for _, s := range servers {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if err := s.WaitLeader(ctx); err == nil || len(s.replica.Members()) > 0 {
			t.Error("two of three made a cluster")
		}
		cancel()
	}
	start(t, Config{PeerListen: addresses[2], Join: addresses, BootstrapExpect: 3})
	for _, s := range servers {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := s.WaitLeader(ctx); err != nil {
			t.Error(err)
		}
	}
}

func TestForeignMemberIsTurnedAway(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 1, nil)
	other := newCluster(t, 1, nil)
	home := c.servers[0]
	eventually(t, "both have a name", func() bool {
		return home.replica.State.Cluster() != "" && other.servers[0].replica.State.Cluster() != ""
	})
	if a, err := askedToAdmit(t, home, other.servers[0]); err == nil {
		t.Errorf("a member of another cluster was answered: %v", a)
	}
}

func TestMemberMoves(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, nil)
	moved := (c.leader() + 1) % 3
	eventually(t, "its data names the others", func() bool { return c.servers[moved].replica.Voters() == 3 })
	c.stop(moved)
	c.configs[moved].PeerListen = freeport.Addresses(t, 1)[0]
	c.configs[moved].Join, c.configs[moved].BootstrapExpect = nil, 0 // it knows the others from its data
	c.start(moved)
	s := c.servers[moved]
	eventually(t, "all know where it is", func() bool {
		for _, other := range c.servers {
			known := slices.ContainsFunc(other.replica.Members(), func(m replica.Member) bool {
				return m.ID == s.replica.ID() && m.Address == s.PeerAddr() && m.Voter
			})
			if !known || other.replica.Voters() != 3 {
				return false
			}
		}
		return true
	})
}

// The session of a client that died ends, although the leader changes more often than its TTL.
func TestDeadSessionEndsAcrossLeaders(t *testing.T) {
	t.Parallel()
	testtier.NotShort(t)
	c := newCluster(t, 3, nil)
	eventually(t, "the level is raised", func() bool {
		return c.servers[c.leader()].replica.State.Machine.Level() == machine.MaxLevel
	})
	const ttl = 3 * time.Second
	var x *client
	eventually(t, "a client of the leader holds", func() bool { // on a busy machine another one may lead by now
		x = attach(t, c.servers[c.leader()])
		session := sessionID()
		if r, err := x.within(impatience, openOf(session, ttl)); err != nil || r.GetSession() == nil {
			return false
		}
		r, err := x.within(impatience, acquireOf(session, "x", backend.NewRequestID(), false))
		return err == nil && len(r.GetAcquired().GetGrants()) == 1
	})
	began, changes := time.Now(), 0
	for {
		leader := c.servers[c.leader()]
		if len(leader.replica.State.Machine.Holder("x").Holders) == 0 {
			break
		}
		// Before, it was given a full TTL by each leader.
		if held := time.Since(began); held > 10*ttl {
			t.Fatalf("after %v and %d changes of leader the lock of a client with a TTL of %v is held",
				held, changes, ttl)
		}
		next := time.After(ttl / 2)
		if leader.replica.HandOver(t.Context()) == nil {
			changes++
		}
		<-next
	}
	t.Logf("freed after %v and %d changes of leader, the TTL is %v", time.Since(began), changes, ttl)
}
