package server

import (
	"errors"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// A copy of a member starts with the third member, cut off from the original and the leader: no member there knows
// better, and both sides have a majority. Once the network is whole, the conflict is loud: a member stops and says
// why, instead of dropping entries that it had acknowledged.
func TestCopyBeyondAPartitionIsLoud(t *testing.T) {
	t.Parallel()
	rounds(t, 1, 20, copyBeyond)
}

func copyBeyond(t *testing.T, _ int) {
	beyond := &island{}
	c := newCluster(t, 3, func(c *Config) { c.PeerDial = beyond.from(c.PeerListen) })
	x := newCaller(t, c.connect)
	x.unlock(x.lock("before"))
	leader := c.leader()
	original, third := (leader+1)%3, (leader+2)%3
	c.stop(third)
	eventually(t, "the original has all", func() bool {
		return c.servers[original].replica.Applied() >= c.servers[leader].replica.Status().CommitIndex
	})
	copied, addresses := c.configs[original], freeport.Addresses(t, 2)
	copied.DataDir, copied.Moved = copyAtRest(t, c.configs[original].DataDir), true
	copied.Listen, copied.PeerListen, copied.BootstrapExpect = addresses[0], addresses[1], 0
	copied.PeerDial = beyond.from(copied.PeerListen)
	for range 5 {
		x.unlock(x.lock("x"))
	}
	beyond.cutOff(c.configs[third].PeerListen, copied.PeerListen)
	twin := start(t, copied)
	c.start(third)
	eventually(t, "both sides lead", func() bool {
		return (twin.Leads() || c.servers[third].Leads()) && (c.servers[leader].Leads() || c.servers[original].Leads())
	})
	side := twin
	if c.servers[third].Leads() {
		side = c.servers[third]
	}
	y := attach(t, side)
	y.hold(y.open(longTTL), "y")

	beyond.heal()
	all := []*Server{c.servers[leader], c.servers[original], c.servers[third], twin}
	loud := func() (told bool) {
		for _, s := range all {
			var damage *replica.CorruptError
			var running *replica.RunningError
			var replaced *replica.ReplacedError
			told = told || errors.As(s.Err(), &damage) || errors.As(s.Err(), &running) || errors.As(s.Err(), &replaced)
		}
		return told
	}
	eventually(t, "a member says so", loud)
	for i, s := range c.servers {
		if s.Err() != nil {
			_ = s.Close(t.Context())
			c.servers[i] = nil
		}
	}
}
