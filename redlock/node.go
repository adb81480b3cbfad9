package redlock

// This file is one server as a driver sees it: its connection for calls, its subscription, its known health,
// and whether it may vote.
//
// enrol decides the last for each connection, before anything is sent on it. A server that restarts without its memory
// would vote a second time; since a restart ends all connections, a look at run_id and uptime on every new one finds
// each restart before an answer counts.

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/internal/rediswire"
)

const (
	// maxNodes is the size of a set of nodes, a uint32.
	maxNodes = 31
	// dialTime bounds one connection attempt: a call does not wait longer for an unresponsive server either.
	dialTime = time.Second
)

// node is one server, as one driver sees it. Fields without a named lock are set once or atomic.
type node struct {
	s      *service
	index  int
	addr   string
	client *goredis.Client
	line   *rediswire.Line
	// The subscription, for the driver's first waiter and until Close.
	push redisconn.Subscription
	// Whether it stands: an entry in this node's queue gets a push for its turn. State of pushes: see heard.
	up atomic.Uint32
	// The last exchange failed, or a caller waited for an answer unsuccessfully. Waiters choose another leader.
	sick atomic.Bool
	// Until when others are asked first, in Unix nanoseconds.
	aside atomic.Int64

	// The fault that the last look has found, or nil. An unfit server is asked for no more votes.
	misfit atomic.Pointer[redisconn.Failure]

	// Protected by service.roster, as is votes: run_id of the server process that was met last.
	runID string
	// From when on its answers count.
	votes backend.Instant
}

// newNode prepares the node for the i-th server and does not connect. It changes opt, a copy of the options of the
// client that was handed in: no retries, since a repeated command would vote twice; and OnConnect looks at the server
// after the user's own OnConnect.
//
// The line is Ordered: requests on a new connection come after those of the last one, so that a release cannot overtake
// an acquire without an awaited answer.
func newNode(s *service, index int, opt *goredis.Options) *node {
	n := &node{s: s, index: index, addr: opt.Addr}
	opt.MaxRetries, opt.ContextTimeoutEnabled, opt.DialerRetries = -1, true, 1
	// The pool is for questions and the subscription: calls go by the line.
	opt.PoolSize, opt.MinIdleConns, opt.MaxIdleConns, opt.MaxActiveConns = 4, 0, 4, 0
	// A connection attempt that takes longer than a call may wait for an unresponsive server is useless to it.
	opt.DialTimeout = min(opt.DialTimeout, dialTime)
	opt.PushNotificationProcessor = nil // the other client's own one takes no second registration
	// The user's own OnConnect comes first: it may select the settings that vet needs, such as a user that may ask INFO.
	theirs := opt.OnConnect
	opt.OnConnect = func(ctx context.Context, c *goredis.Conn) error {
		if theirs != nil {
			if err := theirs(ctx, c); err != nil {
				return err
			}
		}
		return n.vet(ctx, c)
	}
	n.client = goredis.NewClient(opt)
	n.line = rediswire.NewLine(rediswire.Options{
		Connect:  func() (*rediswire.Conn, error) { return rediswire.Connect(*n.client.Options()) },
		Clock:    s.clock,
		Channels: redisscript.Channel(s.o.KeyPrefix, ""),
		Ordered:  true,
		Report: func(f *redisconn.Failure) {
			// Any answer without an error marks the node as healthy.
			if n.sick.Store(f != nil); f == nil {
				n.aside.Store(0)
			}
		},
	})
	return n
}

// vet looks at the server on every new connection, before anything else is sent on it. A connection to a server that
// must not vote is refused, so that its answers can never count: a server cannot restart without ending its
// connections. Periodic looks would miss a restart between a look and a vote.
func (n *node) vet(ctx context.Context, c goredis.Cmdable) error {
	if n.s.o.AssumeVersion != "" {
		return nil
	}
	server, err := redisconn.ReadServer(ctx, c)
	if err != nil {
		return err
	}
	server.Tolerated = n.s.o.AllowVolatileEviction
	if err := fit(server); err != nil {
		return fmt.Errorf("server %s: %w", n.addr, err)
	}
	return n.s.enrol(n, server)
}

// enrol decides whether the server behind a new connection votes. It refuses a server that is listed twice, by run_id,
// since it would vote twice. A new or restarted server is in quarantine until it has been up for MaxTTL: all holds
// that it may have forgotten have ended by then. Its uptime is in whole seconds and rounded down, which errs on the
// safe side.
//
// A server that has every write on disk before it answers (Server.Durable) keeps its votes in a restart and votes
// immediately. The driver cannot distinguish a first start from a restart, so a server met for the first time is
// treated as restarted unless Options.TrustFresh is set.
func (s *service) enrol(n *node, server redisconn.Server) error {
	s.roster.Lock()
	defer s.roster.Unlock()
	// Also among nodes in quarantine: a server listed twice is a mistake at any time.
	for _, other := range s.nodes {
		if other != n && other.runID == server.RunID {
			return &backend.ConfigError{
				Setting: "run_id", Value: server.RunID, Want: "another one on each server",
				Why: fmt.Sprintf("%s and %s are the same server, which would vote twice", other.addr, n.addr),
			}
		}
	}
	now := s.clock.Now()
	// A process that was not met before: the first of this node, or a restart.
	if n.runID != server.RunID {
		first := n.runID == ""
		n.runID, n.votes = server.RunID, now
		if !server.Durable && s.quarantine && !(first && s.o.TrustFresh) && server.Uptime < s.o.MaxTTL {
			// Its grants from before the restart end at most MaxTTL after that restart.
			n.votes = now.Add(s.o.MaxTTL - server.Uptime)
		}
	}
	// The connection is refused, and the line retries at its own pace until the quarantine is over.
	if now < n.votes {
		return &QuarantineError{Addr: n.addr, Uptime: server.Uptime.String(), Want: s.o.MaxTTL.String()}
	}
	return nil
}

// fit refuses a server that cannot keep a vote, in addition to redisconn's checks for every lock.
func fit(s redisconn.Server) error {
	switch {
	case s.RunID == "":
		return &backend.ConfigError{
			Setting: "run_id", Value: "", Want: "shown by INFO", Why: "a restart, and a server given twice, show in it",
		}
	case s.Cluster:
		return &backend.ConfigError{
			Setting: "cluster_enabled", Value: "1", Want: "0",
			Why: "the servers of a cluster are not independent: they fail over to replicas that may not know a lock",
		}
	}
	return s.Fit()
}
