package main

import (
	"context"
	"crypto/tls"
	"io"
	"math"
	"net"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	syncredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"

	fenceredis "github.com/fencelock/fencelock/redis"
)

func (s *redisSystem) peers() []peer {
	same := func(name string) string { return name }
	return append(s.floors(),
		peer{name: ours, role: roleOurs, waits: true, renewEvery: ourRenewal, open: openOurRedis,
			key: func(name string) string { return "fencelock:{" + name + "}" }},
		peer{name: "redsync", role: rolePeer, waits: true, open: openRedsync, key: same},
		peer{name: "redislock", role: rolePeer, waits: true, open: openRedislock, key: same},
		peer{name: "rueidislock", role: rolePeer, waits: true, open: openRueidislock,
			renewEvery: func(ttl time.Duration) time.Duration { return ttl / 2 },
			key:        func(name string) string { return "rueidislock:0:" + name }},
	)
}

// openOurRedis hands the driver a client with go-redis' defaults, as most users have it. The driver makes its own from
// the options, as it does from a URL. A client whose settings are fit for locks would be used as it is, and then a lone
// caller cannot talk to the server in its own goroutine, which shows in the CPU of seq.
func openOurRedis(o clientOptions) (client, error) {
	c := goredis.NewClient(redisOptions(o))
	return newOurs(fenceredis.New(c, nil), o.ttl, func() { c.Close() })
}

// redsync on one node, with its defaults (tries again after a random 50 to 250 ms) and unbounded tries.
func openRedsync(o clientOptions) (client, error) {
	c := goredis.NewClient(redisOptions(o))
	return &redsyncClient{redsync.New(syncredis.NewPool(c)), c, o.ttl}, nil
}

type redsyncClient struct {
	sync *redsync.Redsync
	c    io.Closer
	ttl  time.Duration
}

func (c *redsyncClient) lock(ctx context.Context, name string) (hold, error) {
	m := c.sync.NewMutex(name, redsync.WithExpiry(c.ttl), redsync.WithTries(math.MaxInt))
	if err := m.LockContext(ctx); err != nil {
		return nil, err
	}
	return redsyncHold{m}, nil
}

func (c *redsyncClient) tryLock(ctx context.Context, name string) (hold, error) {
	m := c.sync.NewMutex(name, redsync.WithExpiry(c.ttl))
	if err := m.TryLockContext(ctx); err != nil {
		return nil, err
	}
	return redsyncHold{m}, nil
}

func (c *redsyncClient) close() { c.c.Close() }

type redsyncHold struct{ m *redsync.Mutex }

func (h redsyncHold) unlock(ctx context.Context) error {
	_, err := h.m.UnlockContext(ctx)
	return err
}

func (h redsyncHold) lost() <-chan struct{} { return nil }

// redislock tries again every 100 ms: it has no default, and its documentation shows this.
func openRedislock(o clientOptions) (client, error) {
	c := goredis.NewClient(redisOptions(o))
	return &redislockClient{redislock.New(c), c, o.ttl}, nil
}

type redislockClient struct {
	lib *redislock.Client
	c   *goredis.Client
	ttl time.Duration
}

func (c *redislockClient) lock(ctx context.Context, name string) (hold, error) {
	return c.obtain(ctx, name, redislock.LinearBackoff(100*time.Millisecond))
}

func (c *redislockClient) tryLock(ctx context.Context, name string) (hold, error) {
	return c.obtain(ctx, name, redislock.NoRetry())
}

func (c *redislockClient) obtain(ctx context.Context, name string, again redislock.RetryStrategy) (hold, error) {
	if _, ok := ctx.Deadline(); !ok { // without one the library gives up after one TTL
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Hour)
		defer cancel()
	}
	l, err := c.lib.Obtain(ctx, name, c.ttl, &redislock.Options{RetryStrategy: again})
	if err != nil {
		return nil, err
	}
	return redislockHold{l}, nil
}

func (c *redislockClient) close() { c.c.Close() }

type redislockHold struct{ l *redislock.Lock }

func (h redislockHold) unlock(ctx context.Context) error { return h.l.Release(ctx) }
func (h redislockHold) lost() <-chan struct{}            { return nil }

// rueidislock with one key a lock, as is right for one server (its default of three keys is for nothing there), and
// with NOLOOP. TryNextAfter, a limit of 20 ms for each attempt, is raised: a loaded machine must not count as a held
// lock.
func openRueidislock(o clientOptions) (client, error) {
	opt := rueidislock.LockerOption{
		ClientOption: rueidis.ClientOption{InitAddress: []string{o.addr}},
		KeyMajority:  1, KeyValidity: o.ttl, NoLoopTracking: true, TryNextAfter: time.Second,
	}
	if o.dial != nil {
		opt.ClientOption.DialCtxFn = func(ctx context.Context, addr string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			return o.dial(ctx, "tcp", addr)
		}
	}
	l, err := rueidislock.NewLocker(opt)
	if err != nil {
		return nil, err
	}
	return rueidisClient{l}, nil
}

type rueidisClient struct{ l rueidislock.Locker }

func (c rueidisClient) lock(ctx context.Context, name string) (hold, error) {
	return heldByRueidis(c.l.WithContext(ctx, name))
}

func (c rueidisClient) tryLock(ctx context.Context, name string) (hold, error) {
	return heldByRueidis(c.l.TryWithContext(ctx, name))
}

func heldByRueidis(ctx context.Context, cancel context.CancelFunc, err error) (hold, error) {
	if err != nil {
		return nil, err
	}
	return rueidisHold{ctx, cancel}, nil
}

func (c rueidisClient) close() { c.l.Close() }

type rueidisHold struct {
	ctx    context.Context // ends with the hold
	cancel context.CancelFunc
}

// unlock has no context and no error.
func (h rueidisHold) unlock(context.Context) error {
	h.cancel()
	return nil
}

func (h rueidisHold) lost() <-chan struct{} { return h.ctx.Done() }
