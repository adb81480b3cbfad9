package server

import (
	"slices"
	"testing"

	"github.com/fencelock/fencelock/internal/freeport"
	"github.com/fencelock/fencelock/internal/race"
	"github.com/fencelock/fencelock/internal/server/replica"
	"github.com/fencelock/fencelock/internal/testtier"
)

// Two or all of three members come back at other addresses, for peers and clients alike. With the key they find each
// other, elect a leader and keep all holds.
func TestMostMembersMove(t *testing.T) {
	t.Parallel()
	if race.Enabled {
		t.Skip(testtier.Mark + "raft reads the address of a member without its lock (replication.go, updateLastAppended)")
	}
	for what, n := range map[string]int{"two of three": 2, "all": 3} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, 3, nil)
			x := newCaller(t, c.connect)
			g := x.lock("x")
			for _, s := range c.servers {
				eventually(t, "it knows all members", func() bool { return s.replica.Voters() == 3 })
			}
			for i := range c.servers {
				c.stop(i)
			}
			addresses := freeport.Addresses(t, 2*n)
			for i := range n {
				c.configs[i].PeerListen, c.configs[i].Listen = addresses[i], addresses[n+i]
			}
			join := []string{c.configs[0].PeerListen, c.configs[1].PeerListen, c.configs[2].PeerListen}
			for i := range c.servers {
				c.configs[i].Join = join
				c.start(i)
			}
			if again := x.must(acquireOf(nil, "x", g.RequestId, false)).GetAcquired().GetGrants(); len(again) != 1 ||
				again[0].Token != g.Token {
				t.Errorf("the hold with token %d is %v now", g.Token, again)
			}
			eventually(t, "all know where all are", func() bool {
				for _, s := range c.servers {
					for i, other := range c.servers {
						if !slices.ContainsFunc(s.replica.Members(), func(m replica.Member) bool {
							return m.ID == other.replica.ID() && m.Address == c.configs[i].PeerListen && m.Voter &&
								m.Client == c.configs[i].Listen
						}) {
							return false
						}
					}
				}
				return true
			})
		})
	}
}
