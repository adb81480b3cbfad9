// Package embedded runs the bundled lock server inside a program: one member that keeps its data in a folder, and
// clients that reach it without a socket.
//
//	locks, err := embedded.Start(ctx, embedded.Options{DataDir: "/var/lib/app/locks"})
//	client, err := fencelock.ForCorrectness(locks.Driver(nil), nil)
//
// It is for a program that runs once per machine and needs durable locks with fencing tokens, but no separate service.
// The locks are only for this process, and outlive its crash for their TTL.
//
// Three processes on three machines share locks with Options.Cluster: each runs a member, and its drivers find the
// leader. docs/EMBEDDED.md explains deployment and rolling upgrades; examples/members is a program. Without
// Options.Cluster, several processes need one or more separate servers (fencelock serve).
//
// The package is separate because a program that only connects to servers should not link the server.
package embedded

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
	"github.com/fencelock/fencelock/internal/machine"
	"github.com/fencelock/fencelock/internal/server"
	"github.com/fencelock/fencelock/internal/server/replica"
)

// Options configure a server.
type Options struct {
	// DataDir is the directory of the data. Start makes it if it does not exist. It belongs to one server at a time.
	// Required.
	DataDir string
	// Moved permits a DataDir that is a copy of another one, provided that the server of the original never starts
	// again.
	Moved bool

	// Cluster makes the server a member of a cluster. Nil: a single server.
	Cluster *Cluster

	// MinTTL is the minimum TTL of a lock. Default 1 s for a single server, which has no elections, and 3 s in a cluster.
	MinTTL time.Duration

	// MaxTTL is the maximum TTL of a lock, and the time for which a restored cluster refuses clients. Default 1 hour, and
	// 24 hours in a cluster that a version before 0.1 made.
	MaxTTL time.Duration
	// Limits bound the server's state. Zero fields have their defaults.
	Limits Limits

	// Logger receives the server's log. Default slog.Default.
	Logger *slog.Logger
}

// Cluster makes the server one of several members, each in a separate process on a separate machine. The cluster
// serves while most of its members run: three survive the loss of one.
type Cluster struct {
	// Members are the addresses, host:port, by which the members find each other, including this member's own: the same
	// list for all. When all of them run for the first time, they form a cluster. If most of them have formed one
	// already, another member joins it, see JoinKey. Required, at least three.
	Members []string
	// PeerListen is the address, host:port, at which this member listens for the others. Required. PeerAdvertise is its
	// address in Members, if that differs.
	PeerListen, PeerAdvertise string
	// Listen is the address, host:port, at which this member listens for the drivers of the others. Required. Advertise
	// is the address for these drivers, if it differs.
	Listen, Advertise string
	// TLS is for both addresses and both directions. It needs Certificates of this member, which name its hosts; RootCAs
	// and ClientCAs with the authority of all members; and ClientAuth tls.RequireAndVerifyClientCert. Required beyond
	// loopback, unless Insecure is set.
	TLS      *tls.Config
	Insecure bool
	// JoinKey is a secret of at least 16 bytes that all members share. With it, another member, or a member that has lost
	// its data, joins the cluster. Nil: an operator approves the join with "fencelock member add".
	JoinKey []byte
}

// apply copies the options to the configuration of the server. It refuses only settings that are valid for a server
// but not for an embedded cluster: fewer than three members, missing addresses, and TLS without which anybody could
// join as a member. The server checks the rest.
func (o *Cluster) apply(c *server.Config) error {
	wrong := func(what, value, why string) error {
		return &backend.InvalidError{Kind: backend.ErrInvalidOption, What: "Cluster." + what, Value: value, Why: why}
	}
	switch {
	case len(o.Members) < 3:
		return wrong("Members", fmt.Sprint(o.Members), "want three or more: two survive the loss of neither")
	case o.PeerListen == "":
		return wrong("PeerListen", `""`, "the others need an address of this member")
	case o.Listen == "":
		return wrong("Listen", `""`, "the drivers of the others need an address of this member")
	}
	if o.TLS != nil {
		switch t := o.TLS; {
		case len(t.Certificates) == 0 && t.GetCertificate == nil:
			return wrong("TLS", "without a certificate", "members show who they are")
		case t.ClientAuth != tls.RequireAndVerifyClientCert || t.ClientCAs == nil || t.RootCAs == nil:
			return wrong("TLS", "without RootCAs, ClientCAs or RequireAndVerifyClientCert",
				"whoever asked would be a member")
		}
	}
	c.Listen, c.Advertise, c.PeerListen, c.PeerAdvertise = o.Listen, o.Advertise, o.PeerListen, o.PeerAdvertise
	c.Join, c.BootstrapExpect, c.JoinKey = o.Members, len(o.Members), o.JoinKey
	c.TLS, c.PeerTLS, c.Insecure = o.TLS, o.TLS, o.Insecure
	return nil
}

// Server is a lock server in this process. Start makes one. All methods are safe for concurrent use.
type Server struct {
	server *server.Server
	// cluster is Options.Cluster, with an empty PeerListen for a single server.
	cluster Cluster
	// formed is closed by Start, or by its goroutine, once the server has known a leader since its start.
	formed chan struct{}
}

// alone is the timing of a single member, which need not wait for the answers of others.
var alone = replica.Timing{Heartbeat: 50 * time.Millisecond, Lease: 25 * time.Millisecond}

