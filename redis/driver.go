package redis

import (
	"cmp"
	"context"
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
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// driverName is the driver's name in errors and descriptions.
const driverName = "redis"

// Options configure a Driver. The zero value is ready to use. New copies them, so they may be changed afterwards.
type Options struct {
	// KeyPrefix starts every key and channel; all clients of one set of locks use the same. It has no braces. Default
	// "fencelock:".
	KeyPrefix string

	// AllowVolatileEviction accepts a server with a maxmemory limit and a maxmemory-policy of volatile-…, the default
	// of some hosted ones. All keys of locks have a time to live, so a full server evicts held locks, with
	// volatile-ttl before other keys: two holders at the same time, until the first one's next renewal. Monitor
	// evicted_keys.
	AllowVolatileEviction bool

	// Assume is for servers that do not answer INFO, such as proxies, or not to this user: it replaces the answer of
	// INFO, and is not checked. nil: INFO is asked.
	Assume *Server

	// Replicas is the number of replicas that must have a hold before it is granted or renewed: WAIT, after each
	// grant and each renewal, in one more round trip. With fewer, a grant is released and the call fails with a
	// ReplicasError, even with Wait, and a renewal fails. 0: no WAIT. See the package comment for benefit and limits.
	Replicas int

	// ReplicaTimeout bounds the wait for the replicas, at most half of the TTL. Default 500 ms.
	ReplicaTimeout time.Duration

	// ReplicaDisk requires that they have it in their append-only files, on disk: WAITAOF, from Redis 7.2.
	ReplicaDisk bool

	// Clock measures validity. Default backend.SystemClock.
	Clock backend.Clock
}

// Server replaces the answer of INFO, see Options.Assume.
type Server struct {
	// Version is the Redis version, or a version that the server is compatible with, such as "7.0"; at least 6.0.
	Version string

	// Cluster declares that names may be on different servers although the client is for a single server: behind a proxy.
	Cluster bool
}

// Driver is a backend.Driver, Pinger, Inspector, Lister, ForceReleaser, MultiAcquirer and Expirer on Redis. Make it with
// New or Open; the zero value is not usable. All methods are safe for concurrent use, return within 50 ms of the end of
// their context, and wrap backend.ErrClosed after Close.
type Driver struct {
	*engine.Driver
	service *service
}

var (
	_ backend.Driver        = (*Driver)(nil)
	_ backend.Pinger        = (*Driver)(nil)
	_ backend.Inspector     = (*Driver)(nil)
	_ backend.Lister        = (*Driver)(nil)
	_ backend.ForceReleaser = (*Driver)(nil)
	_ backend.MultiAcquirer = (*Driver)(nil)
	_ backend.Expirer       = (*Driver)(nil)
)

// New returns a driver on client, which may be a *goredis.Client (also from NewFailoverClient), a
// *goredis.ClusterClient, or a type that embeds a *goredis.Client. It does no I/O; problems of the client or the
// server show in Ping or in the first call, as an error that wraps backend.ErrMisconfigured or
// backend.ErrInvalidOption.
//
// Lock commands use the driver's own connections, made from client's options: whatever client's retries and timeouts, a
// lock command is sent once, and never outlives its context. For other commands the driver uses client if that
// has MaxRetries: -1 and ContextTimeoutEnabled: true, and otherwise its own client from a copy of the options, with
// these two changed. The copy of a Sentinel client finds the master through the original, so do not close that client
// before the driver.
//
// Hooks that were added to client with AddHook before New see the lock commands, see the package comment: New adds a
// hook to client for that, which passes all other commands on.
//
// The driver never closes client.
func New(client goredis.UniversalClient, o *Options) *Driver {
	if o == nil {
		o = &Options{}
	}
	fitting, own, unfit := fit(client)
	d := newDriver(fitting, own, unfit, o)
	if unfit == nil {
		d.service.lines.ShowTo(client)
	}
	return d
}

// newDriver returns a driver on a client; unfit is the reason why the client is unfit, or nil. A mistake in the
// options takes precedence.
func newDriver(client goredis.UniversalClient, own bool, unfit error, o *Options) *Driver {
	s := &service{
		o: *o, client: client, own: own, unfit: cmp.Or(o.check(), unfit), patience: redisconn.ConnectTime,
		identity: rand.Text()[:13], clock: cmp.Or(o.Clock, backend.SystemClock()), seed: maphash.MakeSeed(),
		gate: kit.NewGate(),
	}
	s.o.KeyPrefix = cmp.Or(o.KeyPrefix, redisconn.DefaultPrefix)
	s.o.ReplicaTimeout = cmp.Or(o.ReplicaTimeout, replicaTimeout)
	if o.Assume != nil {
		assumed := *o.Assume
		s.o.Assume = &assumed
	}
	s.probe.turn = make(chan struct{}, 1)
	s.lines = lines.New(client, s.clock, s.channel(""), s.probe.suspect)
	if o.Assume != nil && o.Assume.Cluster {
		s.lines.Sharded.Store(true)
	}
	return &Driver{Driver: engine.New(s), service: s}
}

// check refuses options that cannot be meant, such as ways to confirm without a number of replicas that do.
func (o *Options) check() error {
	switch {
	case strings.ContainsAny(o.KeyPrefix, "{}"):
		return kit.InvalidOption("KeyPrefix", strconv.Quote(o.KeyPrefix), redisconn.NoBraces)
	case o.Replicas < 0 || o.Replicas > maxReplicas:
		return kit.InvalidOption("Replicas", strconv.Itoa(o.Replicas), fmt.Sprint("want 0 to ", maxReplicas))
	case o.ReplicaTimeout < 0:
		return kit.InvalidOption("ReplicaTimeout", o.ReplicaTimeout.String(), "it is negative")
	case o.Replicas == 0 && (o.ReplicaTimeout > 0 || o.ReplicaDisk):
		return kit.InvalidOption("Replicas", "0", "ReplicaTimeout and ReplicaDisk say how replicas confirm")
	case o.Assume == nil:
		return nil
	}
	stated, err := redisconn.ParseVersion(o.Assume.Version)
	if err != nil {
		return kit.InvalidOption("Assume.Version", strconv.Quote(o.Assume.Version), err.Error())
	}
	return o.canWait(stated)
}

// Expire ends a hold as its expiry would, in one round trip: unlike Release it keeps a hold that was granted to
// another driver too, so that one of two gateways cannot end the other's hold. With a minimum hold the name stays
// closed until that is over. A hold that has ended, or was granted to others too, is backend.ErrNotHeld.
func (d *Driver) Expire(ctx context.Context, g backend.Grant) error {
	return engine.Expire(ctx, d.Driver, g)
}
