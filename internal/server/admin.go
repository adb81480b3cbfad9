package server

import (
	"context"
	"errors"
	"net"
	"slices"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// admin is the service for operators.
type admin struct {
	lockpb.UnimplementedAdminServiceServer
	server  *Server
	looking chan struct{} // holds one while a stale look is answered: no more of the machine's time than that
}

// Status implements lockpb.AdminServiceServer.
func (a *admin) Status(context.Context, *lockpb.StatusRequest) (*lockpb.MemberStatus, error) {
	s := a.server
	r := s.node.raft
	_, leader := r.LeaderWithID()
	agreed, differs := s.node.fsm.comparison.result()
	return &lockpb.MemberStatus{
		NodeId: string(s.node.id), ClusterId: s.node.fsm.cluster(), ServerVersion: s.config.Version,
		Durable: s.config.Store != StoreMemory, Leader: s.Leads(), LeaderId: string(leader),
		Term: r.CurrentTerm(), LastIndex: r.LastIndex(), CommitIndex: r.CommitIndex(), AppliedIndex: s.applied(), AgreedIndex: agreed, DiffersIndex: differs,
		Maintenance: s.inMaintenance(), Members: s.membersOut(nil),
	}, nil
}

// ListMembers implements lockpb.AdminServiceServer.
func (a *admin) ListMembers(ctx context.Context, _ *lockpb.ListMembersRequest) (*lockpb.MemberList, error) {
	alive, err := a.server.alive(ctx)
	if err != nil {
		return nil, err
	}
	return &lockpb.MemberList{Members: a.server.membersOut(alive)}, nil
}

// AddMember implements lockpb.AdminServiceServer.
func (a *admin) AddMember(ctx context.Context, q *lockpb.AddMemberRequest) (*lockpb.Member, error) {
	s := a.server
	if _, _, err := net.SplitHostPort(q.PeerAddress); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "peer address %q: %v", q.PeerAddress, err)
	}
	r := s.leadership.Load()
	switch {
	case r == nil:
		return nil, s.notLeading()
	case s.peers == nil:
		return nil, status.Error(codes.FailedPrecondition, "this server has no address for other members, see --peer-listen")
	}
	other, err := s.peers.ask(ctx, q.PeerAddress, question{})
	if err != nil {
		return nil, status.Errorf(codes.FailedPrecondition,
			"nobody who could join answers at %s, or it belongs to another cluster: %v", q.PeerAddress, err)
	}
	switch err := s.admit(r, other.member, true); {
	case errors.Is(err, errNotFresh):
		return nil, status.Errorf(codes.FailedPrecondition, "the server at %s: %v", q.PeerAddress, err)
	case err != nil:
		return nil, changeError(err)
	}
	for _, m := range s.membersOut(nil) {
		if m.NodeId == string(other.ID) {
			return m, nil
		}
	}
	return nil, status.Errorf(codes.Unknown, "the server at %s was added, and is not a member any more", q.PeerAddress)
}

// RemoveMember implements lockpb.AdminServiceServer.
func (a *admin) RemoveMember(ctx context.Context, q *lockpb.RemoveMemberRequest) (*lockpb.RemoveMemberReply, error) {
	s := a.server
	if !s.Leads() {
		return nil, s.notLeading()
	}
	configuration := s.node.raft.GetConfiguration()
	if err := s.node.await(configuration); err != nil {
		return nil, changeError(err)
	}
	if !slices.ContainsFunc(configuration.Configuration().Servers, func(m raft.Server) bool { return string(m.ID) == q.NodeId }) {
		return nil, status.Errorf(codes.NotFound, "there is no member %q", q.NodeId)
	}
	alive, err := s.alive(ctx)
	if err != nil {
		return nil, err
	}
	if err := checkQuorumWithout(configuration.Configuration().Servers, raft.ServerID(q.NodeId), alive); err != nil {
		return nil, err
	}
	if q.NodeId == string(s.node.id) {
		if err := s.node.await(s.node.raft.LeadershipTransfer()); err != nil {
			return nil, status.Errorf(codes.Unavailable, "no other member takes over the leadership: %v", err)
		}
		return nil, status.Error(codes.Unavailable, "this member led and has handed that over: ask the next leader")
	}
	// The index says that the members have not changed since they were counted.
	change := s.node.raft.RemoveServer(raft.ServerID(q.NodeId), configuration.Index(), memberTimeout)
	if err := s.node.await(change); err != nil {
		return nil, changeError(err)
	}
	return &lockpb.RemoveMemberReply{}, nil
}

