package redlock

// This file is the driver's public face: options, construction, and Describe. Where to read on:
//
//	acquire.go   an Acquire that does not wait; vote.go: one round of its votes; later.go: votes that follow a grant
//	contend.go   an Acquire that waits; look.go: its timed actions; waiters.go: the way of pushes to it
//	renew.go     Renew; release.go: Release; inspect.go: Look
//	leftover.go  clean-up of leftovers that no caller waits for
//	node.go      one server, and whether it may vote; survey.go: all of them
//	push.go      the subscriptions; poll.go, step.go: questions to nodes, and their answers; open.go: URLs
//
// The script and the connections are those of package redis (internal/redisscript, internal/rediswire): each server is
// an independent lock service, and this package counts votes.
//
// Locks: later.mu, Driver.roster, waiters.mu and node.leftoverMu are each taken alone, or before a line's lock. No lock
// is held while an answer is awaited.

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/kit"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
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
	// answers (appendonly yes, appendfsync always): after that time all that it may have forgotten has ended anyway.
	// All clients of one set of locks agree on it. Default one minute.
	MaxTTL time.Duration

	// TrustFresh gives a vote to servers which this driver meets for the first time although they have not been up for
	// MaxTTL. Set it for servers that never granted a lock: a first deployment, or tests. Servers that restart after
	// this driver has met them are excluded all the same; a restart while no driver ran is not detected.
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
// it any more.
type Driver struct {
	o Options
	// The prefix of channels.
	channels string
	clock    backend.Clock
	// identity names this driver's channels and marks its holds and places. It is random, and new for each driver.
	identity string
	nonces   atomic.Uint64
	nodes    []*node
	quorum   int

	probe redisconn.Probe
	// For one survey.
	patience time.Duration
	// roster protects the nodes' knowledge of their servers: if two nodes with the same server connect concurrently, at
	// least one must find that out.
	roster sync.Mutex
	// Off only in tests that show its purpose.
	quarantine bool

	waiters waiters
	// wanted are names that were refused within the last second: their requests go to the script at once.
	wanted redisconn.Wanted
	later  later
	// laterTime and hedgeTime are the constants of these names; tests that need other times set them.
	laterTime time.Duration
	hedgeTime time.Duration
	gate      *kit.Gate

	// subscribe starts the subscriptions, once. listened is closed by goAhead, when so many stand that the first
	// waiters need not wait for more; standing counts them.
	subscribe, goAhead func()
	listened           chan struct{}
	standing           atomic.Int32
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
	d := &Driver{
		gate: kit.NewGate(), identity: rand.Text()[:13], quarantine: true, quorum: len(clients)/2 + 1,
		patience: surveyTime, laterTime: laterTime, hedgeTime: hedgeTime, listened: make(chan struct{}),
	}
	d.subscribe, d.goAhead = sync.OnceFunc(d.subscribeAll), sync.OnceFunc(func() { close(d.listened) })
	if o != nil {
		d.o = *o
	}
	d.o.KeyPrefix = cmp.Or(d.o.KeyPrefix, redisconn.DefaultPrefix)
	d.o.MaxTTL = cmp.Or(d.o.MaxTTL, defaultMaxTTL)
	if d.clock = d.o.Clock; d.clock == nil {
		d.clock = backend.SystemClock()
	}
	d.channels = redisscript.Channel(d.o.KeyPrefix, "")
	d.probe = redisconn.Probe{Gate: d.gate, Unfit: d.o.check(len(clients)), Look: d.look}
	d.waiters.init()
	for i, c := range clients {
		opt, err := optionsOf(c)
		if err != nil {
			// The error names the first unfit client.
			if d.probe.Unfit == nil {
				d.probe.Unfit = fmt.Errorf("server %d of %d: %w", i+1, len(clients), err)
			}
			continue
		}
		d.nodes = append(d.nodes, newNode(d, i, opt))
	}
	return d
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
				"a failover replaces the server by one that may not know its locks")
		}
		return &opt, nil
	case *goredis.ClusterClient:
		return nil, refuse("*redis.ClusterClient", "the servers of a cluster are not independent: they fail over")
	}
	return nil, refuse(fmt.Sprintf("%T", c), "each vote needs one server of its own")
}

// Describe returns the capabilities of the driver, without I/O. Exclusion is always ExclusionVolatileServer: no
// single value describes servers with different settings.
func (d *Driver) Describe() backend.Description {
	return backend.Description{
		Name:  driverName,
		Clock: d.clock, Exclusion: backend.ExclusionVolatileServer,
		Capabilities:   backend.CapMinHold | backend.CapMetadata | backend.CapInspect,
		MinTTL:         minTTL,
		MaxTTL:         d.o.MaxTTL,
		TTLGranularity: time.Millisecond,
		Margin:         ownMargin,
		Shows: backend.Shows{
			Look: backend.StateFields{ExpiresIn: true, Waiters: true}, RetryAfter: true,
		},
		NoFencing: "Redlock's servers share no order of events, so no number that grows with every grant comes out " +
			"of a majority of them; and its exclusion rests on their clocks",
	}
}

// nodeTimeout is for how long a call on holds of ttl waits for silent servers.
func (d *Driver) nodeTimeout(ttl time.Duration) time.Duration {
	if d.o.NodeTimeout > 0 {
		return d.o.NodeTimeout
	}
	return min(max(ttl/4, 50*time.Millisecond), time.Second)
}

// keys returns the keys of a name.
func (d *Driver) keys(name string) redisscript.Keys { return redisscript.KeysOf(d.o.KeyPrefix, name) }

// Close ends waiters with backend.ErrClosed, and removes their votes and those of earlier calls, if ctx and the
// servers allow. It releases no holds, and closes its own clients but never the clients given to New. Close may be
// called again, and beside other calls, which fail with backend.ErrClosed from then on.
func (d *Driver) Close(ctx context.Context) error {
	first := d.gate.Close()
	err := d.gate.Wait(ctx)
	var ends []<-chan struct{}
	for _, n := range d.nodes {
		// All begin to end before any is waited for, so that they end concurrently.
		ends = append(ends, n.push.subscription.Close(), n.line.Close())
	}
	if err == nil { // otherwise the goroutines end with their connections
		err = redisconn.Await(ctx, ends...)
	}
	// Also when ctx has ended: closing a client ends the pending calls of its connections.
	if first {
		for _, n := range d.nodes {
			err = errors.Join(err, n.client.Close())
		}
	}
	return redisconn.CallError(ctx, driverName, "close", "", err)
}
