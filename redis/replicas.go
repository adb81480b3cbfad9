package redis

import (
	"context"
	"errors"
	"fmt"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/engine"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

const (
	// replicaTimeout is the default of Options.ReplicaTimeout, for the replicas to confirm.
	replicaTimeout = 500 * time.Millisecond
	// maxReplicas catches mistakes: a number that no server has.
	maxReplicas = 100
)

// ReplicasError is the cause of a call that failed because too few replicas have confirmed it: see Options.Replicas.
// Its chain also has backend.ErrUnavailable, or ErrUnknown if it is not certain that the grant was released.
type ReplicasError struct {
	// Replicas that were asked for, and that have confirmed.
	Want, Got int
	// How long they had for it.
	Within time.Duration
	// They were to have it on disk: Options.ReplicaDisk.
	Disk bool
}

// Error returns a message with the number of confirmed replicas and the time.
func (e *ReplicasError) Error() string {
	where := ""
	if e.Disk {
		where = " on disk"
	}
	return fmt.Sprintf("%d replicas have it%s after %v, %d are asked for", e.Got, where, e.Within, e.Want)
}

// confirmed waits until replicas have the new grants. If they do not, it releases all of them, since a set is granted
// as a whole or not at all, and refuses the requests permanently: a request that waits does not wait for replicas. A
// hold that an earlier attempt was granted stays: its nonce has the instant before, of the last hold before these, or
// an earlier one. The replicas have their own time, within the caller's context.
func (s *service) confirmed(ctx context.Context, rs []engine.Entering, all []engine.Position, before int64) error {
	ctx = engine.Caller(ctx)
	grants := make([]backend.Grant, len(rs))
	for i := range rs {
		grants[i] = rs[i].Grant()
		grants[i].Incarnation, grants[i].MinHoldUntil = all[i].Incarnation, all[i].MinHoldUntil
	}
	c := confirmation{s: s}
	for i := range grants {
		err := c.of(ctx, &grants[i])
		if err == nil {
			continue
		}
		var made []backend.Grant
		for i, e := range rs {
			if e.Again || e.Handed != "" || instantIn(all[i].Incarnation) > before {
				made = append(made, grants[i])
			}
		}
		if err := s.takeBack(ctx, made); err != nil {
			return err
		}
		if !redisconn.FailureOf(err).Fatal {
			err = fmt.Errorf("%w: %w", backend.ErrUnavailable, err)
		}
		return &engine.Refusal{Err: err}
	}
	return nil
}

// confirmRenewals has replicas confirm renewals.
func (s *service) confirmRenewals(ctx context.Context, holds []engine.Holding, out []engine.Outcome) {
	c := confirmation{s: s}
	ctx = engine.Caller(ctx)
	for i := range holds {
		if s.o.Replicas > 0 && out[i].Err == nil && !out[i].Gone {
			out[i].Err = c.of(ctx, &holds[i].Grant)
		}
	}
}

// confirmation asks the replicas of each server once for all grants of one step, since WAIT covers all earlier writes
// of the server.
type confirmation struct {
	s     *service
	asked map[goredis.Cmdable]error
}

// of waits until replicas have a hold. On a cluster the replicas of the name's master count.
func (c *confirmation) of(ctx context.Context, g *backend.Grant) error {
	var master goredis.Cmdable = c.s.client
	if cluster, ok := c.s.client.(*goredis.ClusterClient); ok {
		var err error
		if master, err = lines.MasterOf(ctx, cluster, c.s.keys(g.Name).Lock); err != nil {
			return err
		}
	}
	err, ok := c.asked[master]
	if ok {
		return err
	}
	err = c.s.replicated(ctx, master, g)
	if c.asked == nil {
		c.asked = map[goredis.Cmdable]error{}
	}
	c.asked[master] = err
	return err
}

// replicated prolongs one hold on master and waits for the replicas to have that, for half of the TTL at most: a grant
// that took longer would be worth little to its caller.
func (s *service) replicated(ctx context.Context, master goredis.Cmdable, g *backend.Grant) error {
	within := min(s.o.ReplicaTimeout, max(g.TTL/2, time.Millisecond))
	got, err := lines.QuestionFor(ctx, within+s.patience, func(ctx context.Context) (int, error) {
		return s.waitFor(ctx, master, g, within)
	})
	if want := s.o.Replicas; err == nil && got < want {
		err = &redisconn.Failure{Cause: &ReplicasError{Want: want, Got: got, Within: within, Disk: s.o.ReplicaDisk}}
	}
	return err
}

// waitFor writes and returns how many replicas have the write. The write is the script's accept step with slightly more
// time than the hold has, because WAIT covers the writes of the same connection, and a prolongation without a change is
// not replicated. It uses the client and not a line: WAIT blocks its connection for as long as the replicas take, and
// with it all other steps.
func (s *service) waitFor(ctx context.Context, master goredis.Cmdable, g *backend.Grant, within time.Duration) (
	int, error,
) {
	keys, sharded, accept := s.keys(g.Name), "0", redisscript.Accept
	if s.lines.Sharded.Load() {
		sharded = "1"
	}
	if g.Kind != backend.KindExclusive {
		accept = redisscript.GroupAccept
	}
	// The call is the script's own format, written out: one accept step for one name.
	names := []string{keys.Lock, keys.Queue, keys.Seen}
	args := []any{
		s.channel(""), sharded, accept, "2", redisconn.StartOf(*g),
		redisscript.Millis(redisconn.PXOf(*g, s.clock.Now()) + 2*time.Millisecond),
	}
	limit := (within + time.Millisecond - 1).Milliseconds() // 0 would be without a limit
	ask := func(write func(goredis.Pipeliner) *goredis.Cmd) (wrote, waited *goredis.Cmd) {
		pipe := master.Pipeline()
		wrote = write(pipe)
		if s.o.ReplicaDisk {
			waited = pipe.Do(ctx, "waitaof", 0, s.o.Replicas, limit)
		} else {
			waited = pipe.Do(ctx, "wait", s.o.Replicas, limit)
		}
		_, _ = pipe.Exec(ctx) // each has its own error
		return wrote, waited
	}
	wrote, waited := ask(func(p goredis.Pipeliner) *goredis.Cmd {
		return p.EvalSha(ctx, redisscript.SHA, names, args...)
	})
	if goredis.HasErrorPrefix(wrote.Err(), "NOSCRIPT") {
		wrote, waited = ask(func(p goredis.Pipeliner) *goredis.Cmd {
			return p.Eval(ctx, redisscript.Source, names, args...)
		})
	}
	answers, err := wrote.Slice()
	switch {
	case err != nil:
		return 0, err
	case waited.Err() != nil:
		return 0, waited.Err()
	// The script answers for its one step: any other answer means that there was no hold to prolong.
	case len(answers) != 1 || answers[0] != int64(1):
		return 0, errors.New("the hold ended before replicas confirmed it")
	case !s.o.ReplicaDisk:
		return waited.Int()
	}
	both, err := waited.Int64Slice() // on the server itself, and on replicas
	if err != nil || len(both) != 2 {
		return 0, errAnswer
	}
	return int(both[1]), nil
}

// takeBack releases grants that replicas did not confirm. Without an answer they may still be held. It uses Expire,
// which keeps a hold that another driver was also granted.
func (s *service) takeBack(ctx context.Context, grants []backend.Grant) error {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	steps := make([]*lines.Step, len(grants))
	for i := range grants {
		steps[i] = lines.NewStep(redisscript.Expire, s.keys(grants[i].Name), redisconn.StartOf(grants[i]), "0")
	}
	_, errs := s.doAll(ctx, steps)
	if err := errors.Join(errs...); err != nil {
		return &engine.Unanswered{Err: err}
	}
	return nil
}

// canWait refuses a server that cannot ask its replicas whether they have something on disk: WAITAOF came with Redis
// 7.2.
func (o *Options) canWait(server redisconn.Server) error {
	if !o.ReplicaDisk || server.AtLeast(7, 2) {
		return nil
	}
	return &backend.ConfigError{
		Setting: "redis_version", Value: server.Version(), Want: "7.2 or later", Why: "Options.ReplicaDisk needs WAITAOF",
	}
}
