package story

import (
	"context"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// serve starts the bundled lock server in this process, with its data in the story's folder, and makes it the backend.
// It listens on loopback, so that stories of several processes can use it; a program that locks only among its
// goroutines uses package builtin/embedded, which is the same server without a socket.
func (s *Story) serve(ctx context.Context) error {
	locks, err := server.Start(ctx, server.Config{
		DataDir: filepath.Join(s.Dir, "locks"), Listen: "127.0.0.1:0",
		MinTTL: time.Second, // there are no elections to outlast
		Timing: replica.Timing{Heartbeat: 50 * time.Millisecond, Lease: 25 * time.Millisecond},
		Log:    slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	s.AtEnd(locks.Close)
	s.Backend = "fencelock://" + locks.Addr().String()
	return locks.WaitLeader(ctx)
}