// Start starts a server. It returns a single server when that serves: after some tens of milliseconds, or longer if
// DataDir is large. It returns a member of a cluster when that can be reached, even if the cluster does not serve yet:
// see WaitLeader. ctx bounds the start, not the server. Locks that were held before a restart continue for at most
// their TTL, unless their clients renew them. The error of an invalid option wraps backend.ErrInvalidOption.
//
// A member of a cluster has a goroutine that waits for the first leader. It ends when the leader is known, or with the
// server.
func Start(ctx context.Context, o Options) (*Server, error) {
	if o.DataDir == "" {
		return nil, &backend.InvalidError{
			Kind: backend.ErrInvalidOption, What: "DataDir", Value: `""`,
			Why: "the locks are to survive, so they need a place",
		}
	}
	s := &Server{formed: make(chan struct{})}
	c := server.Config{
		DataDir: o.DataDir, Moved: o.Moved, MinTTL: o.MinTTL, MaxTTL: o.MaxTTL, Limits: machine.Limits(o.Limits), Log: o.Logger,
	}
	if o.Cluster == nil {
		c.Timing = alone
		if c.MinTTL == 0 {
			c.MinTTL = time.Second
		}
	} else if err := o.Cluster.apply(&c); err != nil {
		return nil, err
	}
	var err error
	if s.server, err = server.Start(ctx, c); err != nil {
		var wrong *replica.ConfigError
		if errors.As(err, &wrong) {
			err = &backend.InvalidError{
				Kind: backend.ErrInvalidOption, What: wrong.Setting, Value: wrong.Value, Why: wrong.Why,
			}
		}
		return nil, fmt.Errorf("embedded: start in %s: %w", o.DataDir, err)
	}
	if o.Cluster == nil {
		if err := s.server.WaitLeader(ctx); err != nil {
			err = errors.Join(err, s.server.Close(context.WithoutCancel(ctx)))
			return nil, fmt.Errorf("embedded: start in %s: %w", o.DataDir, err)
		}
		close(s.formed)
		return s, nil
	}
	s.cluster = *o.Cluster
	go func() {
		if s.server.WaitLeader(context.Background()) == nil { // it returns when the server ends, too
			close(s.formed)
		}
	}()
	return s, nil
}

// Driver returns another client of the server, or of its cluster, whichever member leads. Until the server has known a
// leader since its start, calls of the driver wait until their contexts end. Options.TLS defaults to that of the
// cluster. Close the driver before the server. Driver does no I/O.
//
// Drivers of one server are independent clients: each has separate sessions, and its Close ends only these.
func (s *Server) Driver(o *builtin.Options) *builtin.Driver {
	connect := func(ctx context.Context) builtin.Stream { return s.server.Attach(ctx) }
	if s.cluster.PeerListen == "" {
		return builtin.Attach(connect, o)
	}
	var options builtin.Options
	if o != nil {
		options = *o
	}
	if options.TLS == nil && s.cluster.TLS != nil {
		options.TLS = s.cluster.TLS.Clone()
	}
	return builtin.AttachMember(builtin.Member{
		Connect: connect, Address: cmp.Or(s.cluster.Advertise, s.server.Addr().String()), Forming: s.forming,
	}, &options)
}

// forming reports whether no leader has been known since the start. It is false once the server has ended, so that
// calls do not wait for an election that is not visible here.
func (s *Server) forming() bool {
	select {
	case <-s.formed:
		return false
	case <-s.server.Done():
		return false
	default:
		return true
	}
}

// WaitLeader returns once the server knows the leader, itself or another member: use it for a readiness probe. The
// error is ctx's, or the reason for the end of the server.
//
// For a single server, Start has already waited for that.
//
//	ctx, cancel := context.WithTimeout(r.Context(), time.Second)
//	defer cancel()
//	if server.WaitLeader(ctx) != nil {
//		w.WriteHeader(http.StatusServiceUnavailable) // not ready
//	}
func (s *Server) WaitLeader(ctx context.Context) error { return s.server.WaitLeader(ctx) }

// Addr returns the address at which the drivers of the other members reach this one, or nil for a single server.
func (s *Server) Addr() net.Addr { return s.server.Addr() }

// Done returns a channel that is closed when the server has ended: after Close, or after a failure, such as a full
// disk, for which Err returns the reason.
func (s *Server) Done() <-chan struct{} { return s.server.Done() }

// Err returns the failure that has ended the server, or nil while it runs and after Close.
func (s *Server) Err() error { return s.server.Err() }

// Backup writes the server's whole state to w, including all changes that were acknowledged to any client before the
// call. If it returns an error, the output is useless. Restore makes a new data directory of it, for Start.
//
// A follower first waits until it has all changes that the leader has acknowledged; ctx bounds that wait. The writing
// takes as long as w does, and ends early only if w returns an error. Locks keep working meanwhile.
func (s *Server) Backup(ctx context.Context, w io.Writer) error { return s.server.Backup(ctx, w) }

// Close stops the server. If it leads a cluster, Close first transfers the leadership. Locks stay as they are: their
// sessions continue when the server restarts, or under the next leader. Close waits for another leader and for
// requests in progress until ctx ends, and for two seconds at most; the server is closed in any case. Close the
// drivers first, which releases their locks.
func (s *Server) Close(ctx context.Context) error { return s.server.Close(ctx) }
