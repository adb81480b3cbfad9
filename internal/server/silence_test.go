package server

import (
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// A leader with a blocked state machine keeps sending heartbeats, but another member replaces it.
func TestHungLeaderIsSucceeded(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, func(config *Config) { calm(config); config.hangAfter = time.Second })
	leader := c.leader()
	s := c.servers[leader]
	x := dial(t, c.configs[leader].Listen)
	session := x.open(longTTL)
	s.news.mu.Lock() // whoever applies an entry rings
	goOn := unlockOnce(&s.news)
	defer goOn()
	x.send(acquireOf(session, "x", backend.NewRequestID(), false))
	if g := x.next().GetGoodbye(); g == nil {
		t.Errorf("it said %v", g)
	}
	eventually(t, "another serves", func() bool {
		for i, other := range c.servers {
			if i != leader && other.Leads() {
				return true
			}
		}
		return false
	})
	if s.Leads() {
		t.Error("it serves")
	}
	goOn()
	newCaller(t, c.connect).lock("y")
	eventually(t, "it follows, and is silent no more", func() bool {
		_, leads := s.replica.LeadingTerm()
		return (!leads || s.Leads()) && s.replica.Silent() == nil
	})
}

// A follower with a blocked state machine could serve nobody as leader, and is not elected.
func TestHungFollowerIsNotElected(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, func(config *Config) { calm(config); config.hangAfter = time.Second })
	leader := c.leader()
	hung := (leader + 1) % 3
	s := c.servers[hung]
	s.news.mu.Lock() // whoever applies an entry rings
	goOn := unlockOnce(&s.news)
	defer goOn()
	newCaller(t, c.connect).lock("x")
	eventually(t, "it hangs", func() bool { return s.replica.Silent() != nil })
	c.stop(leader)
	eventually(t, "the third one serves", func() bool { return c.servers[3-leader-hung].Leads() })
	newCaller(t, c.connect).lock("y")
	goOn()
	eventually(t, "it is silent no more", func() bool { return s.replica.Silent() == nil })
}

func unlockOnce(b *notifier) func() { return sync.OnceFunc(b.mu.Unlock) }
