package redlock

// This file is the driver's public face: options, construction, and Describe. Where to read on:
//
//	service.go   one exchange with all servers; the look at them; the subscriptions
//	enter.go     votes, and places in a queue; later.go: votes that follow a grant
//	leave.go     Leave, Extend; inspect.go: Look, Check
//	node.go      one server, and whether it may vote; open.go: URLs
//
// The script and the connections are those of package redis (internal/redisscript, internal/rediswire): each server is
// an independent lock service, and this package counts votes.

import (
	"cmp"
	"crypto/rand"
	"fmt"
	"hash/maphash"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisconn"
)

// driverName is the driver's name in errors and descriptions.
const driverName = "redlock"

const (
	// minTTL is a bound below which the round trips eat the validity.
	minTTL = 100 * time.Millisecond
	// defaultMaxTTL is Options.MaxTTL unless it is set.
	defaultMaxTTL = time.Minute
	// ownMargin is the resolution of Redis' expiry, as the algorithm has it.
	ownMargin = 2 * time.Millisecond
)

// Options configure a Driver. The zero value is ready to use. New copies them.
type Options struct {
	// KeyPrefix starts every key and channel; all clients of one set of locks use the same. It has no braces. Default
	// "fencelock:".
	KeyPrefix string

	// NodeTimeout bounds the wait of a call for servers that do not answer, when its outcome depends on them. A
	// minority of unresponsive servers causes no delay as long as the others agree. Default: a quarter of the TTL, at
	// least 50 ms and at most one second.
	NodeTimeout time.Duration

	// MaxTTL is the longest TTL, and the longest minimum hold, that any client of these locks uses; longer ones are
	// refused. It is also how long a restarted server stays without a vote, unless it stores every write before it
	// answers (appendonly yes, appendfsync always): after that time all holds that it may have forgotten have ended
	// anyway. All clients of one set of locks agree on it. Default one minute.
	MaxTTL time.Duration

	// TrustFresh gives a vote to servers which this driver meets for the first time although they have not been up for
	// MaxTTL. Set it for servers that never granted a lock: a first deployment, or tests. Servers that restart after this
	// driver has met them are still excluded; a restart while no driver ran is not detected.
	TrustFresh bool

	// WaitForAll asks all servers at the same time, and makes Acquire wait for all responsive servers, so that a hold
	// begins with all available votes. Otherwise a majority is asked, and the others a few milliseconds later, or
	// never if the hold has been released by then: that saves 4 of 10 requests for a short section on five servers.
	// For those milliseconds the hold cannot lose a vote.
	WaitForAll bool

	// AllowVolatileEviction accepts servers with a maxmemory limit and a maxmemory-policy of volatile-…, the default of
	// some hosted ones. A full server then evicts votes; a majority of such servers may vote twice.
	AllowVolatileEviction bool

	// AssumeVersion is for servers that do not answer INFO, or not to this user: the version of Redis that they all
	// have or are compatible with, such as "7.0", at least 6.0. INFO is then not asked: a restarted server is not
	// detected and votes immediately, even if it has forgotten its votes, and a server that is listed twice votes
	// twice. Use it where all servers have appendfsync always. Default: INFO is asked.
	AssumeVersion string

	// Clock measures validity. Default backend.SystemClock.
	Clock backend.Clock
}

// Driver is a backend.Driver, backend.Pinger and backend.Inspector on several independent Redis servers. Make it with
// New or Open. All methods are safe for concurrent use, and return within their contexts. Close it when no client uses
// it any more: it closes the driver's own clients, and never the clients given to New.
type Driver struct {
	*engine.Driver
	service *service
}

var (
	_ backend.Driver    = (*Driver)(nil)
	_ backend.Pinger    = (*Driver)(nil)
	_ backend.Inspector = (*Driver)(nil)
)

