package builtin

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
// from the leader, for which it looks for up to 15 seconds. An error wraps backend.ErrUnavailable, or is that of w;
// what was written is then of no use, and cannot be restored by mistake: a backup ends with its checksum.
//
// server.Restore, or "fencelock restore", makes a new cluster of it.
func (a *Admin) Backup(ctx context.Context, w io.Writer) error {
	const call = "backup"
	address, err := a.awaitLeader(ctx)
	if err != nil {
		return adminError(call, "", err)
	}
	var writing error
	err = a.at(ctx, address, backupTime, func(ctx context.Context, c lockpb.AdminServiceClient) error {
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
			if _, writing = w.Write(piece.Data); writing != nil {
				return writing
			}
		}
	})
	text := status.Convert(err).Message()
	switch {
	case err == nil:
		return nil
	case writing != nil:
		err = writing
	case status.Code(err) == codes.Unimplemented:
		err = fmt.Errorf("%w: %s", backend.ErrUnsupported, text)
	case ctx.Err() != nil:
		err = fmt.Errorf("%w: %w: %s", backend.ErrUnavailable, ctx.Err(), text)
	default:
		err = fmt.Errorf("%w: %s", backend.ErrUnavailable, text)
	}
	return &backend.CallError{Driver: driverName, Call: call, Err: err}
}

// backupTime bounds a whole backup.
const backupTime = time.Hour

// awaitLeader is leader for a while in which there may be none.
func (a *Admin) awaitLeader(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, changeTime)
	defer cancel()
	for {
		address, err := a.leader(ctx)
		if err == nil {
			return address, nil
		}
		timer := time.NewTimer(spread(busyPause))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return "", err
		}
	}
}
