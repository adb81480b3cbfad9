package server

import (
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/freeport"
)

// operator is the administration of one server.
type operator struct {
	lockpb.AdminServiceClient
	t *testing.T
}

// operate reaches a server where it takes changes.
func operate(t *testing.T, at string) operator {
	return operator{lockpb.NewAdminServiceClient(grpcTo(t, at, insecure.NewCredentials())), t}
}

// operateOnce calls do with an operator that disconnects at its end. A loop needs it: a listener takes few operators.
func operateOnce(t *testing.T, at string, do func(operator)) {
	t.Helper()
	conn, err := grpc.NewClient(at, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	do(operator{lockpb.NewAdminServiceClient(conn), t})
}

func (o operator) members() []*lockpb.Member {
	o.t.Helper()
	list, err := o.ListMembers(o.t.Context(), &lockpb.ListMembersRequest{})
	if err != nil {
		o.t.Fatal(err)
	}
	return list.Members
}

func (o operator) add(address string) (*lockpb.Member, error) {
	return o.AddMember(o.t.Context(), &lockpb.AddMemberRequest{PeerAddress: address})
}

func (o operator) remove(s *Server) error {
	_, err := o.RemoveMember(o.t.Context(), &lockpb.RemoveMemberRequest{NodeId: s.replica.ID()})
	return err
}

func expectCode(t *testing.T, err error, want codes.Code, part string) {
	t.Helper()
	if status.Code(err) != want || !strings.Contains(status.Convert(err).Message(), part) {
		t.Errorf("error %v; want code %v and %q", err, want, part)
	}
}

func TestStatusOfEveryMember(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, func(c *Config) {
		calm(c)
		c.Version = "1.2.3"
	})
	leader := c.leader()
	for i, s := range c.servers {
		var got *lockpb.MemberStatus
		o := operate(t, c.configs[i].adminListen())
		eventually(t, "the member knows all", func() (ok bool) {
			var err error
			got, err = o.Status(t.Context(), &lockpb.StatusRequest{})
			return err == nil && got.LeaderId != "" && got.ClusterId != "" && len(got.Members) == 3 &&
				got.Members[i].ClientAddress != "" &&
				got.Leader == (i == leader) // it stops serving for a moment when it raises the level
		})
		if got.NodeId != s.replica.ID() || got.LeaderId != c.servers[leader].replica.ID() || !got.Durable || got.ServerVersion != "1.2.3" || got.Term == 0 ||
			got.CommitIndex == 0 || got.AppliedIndex > got.LastIndex {
			t.Errorf("server %d: %v", i, got)
		}
	}
}

func TestListMembersReportsWhichAnswer(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	leader := c.leader()
	away := (leader + 1) % 3
	o := operate(t, c.configs[leader].adminListen())
	eventually(t, "all are alive", func() bool {
		alive := 0
		for _, m := range o.members() {
			if m.Alive && m.Voter && m.PeerAddress != "" {
				alive++
			}
		}
		return alive == 3
	})
	gone := c.servers[away].replica.ID()
	c.stop(away)
	eventually(t, "all but the stopped member are alive", func() bool {
		for _, m := range o.members() {
			if m.Alive != (m.NodeId != gone) {
				return false
			}
		}
		return true
	})
	c.expectKnown(leader, (leader+2)%3)
	_, err := operate(t, c.configs[(leader+2)%3].adminListen()).ListMembers(t.Context(), &lockpb.ListMembersRequest{})
	expectCode(t, err, codes.Unavailable, c.configs[leader].Listen)
}

func TestAddMember(t *testing.T) {
	t.Parallel()
	addresses := freeport.Addresses(t, 2)
	calmly := func(c Config) Config { calm(&c); return c }
	first := alone(t, calmly(Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", PeerListen: addresses[0]}))
	o := operate(t, first.AdminAddr())
	x := attach(t, first)
	x.hold(x.open(longTTL), "x")

	// A server that knows only itself waits until an operator adds it.
	second := start(t,
		calmly(Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", PeerListen: addresses[1], Join: addresses[1:]}))
	for range 2 { // the second add changes nothing
		m, err := o.add(addresses[1])
		if err != nil || m.NodeId != second.replica.ID() || m.PeerAddress != addresses[1] {
			t.Fatalf("added: %v, %v", m, err)
		}
	}
	eventually(t, "it has caught up and votes", func() bool {
		all := o.members()
		return len(all) == 2 && all[0].Voter && all[1].Voter && all[1].Alive && all[1].ClientAddress != ""
	})
	eventually(t, "it has the data", func() bool { return len(second.replica.State.Machine.Holder("x").Holders) == 1 })

	other := alone(t, Config{DataDir: t.TempDir(), PeerListen: "127.0.0.1:0"})
	eventually(t, "the other cluster has its name", func() bool { return other.replica.State.Cluster() != "" })
	for address, want := range map[string]codes.Code{
		"no address": codes.InvalidArgument, "127.0.0.1:1": codes.FailedPrecondition,
		other.PeerAddr(): codes.FailedPrecondition,
	} {
		_, err := o.add(address)
		expectCode(t, err, want, address)
	}
	_, err := operate(t, second.AdminAddr()).add(addresses[1])
	expectCode(t, err, codes.Unavailable, first.Addr().String())
	_, err = operate(t, alone(t, Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0"}).AdminAddr()).add(addresses[1])
	expectCode(t, err, codes.FailedPrecondition, "--peer-listen")
}

// longTTL outlasts every test.
const longTTL = 2 * patience

func TestRemoveMember(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, calm)
	leader := c.leader()
	dead, alive := c.servers[(leader+1)%3], c.servers[(leader+2)%3]
	o := operate(t, c.configs[leader].adminListen())
	_, err := o.RemoveMember(t.Context(), &lockpb.RemoveMemberRequest{NodeId: "nobody"})
	expectCode(t, err, codes.NotFound, "nobody")
	c.expectKnown(leader, (leader+2)%3)
	expectCode(t, operate(t, c.configs[(leader+2)%3].adminListen()).remove(dead), codes.Unavailable, c.configs[leader].Listen)

	c.stop((leader + 1) % 3)
	eventually(t, "there is a leader", func() bool { // the old one may have missed its majority for a moment
		if now := c.leader(); now != leader {
			alive, leader, o = c.servers[leader], now, operate(t, c.configs[now].adminListen())
		}
		err = o.remove(alive)
		return status.Code(err) != codes.Unavailable
	})
	expectCode(t, err, codes.FailedPrecondition, "too few")
	if err := o.remove(dead); err != nil {
		t.Fatal(err)
	}
	expectCode(t, o.remove(dead), codes.NotFound, dead.replica.ID())
	if all := o.members(); len(all) != 2 {
		t.Errorf("members: %v", all)
	}

	// The leader goes: it hands over first.
	expectCode(t, o.remove(c.servers[leader]), codes.Unavailable, "handed")
	eventually(t, "the other one leads", func() bool {
		_ = o.remove(c.servers[leader]) // a busy machine may have refused to hand over
		return alive.Leads()
	})
	o = operate(t, alive.AdminAddr())
	eventually(t, "the former leader is removed", func() bool {
		err := o.remove(c.servers[leader])
		return err == nil || status.Code(err) == codes.NotFound
	})
	expectCode(t, o.remove(alive), codes.FailedPrecondition, "last member")

	x := attach(t, alive)
	if r := x.call(acquireOf(
		x.open(longTTL), "x", backend.NewRequestID(), false,
	)); len(r.GetAcquired().GetGrants()) != 1 {
		t.Errorf("the last member does not serve: %v", r)
	}
}