// New returns a driver on the servers that clients connect to: an odd number of at least three, one *goredis.Client for
// each. It does no I/O; problems of the clients or the servers show in Ping or in the first call, as an error that
// wraps backend.ErrMisconfigured or backend.ErrInvalidOption.
//
// The driver makes its own clients from copies of the options, since it must check each server on every new
// connection and must know of each command whether it was sent: hooks added with AddHook are not carried over. Close
// closes these clients, and never the given ones.
func New(clients []goredis.UniversalClient, o *Options) *Driver {
	s := &service{
		gate: kit.NewGate(), seed: maphash.MakeSeed(), identity: rand.Text()[:13], quarantine: true, quorum: len(clients)/2 + 1,
		patience: redisconn.ConnectTime, laterTime: laterTime, hedgeTime: hedgeTime,
	}
	if o != nil {
		s.o = *o
	}
	s.o.KeyPrefix = cmp.Or(s.o.KeyPrefix, redisconn.DefaultPrefix)
	s.o.MaxTTL = cmp.Or(s.o.MaxTTL, defaultMaxTTL)
	s.clock = cmp.Or(s.o.Clock, backend.SystemClock())
	s.unfit = s.o.check(len(clients))
	for i, c := range clients {
		opt, err := optionsOf(c)
		if err != nil {
			// The error names the first unfit client.
			if s.unfit == nil {
				s.unfit = fmt.Errorf("server %d of %d: %w", i+1, len(clients), err)
			}
			continue
		}
		s.nodes = append(s.nodes, newNode(s, i, opt))
	}
	return &Driver{Driver: engine.New(s), service: s}
}

// check refuses options that cannot be meant.
func (o *Options) check(servers int) error {
	switch {
	case servers < 3:
		return kit.InvalidOption("number of servers", strconv.Itoa(servers),
			"fewer than three survive no failure; use the redis driver for one")
	case servers%2 == 0:
		return kit.InvalidOption("number of servers", strconv.Itoa(servers),
			"an even number survives no more failures than one less, and splits votes evenly")
	case servers > maxNodes:
		return kit.InvalidOption("number of servers", strconv.Itoa(servers), "more than "+strconv.Itoa(maxNodes))
	case strings.ContainsAny(o.KeyPrefix, "{}"):
		return kit.InvalidOption("KeyPrefix", strconv.Quote(o.KeyPrefix), redisconn.NoBraces)
	case o.NodeTimeout < 0:
		return kit.InvalidOption("NodeTimeout", o.NodeTimeout.String(), "it is negative")
	case o.MaxTTL < minTTL:
		return kit.InvalidOption("MaxTTL", o.MaxTTL.String(), "it is below the shortest TTL, "+minTTL.String())
	case o.AssumeVersion != "":
		if _, err := redisconn.ParseVersion(o.AssumeVersion); err != nil {
			return kit.InvalidOption("AssumeVersion", strconv.Quote(o.AssumeVersion), err.Error())
		}
	}
	return nil
}

// optionsOf returns the options for the driver's own client of c's server. Clients that may lead to another server
// tomorrow, of Sentinel or a cluster, are refused: a vote must come from the server that gave it.
func optionsOf(c goredis.UniversalClient) (*goredis.Options, error) {
	refuse := func(value, why string) error {
		return &backend.ConfigError{Setting: "client", Value: value, Want: "a *redis.Client of one server", Why: why}
	}
	if err := redisconn.CheckClient(c); err != nil {
		return nil, err
	}
	switch c := c.(type) {
	case *goredis.Client:
		opt := *c.Options()
		if opt.Addr == "FailoverClient" { // go-redis writes this for a client of Sentinel
			return nil, refuse("a client of Sentinel",
				"a failover replaces the server by a server that may not know its locks")
		}
		return &opt, nil
	case *goredis.ClusterClient:
		return nil, refuse("*redis.ClusterClient", "the servers of a cluster are not independent: they fail over")
	}
	return nil, refuse(fmt.Sprintf("%T", c), "each vote needs a separate server")
}

// Describe is engine.Service's. Exclusion is always ExclusionVolatileServer: no single value describes servers with
// different settings.
func (s *service) Describe() backend.Description {
	return backend.Description{
		Name: driverName, Clock: s.clock, Exclusion: backend.ExclusionVolatileServer,
		Capabilities: backend.CapMinHold | backend.CapMetadata | backend.CapInspect,
		MinTTL:       minTTL, MaxTTL: s.o.MaxTTL, TTLGranularity: time.Millisecond, Margin: ownMargin,
		Shows: backend.Shows{
			Look: backend.StateFields{ExpiresIn: true, Waiters: true}, RetryAfter: true,
		},
		NoFencing: "Redlock's servers share no order of events, so no number that grows with every grant comes out " +
			"of a majority of them; and its exclusion rests on their clocks",
	}
}
