package server

// Reads for people while nobody leads: what this member knows, without a proof that it is true still. The answer says
// how long ago the member heard of a leader.

import (
	"context"
	"time"

	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// LookStale implements lockpb.AdminServiceServer.
func (a *admin) LookStale(ctx context.Context, q *lockpb.LookStaleRequest) (*lockpb.LookStaleReply, error) {
	select {
	case a.looking <- struct{}{}:
		defer func() { <-a.looking }()
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	s := a.server
	var infos []machine.Info
	more := false
	if q.GetPrefix() {
		infos, more = s.replica.State.Machine.List(q.GetName(), q.GetAfter(), limitOf(q.GetLimit(), pageLimit))
	} else {
		infos = []machine.Info{s.replica.State.Machine.Holder(q.GetName())}
	}
	// Deadlines are the leader's, and not told here.
	names, next := namePage(infos, more, nil)
	return &lockpb.LookStaleReply{
		Names: names, NextAfter: next, NodeId: s.replica.ID(), HeardNanos: int64(s.heard()),
		Durable: s.config.Store != replica.StoreMemory,
	}, nil
}

// heard is how long ago this member heard of a leader: zero if it leads, negative if it has not heard of one since it
// was started.
func (s *Server) heard() time.Duration {
	if s.Leads() {
		return 0
	}
	last := s.replica.LastContact()
	if last.IsZero() {
		return -1
	}
	return max(1, time.Since(last))
}
