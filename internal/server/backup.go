package server

// Backups: the state with all changes that were acknowledged before the call, from any member, in pieces.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/builtin/lockpb"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// Backup writes the state of the cluster to w, with all changes that were acknowledged to any client before the call.
// Any member can do that while there is a leader. If Backup returns an error, the output is useless, and
// replica.Restore refuses it. Locks can be acquired and released meanwhile.
func (s *Server) Backup(ctx context.Context, w io.Writer) error {
	frozen, err := s.present(ctx)
	if err == nil {
		err = frozen.WriteBackup(w, replica.BackupInfo{At: s.config.now().UTC(), Server: s.config.Version})
	}
	if err != nil {
		return fmt.Errorf("server.Backup: %w", err)
	}
	s.backedUp.Store(time.Now().Unix())
	return nil
}

// present returns the state with all changes that were acknowledged before the call. A follower asks the leader for
// that index, and waits until it has applied it. It subscribes to news before it compares, so that it misses no news.
func (s *Server) present(ctx context.Context) (*replica.Frozen, error) {
	index, err := s.replica.Acknowledged(ctx)
	if err != nil {
		return nil, err
	}
	counted := time.NewTicker(20 * time.Millisecond) // raft counts a snapshot after the state machine has notified
	defer counted.Stop()
	for {
		news := s.news.wait()
		if s.replica.Applied() >= index {
			return s.replica.State.Freeze()
		}
		select {
		case <-news:
		case <-counted.C:
		case <-s.done:
			return nil, errClosing
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Backup implements lockpb.AdminServiceServer.
func (a *admin) Backup(_ *lockpb.BackupRequest, stream grpc.ServerStreamingServer[lockpb.BackupPiece]) error {
	err := a.server.Backup(stream.Context(), pieces{stream})
	if errors.Is(err, replica.ErrNotLeader) {
		return a.server.notLeading()
	}
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return nil
}

// pieceBytes bounds one piece of a backup.
const pieceBytes = 256 << 10

// pieces writes to a stream.
type pieces struct {
	stream grpc.ServerStreamingServer[lockpb.BackupPiece]
}

func (p pieces) Write(data []byte) (int, error) {
	written := 0
	for len(data) > 0 {
		n := min(len(data), pieceBytes)
		if err := p.stream.Send(&lockpb.BackupPiece{Data: data[:n]}); err != nil {
			return written, err
		}
		written, data = written+n, data[n:]
	}
	return written, nil
}
