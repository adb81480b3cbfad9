package redis

import (
	"context"
	"errors"
	"sync"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
)

const probeTime = redisconn.ConnectTime // for one probe, unless a URL says otherwise, whatever the callers' contexts allow

// Ping implements backend.Pinger: it asks every master for INFO and refuses a server that evicts keys, a replica, and
// versions before 6.0.
func (d *Driver) Ping(ctx context.Context) error {
	err := backend.ErrClosed
	if !d.gate.Closed() {
		err = d.ask(ctx)
	}
	if err != nil {
		return redisconn.CallError(ctx, driverName, "ping", "", err)
	}
	return nil
}

// When the server is looked at again: after a while, and sooner after a fault, since another server may have taken its
// place.
const (
	probeAgain = 30 * time.Second
	probeSoon  = time.Second // at most once in that time
)

// What the last look at the server has found.
const (
	probeFits  uint32 = iota // or has not been made
	probeStale               // that is long ago, or there was a fault since
	probeMisfit
)

// known lets a call pass whose driver has seen its server: what is held can be kept and given back whatever became of
// the server since.
func (d *Driver) known(ctx context.Context) error {
	if d.probe.Passed() {
		return nil
	}
	return d.ask(ctx)
}

// ready runs the probe unless it has passed. One that is stale is made again beside the calls, and what it finds is for
// those that come later.
func (d *Driver) ready(ctx context.Context) error {
	if !d.probe.Passed() {
		return d.ask(ctx)
	}
	switch d.probed.Load() {
	case probeMisfit:
		return d.ask(ctx)
	case probeStale:
		if d.probed.CompareAndSwap(probeStale, probeFits) {
			d.gate.Go(func(ctx context.Context) { _ = d.probe.Join(ctx, d.gate, d.inspect) }) // inspect notes the outcome
		}
	}
	return nil
}

// suspect has the server looked at again with the next call.
func (d *Driver) suspect() {
	if d.clock.Now().Sub(backend.Instant(d.probedAt.Load())) > probeSoon {
		d.probed.CompareAndSwap(probeFits, probeStale)
	}
}

func (d *Driver) ask(ctx context.Context) error {
	if d.unfit != nil {
		return d.unfit
	}
	return d.probe.Join(ctx, d.gate, d.inspect)
}

// inspect asks the servers, and notes what it has found. A server that does not answer is as fit as it was.
func (d *Driver) inspect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.patience)
	defer cancel()
	err := d.judge(ctx)
	d.probedAt.Store(int64(d.clock.Now()))
	again := probeAgain
	switch {
	case err == nil:
		d.probed.Store(probeFits)
	case errors.Is(err, backend.ErrMisconfigured):
		d.probed.Store(probeMisfit)
		return err
	default:
		again = probeSoon
	}
	time.AfterFunc(redisscript.Jitter(again), func() { d.probed.CompareAndSwap(probeFits, probeStale) })
	return err
}

// judge asks the servers and draws the conclusions.
func (d *Driver) judge(ctx context.Context) error {
	if d.assumed != nil {
		return d.tryScript(ctx)
	}
	masters, err := d.masters(ctx)
	if err != nil {
		return err
	}
	cluster, setGet, durable, replicas := false, true, true, isSentinel(d.client)
	for _, s := range masters {
		s.Tolerated = d.evictable
		if err := s.Fit(); err != nil {
			return err
		}
		cluster = cluster || s.Cluster
		setGet = setGet && s.AtLeast(6, 2)
		durable = durable && s.Durable && !s.Evicts()
		replicas = replicas || s.Cluster || s.Replicas > 0
	}
	if _, ok := d.client.(*goredis.Client); ok && cluster {
		return &backend.ConfigError{
			Setting: "client", Value: "*redis.Client", Want: "a *redis.ClusterClient",
			Why: "the server is a node of a cluster (cluster_enabled:1)",
		}
	}
	d.batch.cluster.Store(cluster)
	d.setGet.Store(setGet)
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

// tryScript takes what was assumed of the server for true, and sees whether it runs the script.
func (d *Driver) tryScript(ctx context.Context) error {
	d.batch.cluster.Store(d.assumed.Cluster)
	d.setGet.Store(d.setGetAssumed)
	s := newStep(redisscript.Inform, redisscript.KeysOf(d.prefix, "probe"))
	if err := d.batch.do(ctx, s); err != nil {
		f := *redisconn.FailureOf(err)
		f.Sent = false // a question changes nothing
		return &f
	}
	s.free()
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
		f := *redisconn.FailureOf(err)
		f.Sent = false // a question changes nothing
		return nil, &f
	}
	return all, nil
}
