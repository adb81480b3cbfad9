package redis

// This file decides whether the server may be used for locks, and what can be said of its exclusion. The first call
// asks INFO and runs the script once; later looks are made in the background, after a fault, with a new connection, and
// every half minute (redisconn.Probe). What a look finds holds from the next Acquire on. Renew and Release go on in any
// case: a hold on a server that has become unfit is still best kept and given back.

import (
	"context"
	"sync"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
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

// suspect has the server looked at again with the next call: it may be another one, or have other settings.
func (d *Driver) suspect() { d.probe.Suspect(d.clock.Now()) }

// inspect is one look: it asks the servers and notes what it has found. It runs on a goroutine of the gate's and ends
// after the driver's patience. The first look behind Sentinels also starts the goroutine that follows the master,
// because New promises to do no I/O and start nothing.
func (d *Driver) inspect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.patience)
	defer cancel()
	if isSentinel(d.client) {
		d.follow.Do(func() {
			opt := *d.client.(*goredis.Client).Options()
			d.gate.Go(func(context.Context) { d.lines.follow(d.gate.Closing(), opt) })
		})
	}
	err := d.judge(ctx)
	d.probe.Note(d.clock.Now(), err)
	return err
}

// judge asks the servers and draws the conclusions: whether they are fit, whether names may be on different servers,
// and how much exclusion they can promise. On a cluster the weakest master decides.
//
// With Options.Assume nothing is asked but whether the script runs: INFO may be refused or answered by a proxy about
// itself.
func (d *Driver) judge(ctx context.Context) error {
	if d.o.Assume != nil {
		d.lines.sharded.Store(d.o.Assume.Cluster)
		return d.tryScript(ctx)
	}
	masters, err := eachMaster(ctx, d.client, redisconn.ReadServer)
	if err != nil {
		return redisconn.Unsent(err) // what one that does not answer would say is not known
	}
	// Behind Sentinels there are replicas, or will be.
	cluster, durable, replicas := false, true, isSentinel(d.client)
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
	// A single client would follow none of the cluster's redirections, and would see only this node's names.
	if _, ok := d.client.(*goredis.Client); ok && cluster {
		return &backend.ConfigError{
			Setting: "client", Value: "*redis.Client", Want: "a *redis.ClusterClient",
			Why: "the server is a node of a cluster (cluster_enabled:1)",
		}
	}
	d.lines.sharded.Store(cluster || d.lines.cluster != nil)
	if !d.probe.Passed() {
		// A lock is taken without the script, by SET NX, and could not be given back if the script may not run.
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
	_, _, err := d.lines.do(ctx, newStep(redisscript.Inform, d.keys("probe")))
	if err != nil {
		return redisconn.Unsent(err)
	}
	return nil
}

// isSentinel reports whether client finds its server through Sentinel. go-redis 9 shows that nowhere but in the
// address, for which it writes FailoverClient.
func isSentinel(client goredis.UniversalClient) bool {
	c, ok := client.(*goredis.Client)
	return ok && c.Options().Addr == "FailoverClient" // what go-redis writes for one
}

// eachMaster asks every server that has locks, the masters of a cluster side by side, and returns their answers in no
// order. It ends with the first error.
func eachMaster[T any](ctx context.Context, client goredis.UniversalClient,
	ask func(context.Context, goredis.Cmdable) (T, error)) (all []T, err error) {
	cluster, ok := client.(*goredis.ClusterClient)
	if !ok {
		one, err := ask(ctx, client)
		return []T{one}, err
	}
	// Each master is asked by a goroutine of the client's: hence the lock.
	var mu sync.Mutex
	err = cluster.ForEachMaster(ctx, func(ctx context.Context, c *goredis.Client) error {
		one, err := ask(ctx, c)
		mu.Lock()
		defer mu.Unlock()
		all = append(all, one)
		return err
	})
	return all, err
}
