package binding

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

const (
	// probeInterval is the time after which an Enter looks at the server again.
	probeInterval = 30 * time.Second
	// suspectInterval is that time after a failure.
	suspectInterval = time.Second
)

// probe holds the result of the last look at the server. One Enter looks, the others continue meanwhile.
type probe struct {
	found     atomic.Uint32 // a backend.Exclusion; 0 before the first look
	looked    atomic.Int64  // the instant of the last look that found a fit server
	suspected atomic.Bool

	mu sync.Mutex // held by the call that looks
}

func (p *probe) exclusion() backend.Exclusion {
	if found := p.found.Load(); found != 0 {
		return backend.Exclusion(found)
	}
	return backend.ExclusionVolatileServer
}

func (p *probe) suspect() { p.suspected.Store(true) }

// Probe is engine.Prober's.
func (s *Service) Probe(ctx context.Context) error { return s.Ping(ctx) }

// fit looks at the server when the interval is over.
func (s *Service) fit(ctx context.Context) error {
	looked, interval := s.probe.looked.Load(), probeInterval
	if s.probe.suspected.Load() {
		interval = suspectInterval
	}
	if s.clock.Now() < backend.Instant(looked).Add(interval) {
		return nil
	}
	if !s.probe.mu.TryLock() {
		return nil
	}
	defer s.probe.mu.Unlock()
	if s.probe.looked.Load() != looked {
		return nil // another call has looked meanwhile
	}
	return s.inspect(ctx)
}

// Ping is engine.Service's: the look that the first Enter makes as well.
func (s *Service) Ping(ctx context.Context) error {
	s.probe.mu.Lock()
	defer s.probe.mu.Unlock()
	return s.inspect(ctx)
}

// inspect is one look at the servers.
func (s *Service) inspect(ctx context.Context) error {
	if lines.IsSentinel(s.client) {
		s.following.Do(func() {
			s.followed = make(chan struct{})
			go func() {
				defer close(s.followed)
				s.lines.Follow(s.closing, *s.client.(*goredis.Client).Options())
			}()
		})
	}
	found, err := s.judge(ctx)
	if err != nil {
		return err
	}
	s.probe.found.Store(uint32(found))
	s.probe.suspected.Store(false)
	s.probe.looked.Store(int64(s.clock.Now()))
	return nil
}

// judge asks each master for INFO, and whether the script runs. On a cluster the weakest master decides. With
// Options.Assume it only asks whether the script runs.
func (s *Service) judge(ctx context.Context) (backend.Exclusion, error) {
	if s.o.Assume != nil {
		s.lines.Sharded.Store(s.o.Assume.Cluster || lines.IsCluster(s.client))
		return backend.ExclusionVolatileServer, s.tryScript(ctx)
	}
	servers, err := lines.Question(ctx, func(ctx context.Context) ([]redisconn.Server, error) {
		return lines.EachMaster(ctx, s.client, redisconn.ReadServer)
	})
	if err != nil {
		return 0, err
	}
	cluster, durable, replicas := false, true, lines.IsSentinel(s.client)
	for _, server := range servers {
		server.Tolerated = s.o.AllowVolatileEviction
		if err := server.Fit(); err != nil {
			config := (*backend.ConfigError)(nil)
			if s.probe.found.Load() != 0 && errors.As(err, &config) && config.Setting == "role" {
				return 0, fmt.Errorf("%w: %v", backend.ErrUnavailable, err) // a failover
			}
			return 0, err
		}
		if err := CanWait(s.o.ReplicaDisk, server); err != nil {
			return 0, err
		}
		cluster = cluster || server.Cluster
		durable = durable && server.Durable && !server.Evicts()
		replicas = replicas || server.Cluster || server.Replicas > 0
	}
	// A single client would not follow the cluster's redirections, and would see only this node's names.
	if _, ok := s.client.(*goredis.Client); ok && cluster {
		return 0, &backend.ConfigError{
			Setting: "client", Value: "*redis.Client", Want: "a *redis.ClusterClient",
			Why: "the server is a node of a cluster (cluster_enabled:1)",
		}
	}
	s.lines.Sharded.Store(cluster || lines.IsCluster(s.client))
	if s.probe.found.Load() == 0 {
		if err := s.tryScript(ctx); err != nil {
			return 0, err
		}
	}
	switch {
	case !durable:
		return backend.ExclusionVolatileServer, nil
	case replicas:
		return backend.ExclusionAsyncReplica, nil
	default:
		return backend.ExclusionDurableServer, nil
	}
}

// tryScript finds out whether the server runs the script, with a question about a name that nobody needs.
func (s *Service) tryScript(ctx context.Context) error {
	_, _, err := s.lines.Do(ctx, lines.NewStep(redisscript.Inform, s.keys("probe")))
	if err != nil {
		return redisconn.Unsent(err)
	}
	return nil
}

// CanWait refuses a server that cannot ask its replicas whether they have something on disk: WAITAOF came with Redis
// 7.2.
func CanWait(disk bool, server redisconn.Server) error {
	if !disk || server.AtLeast(7, 2) {
		return nil
	}
	return &backend.ConfigError{
		Setting: "redis_version", Value: server.Version(), Want: "7.2 or later", Why: "Options.ReplicaDisk needs WAITAOF",
	}
}
