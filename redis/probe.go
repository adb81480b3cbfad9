package redis

// This file decides whether the server may be used for locks, and which exclusion it can promise. The first call
// asks INFO and runs the script once; later looks are made in the background, after a fault, with a new connection, and
// every half minute (redisconn.Probe). The result of a look applies from the next Acquire on. Renew and Release go on
// in any case: a hold on a server that has become unfit is still best renewed and released.

import (
	"context"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

// probeTime is for one probe, unless a URL says otherwise. It does not depend on the contexts of the calls that wait
// for it: one impatient caller would fail the probe for all of them.
const probeTime = redisconn.ConnectTime

// Ping asks every master for INFO and refuses a server that evicts keys, a replica, and versions before 6.0, with an
// error that wraps backend.ErrMisconfigured; backend.ErrUnavailable if one does not answer, backend.ErrClosed after
// Close. It returns within ctx and may be called beside other calls, which share one look if they come at the same
// time.
func (d *Driver) Ping(ctx context.Context) error {
	return redisconn.CallError(ctx, driverName, "ping", "", d.probe.Ping(ctx, d.inspect))
}

// suspect makes the next call look at the server: it may be another one, or have other settings.
func (d *Driver) suspect() { d.probe.Suspect(d.clock.Now()) }

// inspect is one look: it asks the servers and records the result. It runs on a goroutine of the gate and ends after
// the driver's patience. The first look behind Sentinels also starts the goroutine that follows the master, because New
// promises not to do I/O or start goroutines.
func (d *Driver) inspect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.patience)
	defer cancel()
	if lines.IsSentinel(d.client) {
		d.follow.Do(func() {
			opt := *d.client.(*goredis.Client).Options()
			d.gate.Go(func(context.Context) { d.lines.Follow(d.gate.Closing(), opt) })
		})
	}
	err := d.judge(ctx)
	d.probe.Note(d.clock.Now(), err)
	return err
}

// judge asks the servers and draws the conclusions: whether they are fit, whether names may be on different servers,
// and how much exclusion they can promise. On a cluster the weakest master decides.
//
// With Options.Assume it only asks whether the script runs: INFO may be refused or answered by a proxy about
// itself.
func (d *Driver) judge(ctx context.Context) error {
	if d.o.Assume != nil {
		d.lines.Sharded.Store(d.o.Assume.Cluster)
		return d.tryScript(ctx)
	}
	masters, err := lines.EachMaster(ctx, d.client, redisconn.ReadServer)
	if err != nil {
		return redisconn.Unsent(err) // the settings of a master without an answer are unknown
	}
	// Behind Sentinels there are replicas, or will be.
	cluster, durable, replicas := false, true, lines.IsSentinel(d.client)
	for _, s := range masters {
		s.Tolerated = d.o.AllowVolatileEviction
		if err := s.Fit(); err != nil {
			return err
		}
		if err := d.o.canWait(s); err != nil {
			return err
		}
		cluster = cluster || s.Cluster
		durable = durable && s.Durable && !s.Evicts()
		replicas = replicas || s.Cluster || s.Replicas > 0
	}
	// A single client would not follow the cluster's redirections, and would see only this node's names.
	if _, ok := d.client.(*goredis.Client); ok && cluster {
		return &backend.ConfigError{
			Setting: "client", Value: "*redis.Client", Want: "a *redis.ClusterClient",
			Why: "the server is a node of a cluster (cluster_enabled:1)",
		}
	}
	d.lines.Sharded.Store(cluster || lines.IsCluster(d.client))
	if !d.probe.Passed() {
		// A lock is taken without the script, by SET NX, and could not be released if the script may not run.
		if err := d.tryScript(ctx); err != nil {
			return err
		}
	}
	switch {
	// A replica does not mend this: it is emptied by a master that comes back empty.
	case !durable:
		d.exclusion.Store(uint32(backend.ExclusionVolatileServer))
	case replicas:
		d.exclusion.Store(uint32(backend.ExclusionAsyncReplica))
	default:
		d.exclusion.Store(uint32(backend.ExclusionDurableServer))
	}
	return nil
}

// tryScript sees whether the server runs the script, with a question about a name that nobody needs. A user that may
// not run it, or a proxy that does not pass it on, shows here and not with the first release.
func (d *Driver) tryScript(ctx context.Context) error {
	_, _, err := d.lines.Do(ctx, lines.NewStep(redisscript.Inform, d.keys("probe")))
	if err != nil {
		return redisconn.Unsent(err)
	}
	return nil
}
