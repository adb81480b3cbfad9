package server

import (
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

func (o operator) maintenance(on bool) error {
	_, err := o.SetMaintenance(o.t.Context(), &lockpb.SetMaintenanceRequest{On: on})
	return err
}

// A member in maintenance hands over, and does not lead while another one can.
func TestMaintenance(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	away := c.leader()
	x := newCaller(t, c.connect)
	g := x.lock("x")
	o := operate(t, c.configs[away].Listen)
	if err := o.maintenance(true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another member leads", func() bool { leader := c.leader(); return leader != away })
	if status, err := o.Status(t.Context(), &lockpb.StatusRequest{}); err != nil || !status.Maintenance {
		t.Errorf("status: %v, %v", status, err)
	}
	next := c.leader()
	_, err := operate(t, c.configs[next].Listen).TransferLeadership(t.Context(),
		&lockpb.TransferLeadershipRequest{NodeId: c.servers[away].replica.ID()})
	expectCode(t, err, codes.FailedPrecondition, "is in maintenance")

	// The leader stops: the third one leads, not the one in maintenance.
	third := 3 - away - next
	c.stop(next)
	eventually(t, "the third leads", c.servers[third].Leads)
	if again := x.must(acquireOf(nil, "x", g.RequestId, false)).GetAcquired().GetGrants(); len(again) != 1 ||
		again[0].Token != g.Token {
		t.Errorf("the hold with token %d is %v now", g.Token, again)
	}
	// Nobody is left to take over from that one.
	err = operate(t, c.configs[third].Listen).maintenance(true)
	expectCode(t, err, codes.FailedPrecondition, "except 1 in maintenance")
	if c.servers[third].replica.InMaintenance() {
		t.Error("it was refused, and is in maintenance")
	}
	// Off again, it leads like any other.
	if err := o.maintenance(false); err != nil {
		t.Fatal(err)
	}
	if err := operate(t, c.configs[third].Listen).maintenance(true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the one that was in maintenance leads", c.servers[away].Leads)
}

// Without it nobody would be served: a member in maintenance leads where no other one can, and hands that over once one
// can.
func TestMaintenanceLeadsIfNobodyElseCan(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	leader := c.leader()
	away, behind := (leader+1)%3, (leader+2)%3
	if err := operate(t, c.configs[away].Listen).maintenance(true); err != nil {
		t.Fatal(err)
	}
	c.stop(behind)
	x := newCaller(t, c.connect)
	g := x.lock("x") // which the one that is stopped does not know
	c.stop(leader)
	c.start(behind)
	// It cannot be elected before the one in maintenance has led, and given it the hold.
	eventually(t, "the other leads", c.servers[behind].Leads)
	if again := x.must(acquireOf(nil, "x", g.RequestId, false)).GetAcquired().GetGrants(); len(again) != 1 ||
		again[0].Token != g.Token {
		t.Errorf("the hold with token %d is %v now", g.Token, again)
	}
}

// What is looked at in any member, without a majority, is marked.
func TestLookStale(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	leader := c.leader()
	left := (leader + 1) % 3
	x := newCaller(t, c.connect)
	g := x.lock("x/1")
	x.lock("x/2")
	x.lock("y")
	eventually(t, "all members have it", func() bool {
		return len(c.servers[left].replica.State.Machine.Holder("y").Holders) == 1
	})
	c.stop(leader)
	c.stop((leader + 2) % 3)
	// The first one that stopped may have handed the leadership over to it.
	eventually(t, "it leads no more", func() bool { return c.servers[left].leadership.Load() == nil })
	o := operate(t, c.configs[left].Listen)
	one, err := o.LookStale(t.Context(), &lockpb.LookStaleRequest{Name: "x/1"})
	if err != nil || len(one.Names) != 1 || len(one.Names[0].Holders) != 1 ||
		one.Names[0].Holders[0].Token != g.Token || one.NodeId != c.servers[left].replica.ID() || one.HeardNanos <= 0 ||
		!one.Durable {
		t.Fatalf("one name: %v, %v", one, err)
	}
	var names []string
	for after := ""; ; {
		page, err := o.LookStale(t.Context(),
			&lockpb.LookStaleRequest{Name: "x/", Prefix: true, After: after, Limit: 1})
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range page.Names {
			names = append(names, n.Name)
		}
		if after = page.NextAfter; after == "" {
			break
		}
	}
	if len(names) != 2 || names[0] != "x/1" || names[1] != "x/2" {
		t.Errorf("names: %q", names)
	}
}
