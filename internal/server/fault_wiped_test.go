package server

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
)

// listening counts the records of a log that contain a text.
type listening struct {
	slog.Handler
	text string
	seen *atomic.Int64
}

func (h listening) Enabled(context.Context, slog.Level) bool { return true }

func (h listening) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, h.text) {
		h.seen.Add(1)
	}
	return nil
}

func (h listening) WithAttrs([]slog.Attr) slog.Handler { return h }

// A member that lost its data is a different member, although it answers at the same address: it has forgotten what
// it acknowledged, and must not vote for a candidate without those entries. Here one of three members has the entry
// of a lock and is away, one had it and lost it, and one never had it. The last two are a majority of addresses. They
// must not lead without the first.
func TestMemberWithoutItsDataDoesNotVote(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, nil)
	x := newCaller(t, c.connect)
	x.lock("before") // so that all have agreed on something
	leader := c.leader()
	wiped, behind := (leader+1)%3, (leader+2)%3
	c.stop(behind)
	g := x.lock("x")
	c.stop(wiped)
	c.stop(leader)

	var turnedAway atomic.Int64
	c.configs[wiped].DataDir = t.TempDir()
	c.configs[wiped].Log = slog.New(listening{slog.DiscardHandler, "a member was refused", &turnedAway})
	c.start(wiped)
	c.start(behind)
	eventually(t, "the one behind stands, and is refused or leads", func() bool {
		return turnedAway.Load() >= 3 || c.servers[behind].Leads() || c.servers[wiped].Leads()
	})
	if c.servers[behind].Leads() || c.servers[wiped].Leads() {
		t.Error("one leads that does not have what was acknowledged")
	}
	c.start(leader)
	eventually(t, "the member that has it leads", func() bool { return c.servers[leader].Leads() })
	if again := x.must(acquireOf(nil, "x", g.RequestId, false)).GetAcquired().GetGrants(); len(again) != 1 ||
		again[0].Token != g.Token {
		t.Errorf("the hold with token %d is %v now", g.Token, again)
	}
	eventually(t, "the server that lost its data is a member again", func() bool {
		return c.servers[wiped].replica.Voters() == 3
	})
}

// The cluster admits the fresh member although the leader keeps sending it the log of its predecessor.
func TestMemberWithoutItsDataIsTakenIn(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, nil)
	x := newCaller(t, c.connect)
	for range 5 {
		x.unlock(x.lock("x"))
		wiped := (c.leader() + 1) % 3
		c.stop(wiped)
		c.configs[wiped].DataDir = t.TempDir()
		c.start(wiped)
		s := c.servers[wiped]
		eventually(t, "it has a vote, under its new name", func() bool {
			return s.replica.Voters() == 3 && c.servers[c.leader()].replica.Voters() == 3 &&
				s.replica.Applied() > 0
		})
	}
}
