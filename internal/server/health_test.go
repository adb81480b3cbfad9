package server

import (
	"testing"
	"time"
)

// The leader exports whether the cluster is well, and how many voters are behind.
func TestHealthMetric(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, func(c *Config) { calm(c); c.healthEvery = 50 * time.Millisecond })
	leader := c.leader()
	eventually(t, "all is well", func() bool { return c.servers[leader].Measure().Well })
	follower := (leader + 1) % 3
	if c.servers[follower].Measure().Well {
		t.Error("a follower says so too")
	}
	c.stop(follower)
	eventually(t, "the leader misses the member", func() bool {
		is := c.servers[leader].Measure()
		return !is.Well && is.VotersBehind == 1
	})
	c.start(follower)
	eventually(t, "all is well again", func() bool { return c.servers[leader].Measure().Well })
}
