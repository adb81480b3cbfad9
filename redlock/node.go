package redlock

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/rediswire"
)

const (
	maxNodes = 31
	dialTime = time.Second // at most, for one connection
)

// node is one server, as one driver sees it.
type node struct {
	d      *Driver
	index  int
	addr   string
	client *goredis.Client
	line   *rediswire.Line
	push   push
	sick   atomic.Bool  // the last exchange failed, or somebody waited for an answer in vain
	aside  atomic.Int64 // until when others are asked first, in Unix nanoseconds

	misfit atomic.Pointer[redisconn.Failure] // what the last look has found wrong with the server; nil for nothing

	// Protected by Driver.roster.
	runID string          // of the server process that was met last
	votes backend.Instant // from when on its answers count

	debtMu   sync.Mutex // protects the following fields
	debts    []debt
	settling bool
}

func newNode(d *Driver, index int, opt *goredis.Options) *node {
	n := &node{d: d, index: index, addr: opt.Addr}
	opt.MaxRetries, opt.ContextTimeoutEnabled, opt.DialerRetries = -1, true, 1
	opt.PoolSize, opt.MinIdleConns, opt.MaxIdleConns, opt.MaxActiveConns = 4, 0, 4, 0
	opt.DialTimeout = min(opt.DialTimeout, dialTime)
	opt.PushNotificationProcessor = nil // the other client's own one takes no second registration
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
		Connect:  func() (net.Conn, error) { return rediswire.Connect(*n.client.Options()) },
		Clock:    d.clock,
		Channels: d.channels,
		Ordered:  true,
		Report: func(f *redisconn.Failure) {
			if n.sick.Store(f != nil); f == nil {
				n.aside.Store(0)
			}
		},
	})
	n.push.init()
	return n
}

// vet looks at the server on every new connection, before anything else is sent on it. A connection to a server that
// must not vote is refused, so that none of its answers can ever count: a server cannot restart without ending its
// connections. Looking at times, from outside, was rejected: a server may restart between a look and a vote.
func (n *node) vet(ctx context.Context, c goredis.Cmdable) error {
	if n.d.o.AssumeVersion != "" {
		return nil
	}
	s, err := redisconn.ReadServer(ctx, c)
	if err != nil {
		return err
	}
	s.Tolerated = n.d.o.AllowVolatileEviction
	if err := fit(s); err != nil {
		return fmt.Errorf("server %s: %w", n.addr, err)
	}
	return n.d.enrol(n, s)
}

// enrol decides whether the server behind a new connection votes.
func (d *Driver) enrol(n *node, s redisconn.Server) error {
	d.roster.Lock()
	defer d.roster.Unlock()
	for _, other := range d.nodes {
		if other != n && other.runID == s.RunID {
			return &backend.ConfigError{
				Setting: "run_id", Value: s.RunID, Want: "another one on each server",
				Why: fmt.Sprintf("%s and %s are the same server, which would vote twice", other.addr, n.addr),
			}
		}
	}
	now := d.clock.Now()
	if n.runID != s.RunID {
		first := n.runID == ""
		n.runID, n.votes = s.RunID, now
		if !s.Durable && d.quarantine && !(first && d.o.TrustFresh) && s.Uptime < d.o.MaxTTL {
			n.votes = now.Add(d.o.MaxTTL - s.Uptime)
		}
	}
	if now < n.votes {
		return &QuarantineError{Addr: n.addr, Uptime: s.Uptime.String(), Want: d.o.MaxTTL.String()}
	}
	return nil
}

// fit refuses a server that cannot keep a vote.
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
