package main

import (
	"context"
	"errors"
	"io"
	"strconv"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// The floors: the fewest commands that Redis needs, with nothing added.

// redisOptions are go-redis' defaults, with the scenario's address and dialler.
func redisOptions(o clientOptions) *goredis.Options {
	return &goredis.Options{Addr: o.addr, Dialer: o.dial}
}

func (s *redisSystem) floors() []peer {
	return []peer{
		{name: "raw pooled", role: roleFloor, open: func(o clientOptions) (client, error) {
			c := goredis.NewClient(redisOptions(o))
			return &rawClient{cmds: c, pool: c, ttl: o.ttl}, nil
		}},
		{name: "raw autopipelined", role: roleFloor, open: func(o clientOptions) (client, error) {
			c := goredis.NewClient(redisOptions(o))
			pipe, err := c.AutoPipeline()
			if err != nil {
				c.Close()
				return nil, err
			}
			return &rawClient{cmds: pipe, pool: c, ttl: o.ttl}, nil
		}},
		{name: "token by BLPOP", role: roleFloor, waits: true,
			seed: func(ctx context.Context, name string) error { return s.admin.RPush(ctx, name, "token").Err() },
			open: func(o clientOptions) (client, error) {
				opt := redisOptions(o)
				opt.PoolSize = 512 // a waiter keeps a connection
				return &tokenClient{goredis.NewClient(opt)}, nil
			}},
	}
}

// rawClient locks with SET NX PX and unlocks with the usual script.
type rawClient struct {
	cmds interface {
		goredis.Scripter
		SetNX(ctx context.Context, key string, value any, ttl time.Duration) *goredis.BoolCmd
	}
	pool  io.Closer
	ttl   time.Duration
	count atomic.Uint64
}

var compareDelete = goredis.NewScript(
	`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)

func (c *rawClient) lock(ctx context.Context, name string) (hold, error) { return c.tryLock(ctx, name) }

func (c *rawClient) tryLock(ctx context.Context, name string) (hold, error) {
	value := "one-of-some-length-like-a-uuid-" + strconv.FormatUint(c.count.Add(1), 10)
	ok, err := c.cmds.SetNX(ctx, name, value, c.ttl).Result()
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errors.New("held")
	}
	return rawHold{c, name, value}, nil
}

func (c *rawClient) close() { _ = c.pool.Close() }

type rawHold struct {
	c           *rawClient
	name, value string
}

func (h rawHold) unlock(ctx context.Context) error {
	return compareDelete.Run(ctx, h.c.cmds, []string{h.name}, h.value).Err()
}

func (h rawHold) lost() <-chan struct{} { return nil }

// tokenClient passes a token on through a list: the server keeps the order of the waiters.
type tokenClient struct{ c *goredis.Client }

func (c *tokenClient) lock(ctx context.Context, name string) (hold, error) {
	for {
		err := c.c.BLPop(ctx, time.Second, name).Err()
		switch {
		case err == nil:
			return tokenHold{c.c, name}, nil
		case !errors.Is(err, goredis.Nil):
			return nil, err
		case ctx.Err() != nil:
			return nil, ctx.Err()
		}
	}
}

func (c *tokenClient) tryLock(ctx context.Context, name string) (hold, error) {
	if err := c.c.LPop(ctx, name).Err(); err != nil {
		return nil, err
	}
	return tokenHold{c.c, name}, nil
}

func (c *tokenClient) close() { c.c.Close() }

type tokenHold struct {
	c    *goredis.Client
	name string
}

func (h tokenHold) unlock(ctx context.Context) error { return h.c.RPush(ctx, h.name, "token").Err() }

func (h tokenHold) lost() <-chan struct{} { return nil }
