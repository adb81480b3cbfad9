package redis

import (
	"context"
	"sync"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const probeTime = redisconn.ConnectTime // for one probe, unless a URL says otherwise, whatever the callers' contexts allow

// Ping asks every master for INFO and refuses a server that evicts keys, a replica, and versions before 6.0, with an
// error that wraps backend.ErrMisconfigured; backend.ErrUnavailable if one does not answer.
func (d *Driver) Ping(ctx context.Context) error {
	err := backend.ErrClosed
	if !d.gate.Closed() {
		err = d.ask(ctx)
	}
	return redisconn.CallError(ctx, driverName, "ping", "", err)
}

// known lets a call pass whose driver has seen its server: what is held can be kept and given back whatever became of
// the server since.
func (d *Driver) known(ctx context.Context) error {
	if d.probe.Passed() {
		return nil
	}
	return d.ask(ctx)
}

// ready runs the probe unless it has passed.
func (d *Driver) ready(ctx context.Context) error {
	if d.unfit != nil {
		return d.unfit
	}
	return d.probe.Ready(ctx, d.gate, d.inspect)
}

// suspect has the server looked at again with the next call.
func (d *Driver) suspect() { d.probe.Suspect(d.clock.Now()) }

func (d *Driver) ask(ctx context.Context) error {
	if d.unfit != nil {
		return d.unfit
	}
	return d.probe.Join(ctx, d.gate, d.inspect)
}

// inspect asks the servers, and notes what it has found.
func (d *Driver) inspect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.patience)
	defer cancel()
	if isSentinel(d.client) {
		d.follow.Do(func() {
			opt := *d.client.(*goredis.Client).Options()
			d.gate.Go(func(context.Context) { d.batch.lines.follow(d.gate.Closing(), opt) })
		})
	}
	err := d.judge(ctx)
	d.probe.Note(d.clock.Now(), err)
	return err
}

// judge asks the servers and draws the conclusions.
func (d *Driver) judge(ctx context.Context) error {
	if d.assumed != nil {
		d.batch.lines.sharded.Store(d.assumed.Cluster)
		return d.tryScript(ctx)
	}
	masters, err := d.masters(ctx)
	if err != nil {
		return err
	}
	cluster, durable, replicas := false, true, isSentinel(d.client)
	for _, s := range masters {
		s.Tolerated = d.evictable
		if err := s.Fit(); err != nil {
			return err
		}
		if err := d.canWait(s); err != nil {
			return err
		}
		cluster = cluster || s.Cluster
		durable = durable && s.Durable && !s.Evicts()
		replicas = replicas || s.Cluster || s.Replicas > 0
	}
	if _, ok := d.client.(*goredis.Client); ok && cluster {
		return &backend.ConfigError{
			Setting: "client", Value: "*redis.Client", Want: "a *redis.ClusterClient",
			Why: "the server is a node of a cluster (cluster_enabled:1)",
		}
	}
	d.batch.lines.sharded.Store(cluster)
	if !d.probe.Passed() {
		if err := d.tryScript(ctx); err != nil { // a lock is taken without it, and could not be given back
			return err
		}
	}
	switch {
	case !durable: // which a replica does not mend: it is emptied by a master that comes back empty
		d.exclusion.Store(uint32(backend.ExclusionVolatileServer))
	case replicas:
		d.exclusion.Store(uint32(backend.ExclusionAsyncReplica))
	default:
		d.exclusion.Store(uint32(backend.ExclusionDurableServer))
	}
	return nil
}

// tryScript sees whether the server runs the script.
func (d *Driver) tryScript(ctx context.Context) error {
	_, _, err := d.batch.do(ctx, newStep(redisscript.Inform, redisscript.KeysOf(d.prefix, "probe")))
	if err != nil {
		return redisconn.Unsent(err)
	}
	return nil
}

// isSentinel reports whether client finds its server through Sentinel.
func isSentinel(client goredis.UniversalClient) bool {
	c, ok := client.(*goredis.Client)
	return ok && c.Options().Addr == "FailoverClient" // what go-redis writes for one
}

// masters reads INFO of every master.
func (d *Driver) masters(ctx context.Context) ([]redisconn.Server, error) {
	cluster, ok := d.client.(*goredis.ClusterClient)
	if !ok {
		s, err := redisconn.ReadServer(ctx, d.client)
		return []redisconn.Server{s}, err
	}
	var mu sync.Mutex
	var all []redisconn.Server
	err := cluster.ForEachMaster(ctx, func(ctx context.Context, c *goredis.Client) error {
		s, err := redisconn.ReadServer(ctx, c)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, s)
		return nil
	})
	if err != nil {
		return nil, redisconn.Unsent(err)
	}
	return all, nil
}
