package server

// Reads for people while there is no leader: the state of this member, without a proof that it is current. The answer
// has the time since its last contact with a leader.

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
		infos = []machine.Info{s.replica.State.Machine.Look(q.GetName())}
	}
	// Only a leader knows deadlines.
	names, next := namePage(infos, more, nil, func(string) bool { return true })
	return &lockpb.LookStaleReply{
		Names: names, NextAfter: next, NodeId: s.replica.ID(), HeardNanos: int64(s.heard()),
		Durable: s.config.Store != replica.StoreMemory,
	}, nil
}

// heard returns the time since this member's last contact with a leader: zero if it leads, negative if it had no
// contact since its start.
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
