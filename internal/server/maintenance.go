package server

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// A member in maintenance leads only if nobody else does: it asks for no votes while it hears of a leader, or has heard
// of one a short while ago, and if it leads all the same it hands that over as soon as another can take it. It follows
// and votes as before. To ask for no votes at all would be wrong: it may be the only one left that has all that was
// acknowledged, and then the others cannot be elected.

// errMaintenance is what raft gets instead of a vote.
var errMaintenance = errors.New("this member is in maintenance: it leads only if nobody else does")

// refrainTimes is for how many elections without a leader a member in maintenance leaves them to the others.
const refrainTimes = 3

// maintain begins maintenance, or ends it.
func (s *Server) maintain(on bool) {
	if !on {
		s.node.proof.refrains.Store(nil)
		return
	}
	t := s.config.Timing.withDefaults()
	refrains := func() bool {
		heard := s.node.raft.LastContact()
		return !heard.IsZero() && time.Since(heard) < refrainTimes*(t.Heartbeat+t.Election)
	}
	s.node.proof.refrains.Store(&refrains)
}

func (s *Server) inMaintenance() bool { return s.node.proof.refrains.Load() != nil }

// SetMaintenance implements lockpb.AdminServiceServer.
func (a *admin) SetMaintenance(
	ctx context.Context, q *lockpb.SetMaintenanceRequest,
) (*lockpb.SetMaintenanceReply, error) {
	s := a.server
	if q.On && s.Leads() {
		if _, err := s.successor(ctx, ""); err != nil {
			return nil, err
		}
	}
	s.maintain(q.On)
	s.log.Info("maintenance", "on", q.On)
	if q.On && s.Leads() {
		if err := s.handOver(ctx); err != nil { // it is tried again: see keepMembers
			s.log.Info("in maintenance, and still leading", "error", err)
		}
	}
	return &lockpb.SetMaintenanceReply{}, nil
}

// successor returns the member that is to lead after this one, which leads: id, or where that is empty the one that has
// the most of the log. It must have a vote, answer, and not be in maintenance.
func (s *Server) successor(ctx context.Context, id raft.ServerID) (raft.Server, error) {
	refuse := func(format string, args ...any) (raft.Server, error) {
		return raft.Server{}, status.Errorf(codes.FailedPrecondition, format, args...)
	}
	servers := slices.DeleteFunc(slices.Clone(s.node.servers()), func(m raft.Server) bool {
		return m.ID == s.node.id || id != "" && m.ID != id || id == "" && m.Suffrage != raft.Voter
	})
	switch {
	case id != "" && len(servers) == 0:
		return raft.Server{}, status.Errorf(codes.NotFound, "there is no member %q", id)
	case id != "" && servers[0].Suffrage != raft.Voter:
		return refuse("%s has no vote yet", id)
	}
	answers := s.askEach(ctx, servers)
	best, away, has := -1, 0, uint64(0)
	for i, m := range servers {
		switch index := s.node.proof.indexOf(m.ID); {
		case answers[i].ID != m.ID: // none, or that of another one
		case answers[i].Maintenance:
			away++
		case best < 0 || index > has:
			best, has = i, index
		}
	}
	switch {
	case best >= 0:
		return servers[best], nil
	case id != "" && away > 0:
		return refuse("%s is in maintenance", id)
	case id != "":
		return refuse("%s does not answer the leader", id)
	case away > 0:
		return refuse("no other member with a vote answers the leader, except %d in maintenance", away)
	}
	return refuse("no other member with a vote answers the leader")
}

// askEach asks all at once, for as long as a leader may be silent. Who does not answer has no id.
func (s *Server) askEach(ctx context.Context, servers []raft.Server) []answer {
	ctx, cancel := context.WithTimeout(ctx, s.config.Timing.withDefaults().Heartbeat)
	defer cancel()
	answers := make([]answer, len(servers))
	var asking sync.WaitGroup
	for i, m := range servers {
		asking.Go(func() { answers[i], _ = s.peers.ask(ctx, string(m.Address), question{}) })
	}
	asking.Wait()
	return answers
}

// handOver has another member lead.
func (s *Server) handOver(ctx context.Context) error {
	to, err := s.successor(ctx, "")
	if err != nil {
		return err
	}
	select {
	case err := <-landing(s.node.raft.LeadershipTransferToServer(to.ID, to.Address)):
		return err
	case <-s.node.dead:
		return raft.ErrRaftShutdown
	case <-ctx.Done():
		return ctx.Err()
	}
}
