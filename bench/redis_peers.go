package main

import (
	"context"
	"crypto/tls"
	"math"
	"net"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	syncbackend "github.com/go-redsync/redsync/v4/redis"
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

// openRedsync is redsync on one node, with its defaults (tries again after a random 50 to 250 ms) and unbounded tries.
func openRedsync(o clientOptions) (client, error) {
	c := goredis.NewClient(redisOptions(o))
	return redsyncOn(o.ttl, func() { c.Close() }, syncredis.NewPool(c)), nil
}

func redsyncOn(ttl time.Duration, end func(), pools ...syncbackend.Pool) client {
	all := redsync.New(pools...)
	return library{end: end, take: func(ctx context.Context, name string) (hold, error) {
		m := all.NewMutex(name, redsync.WithExpiry(ttl), redsync.WithTries(math.MaxInt))
		if err := m.LockContext(ctx); err != nil {
			return nil, err
		}
		return redsyncHold{m}, nil
	}}
}

type redsyncHold struct{ m *redsync.Mutex }

func (h redsyncHold) unlock(ctx context.Context) error {
	_, err := h.m.UnlockContext(ctx)
	return err
}

func (h redsyncHold) lost() <-chan struct{} { return nil }

// openRedislock tries again every 100 ms: it has no default, and its documentation shows this.
func openRedislock(o clientOptions) (client, error) {
	c := goredis.NewClient(redisOptions(o))
	lib, again := redislock.New(c), &redislock.Options{RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)}
	return library{end: func() { c.Close() }, take: func(ctx context.Context, name string) (hold, error) {
		if _, ok := ctx.Deadline(); !ok { // without one the library gives up after one TTL
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, time.Hour)
			defer cancel()
		}
		l, err := lib.Obtain(ctx, name, o.ttl, again)
		if err != nil {
			return nil, err
		}
		return redislockHold{l.Release}, nil
	}}, nil
}

type redislockHold struct{ untold }

// openRueidislock has one key a lock, as is right for one server (its default of three keys is for nothing there), and
// NOLOOP. TryNextAfter, a limit of 20 ms for each attempt, is raised: a loaded machine must not count as a held lock.
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
	return library{end: l.Close, take: func(ctx context.Context, name string) (hold, error) {
		held, cancel, err := l.WithContext(ctx, name)
		if err != nil {
			return nil, err
		}
		// Its unlock has no context and no error.
		return told{func(context.Context) error { cancel(); return nil }, held.Done()}, nil
	}}, nil
}
