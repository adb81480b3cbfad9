package redis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

const (
	// probeInterval is the time after which the servers are looked at again.
	probeInterval = 30 * time.Second
	// suspectInterval is that time after a failure.
	suspectInterval = time.Second
)

// probe holds the result of the last look at the servers. The engine makes the first look. Later ones are made beside
// the calls, unless the last one has found an unfit server.
type probe struct {
	found  atomic.Uint32 // a backend.Exclusion; 0 before the first look that found fit servers
	misfit atomic.Bool   // the last look that was answered found an unfit server
	looked atomic.Int64  // the instant of the last look
	next   atomic.Int64  // the instant of the next one
	busy   atomic.Bool   // a look is made beside the calls
	turn   chan struct{} // has room for the token of the call that looks
	looks  atomic.Int64  // how many looks have ended
	result error         // of the last look; belongs to the call with the token
}

func (p *probe) exclusion() backend.Exclusion {
	if found := p.found.Load(); found != 0 {
		return backend.Exclusion(found)
	}
	return backend.ExclusionVolatileServer
}

// suspect brings the next look forward.
func (p *probe) suspect() {
	if soon := p.looked.Load() + int64(suspectInterval); soon < p.next.Load() {
		p.next.Store(soon)
	}
}

// Probe is engine.Prober's.
func (s *service) Probe(ctx context.Context) error { return s.Ping(ctx) }

// fit returns nil if the last look found fit servers, and starts a look when the next one is due. An unfit server is
// looked at by each call.
func (s *service) fit(ctx context.Context, now backend.Instant) error {
	p := &s.probe
	if p.misfit.Load() {
		return s.Ping(ctx)
	}
	if int64(now) >= p.next.Load() && p.busy.CompareAndSwap(false, true) {
		if !s.gate.Go(func(context.Context) {
			defer p.busy.Store(false)
			_ = s.Ping(s.gate.Closing()) // for the next calls
		}) {
			p.busy.Store(false)
		}
	}
	return nil
}

// Ping is engine.Service's: one look at the servers, shared by the calls that wait for it.
func (s *service) Ping(ctx context.Context) error {
	p := &s.probe
	before := p.looks.Load()
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return &redisconn.Failure{Cause: ctx.Err()}
	}
	if p.looks.Load() == before {
		p.result = s.survey(ctx)
		p.looks.Add(1)
	}
	err := p.result
	if err == nil || redisconn.FailureOf(err).Fatal {
		return err
	}
	if ended := redisconn.Ended(engine.Caller(ctx)); ended != nil && !errors.Is(err, ended) {
		return &redisconn.Failure{Cause: fmt.Errorf("%w: %w", ended, err)}
	}
	return err
}

// survey is one look at the servers.
func (s *service) survey(ctx context.Context) error {
	p := &s.probe
	if lines.IsSentinel(s.client) {
		s.following.Do(func() {
			s.gate.Go(func(context.Context) {
				s.lines.Follow(s.gate.Closing(), *s.client.(*goredis.Client).Options())
			})
		})
	}
	found, err := s.judge(ctx)
	unfit, again := errors.Is(err, backend.ErrMisconfigured), probeInterval
	switch {
	case err == nil:
		p.found.Store(uint32(found))
		p.misfit.Store(false)
	case unfit:
		p.misfit.Store(true)
		if config := (*backend.ConfigError)(nil); errors.As(err, &config) && config.Setting == "role" && p.found.Load() != 0 {
			err = fmt.Errorf("%w: %v", backend.ErrUnavailable, err) // a failover
		}
	default:
		again = suspectInterval // a server that does not answer is as fit as it was
	}
	now := s.clock.Now()
	p.looked.Store(int64(now))
	p.next.Store(int64(now.Add(redisscript.Jitter(again))))
	return err
}

// judge asks each master for INFO, and whether the script runs. On a cluster the weakest master decides. With
// Options.Assume it only asks whether the script runs.
func (s *service) judge(ctx context.Context) (backend.Exclusion, error) {
	if s.o.Assume != nil {
		s.lines.Sharded.Store(s.o.Assume.Cluster || lines.IsCluster(s.client))
		return backend.ExclusionVolatileServer, s.tryScript(ctx)
	}
	servers, err := lines.QuestionFor(ctx, s.patience, func(ctx context.Context) ([]redisconn.Server, error) {
		return lines.EachMaster(ctx, s.client, redisconn.ReadServer)
	})
	if err != nil {
		return 0, err
	}
	cluster, durable, replicas := false, true, lines.IsSentinel(s.client)
	for _, server := range servers {
		server.Tolerated = s.o.AllowVolatileEviction
		if err := server.Fit(); err != nil {
			return 0, err
		}
		if err := s.o.canWait(server); err != nil {
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
	if err := s.tryScript(ctx); err != nil {
		return 0, err
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

// tryScript finds out whether the server runs the scripts, with a question about an unused name. It also makes the
// server know them: a step that the server refuses because it does not know its script is lost with the answer.
func (s *service) tryScript(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	keys := s.keys("probe")
	_, errs := s.doAll(ctx, []*lines.Step{
		lines.NewStep(redisscript.Inform, keys), lines.NewStep(redisscript.Free, keys, "nobody's"),
	})
	if err := cmp.Or(errs...); err != nil {
		return redisconn.Unsent(err)
	}
	return nil
}
