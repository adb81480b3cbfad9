// Package embedded runs the bundled lock server inside a program: one member that keeps its data in a folder, and
// clients that reach it without a socket.
//
//	locks, err := embedded.Start(ctx, embedded.Options{DataDir: "/var/lib/app/locks"})
//	client, err := fencelock.ForCorrectness(locks.Driver(nil), nil)
//
// It is for programs that run once per machine and want durable locks with fencing tokens without a service beside
// them: the locks are those of this process, and outlive its crash as far as their TTL allows. Several processes need a
// server of their own (fencelock serve), or several of them.
//
// It stands in a package of its own because a program that only connects to servers should not link the server.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/builtin/machine"
	"github.com/fencelock/fencelock/builtin/server"
)

// Options say what to start.
type Options struct {
	// DataDir keeps the data. It is made if it does not exist, and belongs to one server at a time. Required.
	DataDir string

	// MinTTL is the least TTL of a lock. Default one second: there are no elections to outlast.
	MinTTL time.Duration

	// MaxTTL is the greatest TTL of a lock. Default 24 hours.
	MaxTTL time.Duration
	// Limits bound what the server takes on. A field that is zero has its value of machine.DefaultLimits.
	Limits machine.Limits

	// Logger is told what the server does. Default slog.Default.
	Logger *slog.Logger
}

// Server is a lock server in this process. All methods are safe for concurrent use.
type Server struct{ server *server.Server }

// A member that is alone need not leave others time to answer.
var alone = server.Timing{Heartbeat: 50 * time.Millisecond, Lease: 25 * time.Millisecond}

// Start starts a server and returns when it serves: after some tens of milliseconds, or longer if much is to be read
// from DataDir. ctx bounds the start, not the server. Locks of before live for their full TTL from now on, unless their
// clients renew them. An empty DataDir wraps backend.ErrInvalidOption; another option that makes no sense is a
// *server.ConfigError.
func Start(ctx context.Context, o Options) (*Server, error) {
	if o.DataDir == "" {
		return nil, &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "DataDir", Value: `""`, Why: "the locks are to survive, so they need a place",
		}
	}
	if o.MinTTL == 0 {
		o.MinTTL = time.Second
	}
	s, err := server.Start(ctx, server.Config{
		DataDir: o.DataDir, MinTTL: o.MinTTL, MaxTTL: o.MaxTTL, Limits: o.Limits, Log: o.Logger, Timing: alone,
	})
	if err == nil {
		if err = s.WaitLeader(ctx); err != nil {
			err = errors.Join(err, s.Close(context.WithoutCancel(ctx)))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("embedded: start in %s: %w", o.DataDir, err)
	}
	return &Server{s}, nil
}

// Driver returns one more client of the server. Close it before the server. It does no I/O.
func (s *Server) Driver(o *builtin.Options) *builtin.Driver {
	return builtin.Attach(func(ctx context.Context) builtin.Stream { return s.server.Attach(ctx) }, o)
}

// Done is closed when the server has ended: by Close, or because it could not go on (a full disk, for example). Err
// then tells why; it is nil after Close.
func (s *Server) Done() <-chan struct{} { return s.server.Done() }

// Err tells why the server could not go on.
func (s *Server) Err() error { return s.server.Err() }

// Backup writes all that the server keeps to w, with all that was acknowledged before the call. If it returns an error,
// what was written is of no use. server.Restore makes a new data directory of it, for Start.
func (s *Server) Backup(ctx context.Context, w io.Writer) error { return s.server.Backup(ctx, w) }

// Close stops the server. Locks stay as they are: their sessions go on when the server is started again.
func (s *Server) Close(ctx context.Context) error { return s.server.Close(ctx) }
