package main

import (
	"context"
	"errors"
	"io"
	"strconv"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
)

// The floors: the fewest commands that Redis needs, with nothing added.

// redisOptions are go-redis' defaults, with the scenario's address and dialler.
func redisOptions(o clientOptions) *goredis.Options {
	return &goredis.Options{Addr: o.addr, Dialer: o.dial}
}

func (s *redisSystem) floors() []peer {
	return append(rawRedis(func(o clientOptions) rawConnection { return goredis.NewClient(redisOptions(o)) }), peer{
		name: "token by BLPOP", role: roleFloor, waits: true, open: openToken,
		seed: func(ctx context.Context, name string) error { return s.admin.RPush(ctx, name, "token").Err() },
	})
}

// rawConnection is a client of one server or of a cluster.
type rawConnection interface {
	rawCommands
	AutoPipeline() (*goredis.AutoPipeliner, error)
	Close() error
}

type rawCommands interface {
	goredis.Scripter
	SetNX(ctx context.Context, key string, value any, ttl time.Duration) *goredis.BoolCmd
}

// rawRedis are the floors of one caller: commands on pooled connections, and those that share one.
func rawRedis(dial func(o clientOptions) rawConnection) []peer {
	return []peer{
		{name: "raw pooled", role: roleFloor, open: func(o clientOptions) (client, error) {
			c := dial(o)
			return rawLock(o.ttl, c, c), nil
		}},
		{name: "raw autopipelined", role: roleFloor, open: func(o clientOptions) (client, error) {
			c := dial(o)
			pipe, err := c.AutoPipeline()
			if err != nil {
				return nil, errors.Join(err, c.Close())
			}
			return rawLock(o.ttl, pipe, c), nil
		}},
	}
}

var compareDelete = goredis.NewScript(
	`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)

// rawLock locks with SET NX PX and unlocks with the usual script.
func rawLock(ttl time.Duration, c rawCommands, pool io.Closer) client {
	var count atomic.Uint64
	return library{end: func() { _ = pool.Close() }, take: func(ctx context.Context, name string) (hold, error) {
		value := "one-of-some-length-like-a-uuid-" + strconv.FormatUint(count.Add(1), 10)
		ok, err := c.SetNX(ctx, name, value, ttl).Result()
		if err == nil && !ok {
			err = backend.ErrHeld
		}
		return untold(func(ctx context.Context) error { return compareDelete.Run(ctx, c, []string{name}, value).Err() }), err
	}}
}

// openToken passes a token on through a list: the server keeps the order of the waiters.
func openToken(o clientOptions) (client, error) {
	opt := redisOptions(o)
	opt.PoolSize = 512 // a waiter keeps a connection
	c := goredis.NewClient(opt)
	return library{end: func() { c.Close() }, take: func(ctx context.Context, name string) (hold, error) {
		err := error(goredis.Nil)
		for errors.Is(err, goredis.Nil) && ctx.Err() == nil {
			err = c.BLPop(ctx, time.Second, name).Err()
		}
		return untold(func(ctx context.Context) error { return c.RPush(ctx, name, "token").Err() }), err
	}}, nil
}
