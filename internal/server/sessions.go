package server

// Sessions for operators: the holds and waits of each, and ending one. A session's id is a secret, since a client
// that knows it can act for the session. So operators use a name derived from it.

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// sessionName returns the operators' name for a session, in place of its id.
func sessionName(id machine.SessionID) string {
	sum := sha256.Sum256(id[:])
	return hex.EncodeToString(sum[:8])
}

// sessionsAtOnce bounds the sessions of one piece of the list.
const sessionsAtOnce = 1000

// ListSessions implements lockpb.AdminServiceServer.
func (a *admin) ListSessions(q *lockpb.ListSessionsRequest, out grpc.ServerStreamingServer[lockpb.SessionList]) error {
	r := a.server.leadership.Load()
	if r == nil {
		return a.server.notLeading()
	}
	all := a.server.replica.State.Machine.Sessions()
	if q.GetClient() != "" {
		all = slices.DeleteFunc(all, func(u machine.SessionUsage) bool { return u.Client != q.GetClient() })
	}
	for piece := range slices.Chunk(all, sessionsAtOnce) {
		list := &lockpb.SessionList{}
		for _, u := range piece {
			list.Sessions = append(list.Sessions, &lockpb.SessionInfo{
				Name: sessionName(u.ID), Client: u.Client, TtlNanos: int64(u.TTL), LeftNanos: int64(r.Time.Left(u.ID)),
				Holds: uint32(u.Holds), Waits: uint32(u.Waits), Connected: r.Listener(u.ID) != nil,
				Owner: u.Owner, Names: u.Names, Principal: string(u.Principal),
			})
		}
		if err := out.Send(list); err != nil {
			return err
		}
	}
	return nil
}

// EndSession implements lockpb.AdminServiceServer.
func (a *admin) EndSession(ctx context.Context, q *lockpb.EndSessionRequest) (*lockpb.EndSessionReply, error) {
	s := a.server
	r := s.leadership.Load()
	if r == nil {
		return nil, s.notLeading()
	}
	all := s.replica.State.Machine.Sessions()
	i := slices.IndexFunc(all, func(x machine.SessionUsage) bool { return sessionName(x.ID) == q.GetName() })
	if i < 0 {
		return nil, status.Errorf(codes.NotFound, "there is no session %q", q.GetName())
	}
	over := make(chan error, 1)
	c := machine.Command{Op: machine.OpCloseSession, Session: all[i].ID, Linger: r.Time.AnyClosed()}
	if err := r.Propose(c, func(err error) { over <- err }); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	select {
	case err := <-over:
		switch {
		case errors.Is(err, replica.ErrNotLeader):
			return nil, s.notLeading()
		case err != nil:
			return nil, status.Error(codes.Unknown, err.Error())
		}
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	s.log.Info("session ended", "session", q.GetName())
	return &lockpb.EndSessionReply{}, nil
}
