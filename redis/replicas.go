package redis

// This file has replicas confirm grants: Options.Replicas. After a grant, and after each renewal, the driver prolongs
// the hold by a little and sends WAIT (or WAITAOF) behind it on one connection, in one pipeline. The write is needed
// because WAIT covers the writes of the same connection: without one it answers immediately, whatever the replicas
// have.
//
// A grant that is not confirmed is released, and the call fails with a ReplicasError. doc.go states the benefit and the
// limits.

import (
	"context"
	"errors"
	"fmt"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/redisconn"
	"github.com/fencelock/fencelock/internal/redisscript"
	"github.com/fencelock/fencelock/redis/internal/lines"
)

const (
	// replicaTime is for the replicas to confirm, unless Options.ReplicaTimeout says otherwise.
	replicaTime = 500 * time.Millisecond
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

// Error says how many replicas have confirmed in how much time.
func (e *ReplicasError) Error() string {
	where := ""
	if e.Disk {
		where = " on disk"
	}
	return fmt.Sprintf("%d replicas have it%s after %v, %d are asked for", e.Got, where, e.Within, e.Want)
}

// confirmation asks the replicas of each server once for all grants of one call there, since WAIT covers all earlier
// writes of the server. It belongs to one call.
type confirmation struct {
	d     *Driver
	asked map[goredis.Cmdable]error
}

// of waits until replicas have g. It returns nil if Options.Replicas is 0. On a cluster the replicas of the name's own
// master count, so each master is asked separately, once per call: its answer for one grant covers all earlier grants.
func (c *confirmation) of(ctx context.Context, g backend.Grant) error {
	if c.d.o.Replicas == 0 {
		return nil
	}
	var master goredis.Cmdable = c.d.client
	if cluster, ok := c.d.client.(*goredis.ClusterClient); ok {
		var err error
		if master, err = lines.MasterOf(ctx, cluster, c.d.keys(g.Name).Lock); err != nil {
			return err
		}
	}
	// An earlier grant of the same call has asked this master, after all of them were written.
	err, ok := c.asked[master]
	if ok {
		return err
	}
	err = c.d.replicated(ctx, master, g)
	if c.asked == nil {
		c.asked = map[goredis.Cmdable]error{}
	}
	c.asked[master] = err
	return err
}

// confirmed waits until replicas have the new grants, and releases all of them if they do not: a set is granted
// as a whole or not at all.
func (d *Driver) confirmed(ctx context.Context, grants ...backend.Grant) error {
	c := confirmation{d: d}
	for _, g := range grants {
		if err := c.of(ctx, g); err != nil {
			return d.refuse(ctx, err, grants)
		}
	}
	return nil
}

// replicated prolongs one hold on master and waits for the replicas to have that, for half of the TTL at most: a grant
// that took longer would be worth little to its caller.
func (d *Driver) replicated(ctx context.Context, master goredis.Cmdable, g backend.Grant) error {
	within := min(d.o.ReplicaTimeout, max(g.TTL/2, time.Millisecond))
	got, err := lines.Question(ctx, func(ctx context.Context) (int, error) { return d.waitFor(ctx, master, g, within) })
	if want := d.o.Replicas; err == nil && got < want {
		err = &redisconn.Failure{Cause: &ReplicasError{Want: want, Got: got, Within: within, Disk: d.o.ReplicaDisk}}
	}
	return err
}

// waitFor writes and returns how many replicas have the write. The write is the script's accept step with slightly more
// time than the hold has, because a prolongation without a change is not replicated. It uses the client and not a line:
// WAIT blocks its connection for as long as the replicas take, and with it all other steps.
func (d *Driver) waitFor(ctx context.Context, master goredis.Cmdable, g backend.Grant, within time.Duration) (
	int, error,
) {
	keys := d.keys(g.Name)
	sharded := "0"
	if d.sharded() {
		sharded = "1"
	}
	// The call is the script's own format, written out: one accept step for one name.
	names := []string{keys.Lock, keys.Queue, keys.Seen}
	args := []any{
		redisscript.Channel(d.o.KeyPrefix, ""), sharded, codesOf(g.Kind).accept, "2", redisconn.StartOf(g),
		// More than the hold has left, so that something is written.
		redisscript.Millis(redisconn.PXOf(g, d.clock.Now()) + 2*time.Millisecond),
	}
	// Rounded up to a millisecond: 0 would wait indefinitely.
	patience := (within + time.Millisecond - 1).Milliseconds()
	ask := func(write func(goredis.Pipeliner) *goredis.Cmd) (wrote, waited *goredis.Cmd) {
		pipe := master.Pipeline()
		wrote = write(pipe)
		if d.o.ReplicaDisk {
			waited = pipe.Do(ctx, "waitaof", 0, d.o.Replicas, patience)
		} else {
			waited = pipe.Do(ctx, "wait", d.o.Replicas, patience)
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
	// The script answers for its one step: anything but 1 says that the hold was not there to be prolonged.
	case len(answers) != 1 || answers[0] != int64(1):
		return 0, errors.New("the hold ended before replicas confirmed it")
	case !d.o.ReplicaDisk:
		return waited.Int()
	}
	both, err := waited.Int64Slice() // on the server itself, and on replicas
	if err != nil || len(both) != 2 {
		return 0, &redisconn.Failure{Cause: redisconn.ErrAnswer, Fatal: true}
	}
	return int(both[1]), nil
}

// refuse releases grants that were not confirmed because of err, and returns the call's error. It uses Expire, which
// keeps a hold that another driver was also granted. Grants that cannot be released now are tidied up in the
// background, and make the outcome unknown.
func (d *Driver) refuse(ctx context.Context, err error, grants []backend.Grant) error {
	var leftovers []leftover
	var all []*lines.Step
	for _, g := range grants {
		all = append(all, lines.NewStep(redisscript.Expire, d.keys(g.Name), redisconn.StartOf(g), "0"))
	}
	d.lines.DoAll(ctx, all, func(i int, s *lines.Step, failed error) {
		keys := d.keys(grants[i].Name)
		// Not released yet: it is a leftover, like that of a try without an answer.
		if failed != nil {
			h, _ := redisscript.ParseHold(redisconn.ValueOf(grants[i]))
			leftovers = append(leftovers, leftover{keys: keys, hold: h})
		} else if s.Answer == int64(redisscript.Offered) {
			d.waiting.follow(d, keys)
		}
	})
	f := *redisconn.FailureOf(err)
	f.Sent = len(leftovers) > 0
	if f.Sent {
		f.Fatal = false
		d.tidy(leftovers)
	}
	return &f
}

// canWait refuses a server that cannot ask its replicas whether they have something on disk: WAITAOF came with Redis
// 7.2.
func (o *Options) canWait(s redisconn.Server) error {
	if !o.ReplicaDisk || s.AtLeast(7, 2) {
		return nil
	}
	return &backend.ConfigError{
		Setting: "redis_version", Value: s.Version(), Want: "7.2 or later", Why: "Options.ReplicaDisk needs WAITAOF",
	}
}
