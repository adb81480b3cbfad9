//go:build unix

package main

import (
	"sync"
	"testing"
)

func TestMaintenance(t *testing.T) {
	t.Parallel()
	url, _, all := startMembers(t)
	leader := all[0]
	for _, m := range all {
		if m.Role == roleLeader {
			leader = m
		}
	}
	start(t, "maintenance", "on", "--backend", url).expectExit(exitUsage, "name one")
	start(t, "maintenance", "on", "--backend", url, "--node", "nobody").
		expectExit(exitRefused, "no member that answers knows it")
	start(t, "maintenance", "perhaps", "--backend", url).expectExit(exitUsage, "want on or off")
	// On its machine nobody needs to know its id.
	own := "fencelock://" + leader.Address
	succeed(t, "maintenance", "on", "--backend", own)
	now := objects[member](t, succeed(t, "status", "--backend", own, "--json"))[0]
	if now.NodeID != leader.NodeID || !now.Maintenance || now.Role != roleFollower {
		t.Errorf("once it is in maintenance: %+v", now)
	}
	start(t, "transfer", "--backend", url, "--to", leader.NodeID).expectExit(exitRefused, "is in maintenance")
	succeed(t, "maintenance", "off", "--backend", url, "--node", leader.NodeID)
	succeed(t, "transfer", "--backend", url, "--to", leader.NodeID)
	start(t, "maintenance", "on", "--backend", startServer(t)).expectExit(exitRefused, "no other member with a vote")
}

// Without a majority, a member still reports its state, and says that it may be old.
func TestStale(t *testing.T) {
	t.Parallel()
	url, members, all := startMembers(t)
	for _, name := range []string{"orders/1", "orders/2"} {
		succeed(t, "acquire", name, "--ttl", "1h", "--owner", "pod-1", "--backend", url)
	}
	left := ""
	for _, m := range all {
		if m.Role == roleFollower {
			left = "fencelock://" + m.Address
		}
	}
	eventually(t, "the member that is left knows both", func() bool {
		return len(objects[lock](t, succeed(t, "ls", "--stale", "--backend", left, "--json"))) == 2
	})
	var closing sync.WaitGroup
	for address, s := range members {
		if "fencelock://"+address != left {
			closing.Go(func() { _ = s.Close(t.Context()) }) // the test asks only the remaining member
		}
	}
	closing.Wait() // a closing leader may have transferred the leadership to the remaining member
	eventually(t, "nobody leads", func() bool {
		p := start(t, "status", "--backend", left, "--json")
		return objects[member](t, p.output())[0].Role == roleLeaderless
	})
	p := start(t, "ls", "--stale", "--backend", left)
	p.expectExit(exitOK,
		"stale: this is the state of the member at "+left[len("fencelock://"):]+
			", which may be long out of date; its last contact with a leader was")
	one := objects[lock](t, succeed(t, "holder", "orders/1", "--stale", "--backend", left, "--json"))
	if len(one) != 1 || !one[0].Locked || one[0].Holders[0].OwnerID != "pod-1" || one[0].Holders[0].FencingToken == 0 ||
		one[0].Stale == nil || one[0].Stale.HeardMillis == nil {
		t.Errorf("one name: %+v", one)
	}
	start(t, "holder", "nothing", "--stale", "--backend", left).expectExit(exitNobody, "is not held")
	start(t, "holder", "orders/1", "--stale", "--backend", "memory://").expectExit(exitUsage, "")
}
