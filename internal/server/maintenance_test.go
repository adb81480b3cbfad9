package server

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

func (o operator) maintenance(on bool) error {
	_, err := o.SetMaintenance(o.t.Context(), &lockpb.SetMaintenanceRequest{On: on})
	return err
}

// awaitRefusal waits until a call is refused for a reason. On a busy machine the leader may have no answer of another
// member in time, and names that instead.
func awaitRefusal(t *testing.T, reason string, call func() error) {
	t.Helper()
	eventually(t, "it is refused: "+reason, func() bool {
		err := call()
		return status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), reason)
	})
}

// A member in maintenance hands over, and does not lead while another one can.
func TestMaintenance(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	away := c.leader()
	x := newCaller(t, c.connect)
	g := x.lock("x")
	o := operate(t, c.configs[away].adminListen())
	if err := o.maintenance(true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another member leads", func() bool { leader := c.leader(); return leader != away })
	if status, err := o.Status(t.Context(), &lockpb.StatusRequest{}); err != nil || !status.Maintenance {
		t.Errorf("status: %v, %v", status, err)
	}
	next := c.leader()
	transfer := &lockpb.TransferLeadershipRequest{NodeId: c.servers[away].replica.ID()}
	successor := operate(t, c.configs[next].adminListen())
	awaitRefusal(t, "is in maintenance", func() error {
		_, err := successor.TransferLeadership(t.Context(), transfer)
		return err
	})

	// The leader stops: the third one leads, not the one in maintenance.
	third := 3 - away - next
	c.stop(next)
	eventually(t, "the third leads", c.servers[third].Leads)
	if again := x.must(acquireOf(nil, "x", g.RequestId, false)).GetAcquired().GetGrants(); len(again) != 1 ||
		again[0].Token != g.Token {
		t.Errorf("the hold with token %d is %v now", g.Token, again)
	}
	// Nobody is left to take over from that one.
	last := operate(t, c.configs[third].adminListen())
	awaitRefusal(t, "except 1 in maintenance", func() error { return last.maintenance(true) })
	if c.servers[third].replica.InMaintenance() {
		t.Error("it was refused, and is in maintenance")
	}
	// Out of maintenance, the member leads like any other.
	if err := o.maintenance(false); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the third is in maintenance", func() bool { return last.maintenance(true) == nil })
	eventually(t, "the member that was in maintenance leads", c.servers[away].Leads)
}

// Without it nobody would be served: a member in maintenance leads where no other one can, and hands that over once one
// can.
func TestMaintenanceLeadsWithoutOtherCandidates(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	leader := c.leader()
	away, behind := (leader+1)%3, (leader+2)%3
	if err := operate(t, c.configs[away].adminListen()).maintenance(true); err != nil {
		t.Fatal(err)
	}
	c.stop(behind)
	x := newCaller(t, c.connect)
	g := x.lock("x") // the stopped member does not know it
	c.stop(leader)
	c.start(behind)
	// It cannot win an election before the member in maintenance has led, and sent it the hold.
	eventually(t, "the other leads", c.servers[behind].Leads)
	if again := x.must(acquireOf(nil, "x", g.RequestId, false)).GetAcquired().GetGrants(); len(again) != 1 ||
		again[0].Token != g.Token {
		t.Errorf("the hold with token %d is %v now", g.Token, again)
	}
}

// Any member answers LookStale without a majority, and marks the answer.
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
	// The first member that stopped may have transferred the leadership to it.
	eventually(t, "it leads no more", func() bool { return c.servers[left].leadership.Load() == nil })
	o := operate(t, c.configs[left].adminListen())
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
