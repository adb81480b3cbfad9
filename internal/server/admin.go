package server

// The service for operators: status, members, leadership and maintenance. Every member answers Status, SetMaintenance
// and LookStale (stale.go) for itself, and Backup while there is a leader; only the leader answers the other calls.

import (
	"context"
	"errors"
	"net"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/generation"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// admin is the service for operators.
type admin struct {
	lockpb.UnimplementedAdminServiceServer
	server  *Server
	looking chan struct{} // holds one while a stale look is answered: that bounds its processor time
}

// Status implements lockpb.AdminServiceServer.
func (a *admin) Status(context.Context, *lockpb.StatusRequest) (*lockpb.MemberStatus, error) {
	s := a.server
	leader, _ := s.replica.Leader()
	applied := s.replica.Applied() // read before the end of the log, so that it is never greater
	is := s.replica.Status()
	m := &lockpb.MemberStatus{
		NodeId: s.replica.ID(), ClusterId: s.replica.State.Cluster(), ServerVersion: s.config.Version,
		Durable: s.config.Store != replica.StoreMemory, Leader: s.Leads(), LeaderId: leader,
		Term: is.Term, LastIndex: is.LastIndex, CommitIndex: is.CommitIndex, AppliedIndex: applied,
		AgreedIndex: is.Agreed, DiffersIndex: is.Differs,
		Generation:  generation.Of(s.replica.State.History()).String(),
		Maintenance: s.replica.InMaintenance(), Members: membersOut(s.replica.Members()), AdminAddress: s.AdminAddr(),
	}
	s.waitsToServe(m)
	return m, nil
}

// ListMembers implements lockpb.AdminServiceServer.
func (a *admin) ListMembers(ctx context.Context, _ *lockpb.ListMembersRequest) (*lockpb.MemberList, error) {
	r := a.server.leadership.Load()
	if r == nil {
		return nil, a.server.notLeading()
	}
	all, err := r.Term.Members(ctx)
	if err != nil {
		return nil, a.server.memberError(err)
	}
	return &lockpb.MemberList{Members: membersOut(all)}, nil
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
	case s.config.PeerListen == "":
		return nil, status.Error(codes.FailedPrecondition,
			"this server has no address for other members, see --peer-listen")
	}
	id, err := r.Term.Add(ctx, q.PeerAddress)
	if err != nil {
		return nil, s.memberError(err)
	}
	for _, m := range membersOut(s.replica.Members()) {
		if m.NodeId == id {
			return m, nil
		}
	}
	return nil, status.Errorf(codes.Unknown, "the server at %s was added, and is not a member any more", q.PeerAddress)
}

// RemoveMember implements lockpb.AdminServiceServer.
func (a *admin) RemoveMember(ctx context.Context, q *lockpb.RemoveMemberRequest) (*lockpb.RemoveMemberReply, error) {
	r := a.server.leadership.Load()
	if r == nil {
		return nil, a.server.notLeading()
	}
	if err := r.Term.Remove(ctx, q.NodeId); err != nil {
		return nil, a.server.memberError(err)
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
	if q.NodeId == s.replica.ID() {
		return &lockpb.TransferLeadershipReply{}, nil
	}
	if err := s.replica.Transfer(ctx, q.NodeId); err != nil {
		return nil, s.memberError(err)
	}
	return &lockpb.TransferLeadershipReply{}, nil
}

// SetMaintenance implements lockpb.AdminServiceServer.
func (a *admin) SetMaintenance(
	ctx context.Context, q *lockpb.SetMaintenanceRequest,
) (*lockpb.SetMaintenanceReply, error) {
	if err := a.server.replica.Maintain(ctx, q.On); err != nil {
		return nil, a.server.memberError(err)
	}
	return &lockpb.SetMaintenanceReply{}, nil
}

// membersOut converts members to the wire's type.
func membersOut(members []replica.Member) []*lockpb.Member {
	all := make([]*lockpb.Member, len(members))
	for i, m := range members {
		all[i] = &lockpb.Member{
			NodeId: m.ID, PeerAddress: m.Address, ClientAddress: m.Client,
			Voter: m.Voter, Waits: m.Waits, Alive: m.Alive,
		}
	}
	return all
}

// notLeading returns an error that names the leader's address.
func (s *Server) notLeading() error {
	if err := s.closedStatus(); err != nil {
		return err
	}
	if address := s.leaderAddress(); address != "" {
		return status.Errorf(codes.Unavailable, "this member does not lead; clients find the leader at %s", address)
	}
	return status.Error(codes.Unavailable, "this member does not lead, and knows no leader")
}

// memberError returns the wire's error for a change of the members, or of the leader, that failed.
func (s *Server) memberError(err error) error {
	switch {
	case errors.As(err, new(*replica.RefusedError)):
		return status.Error(codes.FailedPrecondition, err.Error())
	case errors.Is(err, replica.ErrNoMember):
		return status.Error(codes.NotFound, err.Error())
	case errors.Is(err, replica.ErrNotLeader):
		return s.notLeading()
	case errors.Is(err, replica.ErrUnknown):
		return status.Errorf(codes.Unknown, "the change may or may not take effect: %v", err)
	}
	return status.Errorf(codes.Unavailable, "nothing was changed: %v", err)
}
