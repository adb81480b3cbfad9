package builtin

// Backups: the whole state of a cluster as one stream, from a member that has little else to do.

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

// pieceTime is how long one piece of a backup may be on its way.
const pieceTime = 30 * time.Second

// Backup writes all that the cluster keeps to w, with all that was acknowledged to anybody before the call. It comes
// from a member that follows the leader, else from the leader, for which it looks for up to 15 seconds. An error wraps
// backend.ErrUnavailable, or is that of w; what was written is then of no use, and cannot be restored by mistake: a
// backup ends with its checksum.
//
// "fencelock restore", or embedded.Restore, makes a new cluster of it.
func (a *Admin) Backup(ctx context.Context, w io.Writer) error {
	const call = "backup"
	sources, err := a.awaitSources(ctx)
	if err != nil {
		return adminError(call, "", err)
	}
	to := &counted{Writer: w}
	for _, address := range sources {
		// What was written cannot be taken back, so another one is asked only before the first byte.
		if err = a.backupFrom(ctx, address, to); err == nil || to.bytes > 0 || to.err != nil || ctx.Err() != nil {
			break
		}
	}
	text := status.Convert(err).Message()
	switch {
	case err == nil:
		return nil
	case to.err != nil:
		err = to.err
	case status.Code(err) == codes.Unimplemented:
		err = fmt.Errorf("%w: %s", backend.ErrUnsupported, text)
	case ctx.Err() != nil:
		err = fmt.Errorf("%w: %w: %s", backend.ErrUnavailable, ctx.Err(), text)
	default:
		err = fmt.Errorf("%w: %s", backend.ErrUnavailable, text)
	}
	return &backend.CallError{Driver: driverName, Call: call, Err: err}
}

// counted knows how much was written, and why no more was.
type counted struct {
	io.Writer
	bytes int
	err   error
}

// Write implements io.Writer.
func (c *counted) Write(p []byte) (int, error) {
	n, err := c.Writer.Write(p)
	c.bytes += n
	c.err = err
	return n, err
}

// backupFrom copies the backup of one member to w. A member that sends nothing for pieceTime is given up: a backup may
// take long, but not a piece of it.
func (a *Admin) backupFrom(ctx context.Context, address string, w io.Writer) error {
	return a.at(ctx, address, backupTime, func(ctx context.Context, c lockpb.AdminServiceClient) error {
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

// backupTime bounds a whole backup, so that no stream stays open for ever that brings a piece now and then.
const backupTime = time.Hour

// awaitSources returns who can make a backup, the leader last: also for a while in which there may be none.
func (a *Admin) awaitSources(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, changeTime)
	defer cancel()
	for {
		leader, err := a.leader(ctx)
		if err == nil {
			var sources []string
			for _, m := range a.Status(ctx) {
				if m.Err == nil && !m.Leader && m.LeaderId != "" {
					sources = append(sources, m.Address)
				}
			}
			return append(sources, leader), nil
		}
		if !pause(ctx) {
			return nil, err
		}
	}
}
