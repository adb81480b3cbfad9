package server

// A cluster that was made of a backup or of one disk does not serve at first: see lead.Closed. Operators, clients and
// metrics get the remaining time.

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
)

// closedFor returns the time for which this member, the leader, does not serve yet because the cluster was restored;
// zero otherwise.
func (s *Server) closedFor() time.Duration {
	if c := s.restored.Load(); c != nil {
		return max(1, c.Until.Sub(s.config.now()))
	}
	return 0
}

// closedError returns the error for clients during that time; nil otherwise.
func (s *Server) closedError() *lockpb.Error {
	left := s.closedFor()
	if left == 0 {
		return nil
	}
	return &lockpb.Error{
		Code: lockpb.Code_CODE_UNAVAILABLE, Message: fmt.Sprintf("the cluster was restored and is closed until %s",
			time.Now().Add(left).UTC().Format(time.RFC3339)),
	}
}

// Open implements lockpb.AdminServiceServer.
func (a *admin) Open(context.Context, *lockpb.OpenRequest) (*lockpb.OpenReply, error) {
	s := a.server
	c := s.restored.Load()
	switch {
	case c != nil:
		c.Open()
	case !s.Leads():
		return nil, s.notLeading()
	}
	return &lockpb.OpenReply{}, nil
}

// waitsToServe adds that time to a member's status.
func (s *Server) waitsToServe(m *lockpb.MemberStatus) {
	if c := s.restored.Load(); c != nil {
		m.ClosedNanos, m.UsedTtlNanos = int64(s.closedFor()), int64(c.UsedTTL)
	}
}

// closedStatus is closedError for operators.
func (s *Server) closedStatus() error {
	if e := s.closedError(); e != nil {
		return status.Error(codes.Unavailable, e.Message)
	}
	return nil
}
