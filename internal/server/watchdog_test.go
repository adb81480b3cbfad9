package server

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"

	"github.com/fencelock/fencelock/backend"
)

func TestWatchdog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &watchdog{after: hangAfter}
		expect := func(what, part string) {
			t.Helper()
			if err := p.hangs(); (err != nil) != (part != "") || err != nil && !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v", what, err)
			}
		}
		time.Sleep(time.Hour)
		expect("nothing is written", "")
		p.launch()
		time.Sleep(hangAfter)
		p.launch()
		expect("an entry takes long", "")
		p.land(nil)
		time.Sleep(hangAfter)
		expect("the next one too", "")
		time.Sleep(time.Millisecond)
		expect("and longer", "on its way for 5.001s")
		p.land(errors.New("lost"))
		expect("it has landed", "")

		for range 3 {
			p.launch()
			p.land(raft.ErrLeadershipTransferInProgress)
			time.Sleep(hangAfter / 3)
		}
		expect("the leadership is handed over", "")
		p.answer(raft.ErrLeadershipTransferInProgress)
		time.Sleep(time.Second)
		expect("and nobody takes it", "handed over")
		p.answer(nil)
		expect("entries are taken again", "")
	})
}

// A leader whose state machine stands still sends heartbeats on and on, and is succeeded nevertheless.
func TestHungLeaderIsSucceeded(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, func(config *Config) { config.hangAfter = time.Second })
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
		_, leads := s.node.leadingTerm()
		return (!leads || s.Leads()) && !s.node.stores.watch.stalled()
	})
}

// A follower whose state machine stands still could serve nobody as leader, and is not elected.
func TestHungFollowerIsNotElected(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, func(config *Config) { config.hangAfter = time.Second })
	leader := c.leader()
	hung := (leader + 1) % 3
	s := c.servers[hung]
	s.news.mu.Lock() // whoever applies an entry rings
	goOn := unlockOnce(&s.news)
	defer goOn()
	newCaller(t, c.connect).lock("x")
	eventually(t, "it hangs", s.node.stores.watch.stalled)
	c.stop(leader)
	eventually(t, "the third one serves", func() bool { return c.servers[3-leader-hung].Leads() })
	newCaller(t, c.connect).lock("y")
	goOn()
	eventually(t, "it is silent no more", func() bool { return !s.node.stores.watch.stalled() })
}

func unlockOnce(b *notifier) func() { return sync.OnceFunc(b.mu.Unlock) }
