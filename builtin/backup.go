package builtin

// Backups: the whole state of a cluster as one stream, preferably from a follower.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// pieceTime bounds the transfer of one piece of a backup.
//
// A useful bound for the whole backup would depend on the size of the state and the speed of the reader: see
// backupTime.
const pieceTime = 30 * time.Second

// Backup writes the whole state of the cluster to w, including all changes acknowledged to any client before the call.
// It comes from a member that follows the leader, else from the leader, for which it looks for up to 15 seconds. An
// error wraps backend.ErrUnavailable, or is the error of w. The partial output is then useless, and cannot be restored
// by mistake: a backup ends with its checksum.
//
// "fencelock restore", or embedded.Restore, makes a new cluster of it. Locks keep working meanwhile, and ctx ends it.
//
//	file, err := os.Create("locks.backup")
//	if err != nil {
//		return err
//	}
//	return errors.Join(admin.Backup(ctx, file), file.Sync(), file.Close())
func (a *Admin) Backup(ctx context.Context, w io.Writer) error {
	const call = "backup"
	sources, err := a.awaitSources(ctx)
	if err != nil {
		return adminError(call, "", err)
	}
	to := &counted{Writer: w}
	for i := range sources {
		// The output cannot be undone, so Backup asks another member only before the first byte.
		if err = a.backupFrom(ctx, &sources[i], to); err == nil || to.bytes > 0 || to.err != nil || ctx.Err() != nil {
			break
		}
	}
	text := status.Convert(err).Message()
	switch {
	case err == nil:
		return nil
	case to.err != nil:
		err = to.err
	case status.Code(err) == codes.PermissionDenied:
		err = fmt.Errorf("%w: %s", ErrRefused, text)
	case status.Code(err) == codes.Unimplemented:
		err = fmt.Errorf("%w: %s", backend.ErrUnsupported, text)
	case ctx.Err() != nil:
		err = fmt.Errorf("%w: %w: %s", backend.ErrUnavailable, ctx.Err(), text)
	default:
		err = fmt.Errorf("%w: %s", backend.ErrUnavailable, text)
	}
	return &backend.CallError{Driver: driverName, Call: call, Err: err}
}

// counted is a writer that records the number of bytes and the last error: a write error must not count as an error of
// the member, and must not make Backup ask another member.
type counted struct {
	io.Writer
	bytes int
	err   error
}

// Write writes p and records the result. It is called by one goroutine.
func (c *counted) Write(p []byte) (int, error) {
	n, err := c.Writer.Write(p)
	c.bytes += n
	c.err = err
	return n, err
}

// backupFrom copies the backup of one member to w. It fails if the member sends no piece for pieceTime.
//
// The timer cancels the stream's context; each piece resets it, and it stops on return. It also runs while w is
// written to: a writer that takes longer than pieceTime for one piece ends the backup.
func (a *Admin) backupFrom(ctx context.Context, m *MemberStatus, w io.Writer) error {
	return a.changeAt(ctx, m, backupTime, func(ctx context.Context, c lockpb.AdminServiceClient) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		silence := time.AfterFunc(pieceTime, cancel)
		defer silence.Stop()
		stream, err := c.Backup(ctx, &lockpb.BackupRequest{})
		if err != nil {
			return err
		}
		for {
			piece, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			silence.Reset(pieceTime)
			if _, err := w.Write(piece.Data); err != nil {
				return err
			}
		}
	})
}

// backupTime bounds a whole backup, so that a slow stream does not stay open indefinitely.
const backupTime = time.Hour

// awaitSources returns the members that can make a backup, the leader last. While it finds no member, it retries.
//
// It omits a member without a leader, which cannot know the latest changes of the cluster. When ctx or changeTime ends
// the search, awaitSources returns the last error.
func (a *Admin) awaitSources(ctx context.Context) (sources []MemberStatus, err error) {
	err = patiently(ctx, func(ctx context.Context) error {
		members := a.Status(ctx)
		leader, err := leaderOf(members)
		if errors.As(err, new(closedFor)) {
			return err
		}
		sources = nil
		for _, m := range members {
			if m.Err == nil && !m.Leader && m.LeaderId != "" {
				sources = append(sources, m)
			}
		}
		if leader != nil {
			sources = append(sources, *leader)
		}
		if len(sources) == 0 {
			return err
		}
		return nil
	})
	return sources, err
}