// TransferLeadership implements lockpb.AdminServiceServer.
func (a *admin) TransferLeadership(
	ctx context.Context, q *lockpb.TransferLeadershipRequest,
) (*lockpb.TransferLeadershipReply, error) {
	s := a.server
	if !s.Leads() {
		return nil, s.notLeading()
	}
	if q.NodeId == string(s.node.id) {
		return &lockpb.TransferLeadershipReply{}, nil
	}
	to, err := s.successor(ctx, raft.ServerID(q.NodeId))
	if err != nil {
		return nil, err
	}
	if err := s.node.await(s.node.raft.LeadershipTransferToServer(to.ID, to.Address)); err != nil {
		return nil, status.Errorf(codes.Unavailable, "no other member takes over the leadership: %v", err)
	}
	return &lockpb.TransferLeadershipReply{}, nil
}

// checkQuorumWithout refuses to leave a cluster that could not go on: most of the voters that remain must be there.
func checkQuorumWithout(servers []raft.Server, id raft.ServerID, alive map[raft.ServerID]bool) error {
	voters, there := 0, 0
	for _, m := range servers {
		if m.ID == id || m.Suffrage != raft.Voter {
			continue
		}
		voters++
		if alive[m.ID] {
			there++
		}
	}
	switch {
	case voters == 0:
		return status.Errorf(codes.FailedPrecondition, "%s is the last member with a vote", id)
	case there <= voters/2:
		return status.Errorf(codes.FailedPrecondition,
			"without %s there are %d members with a vote, of which %d answer: too few for a majority", id, voters, there)
	}
	return nil
}

// aliveEvery is how often alive looks, and aliveTimes how many election timeouts it gives the members to answer.
const (
	aliveEvery = 10 * time.Millisecond
	aliveTimes = 2
)

// alive asks which members follow this one, which leads: those that acknowledge something that was sent after the call.
// Heartbeats come often enough for that.
func (s *Server) alive(ctx context.Context) (map[raft.ServerID]bool, error) {
	r := s.leadership.Load()
	if r == nil {
		return nil, s.notLeading()
	}
	ctx, cancel := context.WithTimeout(ctx, aliveTimes*s.config.Timing.withDefaults().Heartbeat)
	defer cancel()
	mark := s.node.proof.mark()
	tick := time.NewTicker(aliveEvery)
	defer tick.Stop()
	for {
		alive := map[raft.ServerID]bool{s.node.id: true}
		servers := s.node.servers()
		for _, m := range servers {
			if s.node.proof.heardOf(m.ID, r.term, mark) {
				alive[m.ID] = true
			}
		}
		if s.leadership.Load() != r {
			return nil, s.notLeading()
		}
		if len(alive) >= len(servers) {
			return alive, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return alive, nil
		}
	}
}

// membersOut is the configuration in the words of the wire.
func (s *Server) membersOut(alive map[raft.ServerID]bool) []*lockpb.Member {
	var all []*lockpb.Member
	for _, m := range s.node.servers() {
		client, _ := s.node.fsm.client(m.ID)
		all = append(all, &lockpb.Member{
			NodeId: string(m.ID), PeerAddress: string(m.Address), ClientAddress: client,
			Voter: m.Suffrage == raft.Voter, Waits: s.waits(m.ID), Alive: alive[m.ID],
		})
	}
	return all
}

func (s *Server) notLeading() error {
	if address := s.leaderAddress(); address != "" {
		return status.Errorf(codes.Unavailable, "this member does not lead; clients find the leader at %s", address)
	}
	return status.Error(codes.Unavailable, "this member does not lead, and knows nobody who does")
}

// changeError is why the members could not be changed.
func changeError(err error) error {
	if errors.Is(err, raft.ErrLeadershipLost) || errors.Is(err, raft.ErrRaftShutdown) {
		return status.Errorf(codes.Unknown, "the change may take effect or not: %v", err)
	}
	return status.Errorf(codes.Unavailable, "nothing was changed: %v", err)
}
