package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	syncbackend "github.com/go-redsync/redsync/v4/redis"
	syncredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"

	"github.com/fencelock/fencelock/backend"
	fenceredis "github.com/fencelock/fencelock/redis"
	"github.com/fencelock/fencelock/redlock"
)

// redisServers starts n servers from PATH without persistence, with args for each; figures are the sums over all.
func redisServers(life *scope, name string, n int, args func(i int) []string) (*system, []*goredis.Client) {
	s := &system{name: name, addresses: life.addrs(n)}
	admins := make([]*goredis.Client, n)
	for i, address := range s.addresses {
		server := life.process("redis-server", func(dir string) []string {
			return append([]string{"--port", portOf(address), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
				"--dir", dir, "--loglevel", "warning", "--maxclients", "4000"}, args(i)...)
		})
		admins[i] = goredis.NewClient(&goredis.Options{Addr: address, PoolSize: 1})
		life.closing(admins[i])
		life.must(server.answers(life.ctx, func(ctx context.Context) error { return admins[i].Ping(ctx).Err() }))
		s.servers = append(s.servers, server)
	}
	s.version = "redis " + admins[0].InfoMap(life.ctx, "server").Item("Server", "redis_version")
	calls := 0.0
	s.count = func(by *scope) (commands, trips float64) {
		calls++ // each read of the counters adds one command and one read event to later reads
		for _, admin := range admins {
			info := admin.InfoMap(by.ctx, "stats")
			executed, err := strconv.ParseFloat(info.Item("Stats", "total_commands_processed"), 64)
			reads, err2 := strconv.ParseFloat(info.Item("Stats", "total_reads_processed"), 64)
			by.must(errors.Join(info.Err(), err, err2))
			commands, trips = commands+executed-calls, trips+reads-calls
		}
		return commands, trips
	}
	s.reset = func(by *scope) {
		for _, admin := range admins {
			by.must(admin.FlushDB(by.ctx).Err())
		}
	}
	s.prepare = func(ctx context.Context, name string) error { return admins[0].RPush(ctx, name, "token").Err() }
	s.erase = func(by *scope, key string) { by.must(admins[0].Del(by.ctx, key).Err()) }
	s.missing = func(by *scope, keys []string) int {
		gone := len(keys)
		for some := range slices.Chunk(keys, 1000) {
			found, err := admins[0].Exists(by.ctx, some...).Result()
			by.must(err)
			gone -= int(found)
		}
		return gone
	}
	return s, admins
}

func noArgs(int) []string { return nil }

func startRedis(life *scope) *system {
	s, _ := redisServers(life, "redis", 1, noArgs)
	return s
}

// startRedlock starts five independent servers, whose majority decides.
func startRedlock(life *scope) *system {
	s, _ := redisServers(life, "redlock", 5, noArgs)
	s.version = "5 × " + s.version
	return s
}

// startRedisCluster starts three masters that share the slots.
func startRedisCluster(life *scope) *system {
	const masters, slots = 3, 16384
	buses := life.addrs(masters)
	for i := range buses {
		buses[i] = portOf(buses[i])
	}
	s, admins := redisServers(life, "redis-cluster", masters, func(i int) []string {
		return []string{"--cluster-enabled", "yes", "--cluster-port", buses[i]}
	})
	s.version = "cluster of 3 × " + s.version
	for i, admin := range admins {
		life.must(admin.ClusterAddSlotsRange(life.ctx, i*slots/masters, (i+1)*slots/masters-1).Err())
		life.must(admin.Do(life.ctx, "cluster", "set-config-epoch", i+1).Err())
		if i > 0 {
			meet := admins[0].Do(life.ctx, "cluster", "meet", "127.0.0.1", portOf(s.addresses[i]), buses[i])
			life.must(meet.Err())
		}
	}
	for i, admin := range admins {
		life.must(s.servers[i].answers(life.ctx, func(ctx context.Context) error {
			text, err := admin.ClusterInfo(ctx).Result()
			if strings.Contains(text, "cluster_state:ok") && strings.Contains(text, "cluster_known_nodes:3") {
				return nil
			}
			return cmp.Or(err, errors.New("the cluster is not complete"))
		}))
	}
	return s
}

func same(name string) string { return name }

func redisPeers(s *system) []peer {
	own := ourRedis()
	own.key = func(name string) string { return "fencelock:{" + name + "}" }
	return append(redisFloors(),
		peer{name: "token by BLPOP", role: roleFloor, waits: true, open: openToken, seed: s.prepare},
		own,
		peer{name: "redsync", role: rolePeer, waits: true, open: openRedsync, key: same},
		peer{name: "redislock", role: rolePeer, waits: true, open: openRedislock, key: same},
		peer{name: "rueidislock", role: rolePeer, waits: true, open: openRueidislock,
			renewEvery: func(ttl time.Duration) time.Duration { return ttl / 2 },
			key:        func(name string) string { return "rueidislock:0:" + name }},
	)
}

func redisClusterPeers(*system) []peer { return append(redisFloors(), ourRedis()) }

func redlockPeers(*system) []peer {
	return []peer{
		ourPeer(func(c *client, o clientOptions) backend.Driver {
			// The driver makes its own clients from their options.
			return redlock.New(dialEachRedis(&c.scope, o), &redlock.Options{TrustFresh: true})
		}, nil),
		{name: "redsync-5", role: rolePeer, waits: true, open: openRedsync},
	}
}

// dialRedis returns a client of one server, or of a cluster, with go-redis' defaults, except for the number of
// connections if it is not 0.
func dialRedis(c *scope, o clientOptions, connections int) goredis.UniversalClient {
	r := goredis.NewUniversalClient(&goredis.UniversalOptions{
		Addrs: strings.Split(o.addr, ","), Dialer: o.dial, PoolSize: connections,
	})
	c.closing(r)
	return r
}

// dialEachRedis returns a client of each server.
func dialEachRedis(c *scope, o clientOptions) (all []goredis.UniversalClient) {
	for o.addr = range strings.SplitSeq(o.addr, ",") {
		all = append(all, dialRedis(c, o, 0))
	}
	return all
}

// redisFloors returns the floors: the minimum of commands that Redis needs, on pooled connections and on a shared one.
func redisFloors() []peer {
	pooled := func(c *client, o clientOptions) lock { return rawRedis(dialRedis(&c.scope, o, 0), o.ttl) }
	shared := func(c *client, o clientOptions) lock {
		pipe, err := dialRedis(&c.scope, o, 0).(interface {
			AutoPipeline() (*goredis.AutoPipeliner, error)
		}).AutoPipeline()
		c.must(err)
		return rawRedis(pipe, o.ttl)
	}
	return []peer{
		{name: "raw pooled", role: roleFloor, open: pooled}, {name: "raw autopipelined", role: roleFloor, open: shared},
	}
}

var compareDelete = goredis.NewScript(
	`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)

// rawRedis locks with SET NX PX and unlocks with the usual script.
func rawRedis(c goredis.Cmdable, ttl time.Duration) lock {
	var count atomic.Uint64
	return func(ctx context.Context, name string) (hold, error) {
		value := "one-of-some-length-like-a-uuid-" + strconv.FormatUint(count.Add(1), 10)
		ok, err := c.SetNX(ctx, name, value, ttl).Result()
		if err == nil && !ok {
			err = backend.ErrHeld
		}
		return theirs{free: func(ctx context.Context) error {
			return compareDelete.Run(ctx, c, []string{name}, value).Err()
		}}, err
	}
}

// openToken passes a token through a list: the server keeps the order of the waiters, each with a connection.
func openToken(c *client, o clientOptions) lock {
	pool := dialRedis(&c.scope, o, 512)
	return func(ctx context.Context, name string) (hold, error) {
		err := error(goredis.Nil)
		for errors.Is(err, goredis.Nil) && ctx.Err() == nil {
			err = pool.BLPop(ctx, time.Second, name).Err()
		}
		return theirs{free: func(ctx context.Context) error { return pool.RPush(ctx, name, "token").Err() }}, err
	}
}

// ourRedis passes the driver a client with go-redis' defaults, as most users have. The driver makes its own client
// from the options, as it does from a URL. It would use a client with settings fit for locks as it is, and then a lone
// caller could not send its requests in its own goroutine, which costs CPU in seq.
func ourRedis() peer {
	return ourPeer(func(c *client, o clientOptions) backend.Driver {
		return fenceredis.New(dialRedis(&c.scope, o, 0), nil)
	}, nil)
}

// openRedsync is redsync on one or more servers, with its defaults (retries after a random 50 to 250 ms) and unbounded
// tries.
func openRedsync(c *client, o clientOptions) lock {
	var pools []syncbackend.Pool
	for _, one := range dialEachRedis(&c.scope, o) {
		pools = append(pools, syncredis.NewPool(one))
	}
	all := redsync.New(pools...)
	return func(ctx context.Context, name string) (hold, error) {
		m := all.NewMutex(name, redsync.WithExpiry(o.ttl), redsync.WithTries(math.MaxInt))
		err := m.LockContext(ctx)
		return theirs{until: m.Until, free: func(ctx context.Context) error {
			_, err := m.UnlockContext(ctx)
			return err
		}}, err
	}
}

// openRedislock retries every 100 ms: it has no default, and its documentation shows this.
func openRedislock(c *client, o clientOptions) lock {
	lib := redislock.New(dialRedis(&c.scope, o, 0))
	again := &redislock.Options{RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)}
	return func(ctx context.Context, name string) (hold, error) {
		if _, ok := ctx.Deadline(); !ok { // without a deadline the library stops waiting after one TTL
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, time.Hour)
			defer cancel()
		}
		l, err := lib.Obtain(ctx, name, o.ttl, again)
		if err != nil {
			return nil, err
		}
		end := time.Now().Add(o.ttl) // as the user of an unrenewed lock can compute
		return theirs{free: l.Release, until: func() time.Time { return end }}, nil
	}
}

// openRueidislock is rueidislock with one key per lock, as is right for one server (its default of three keys is
// useless there), and NOLOOP. It raises TryNextAfter, a limit of 20 ms for each attempt: a loaded machine must not
// count as a held lock.
func openRueidislock(c *client, o clientOptions) lock {
	opt := rueidislock.LockerOption{
		ClientOption: rueidis.ClientOption{InitAddress: []string{o.addr}},
		KeyMajority:  1, KeyValidity: o.ttl, NoLoopTracking: true, TryNextAfter: time.Second,
	}
	if o.dial != nil {
		opt.ClientOption.DialCtxFn =
			func(ctx context.Context, addr string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
				return o.dial(ctx, "tcp", addr)
			}
	}
	l, err := rueidislock.NewLocker(opt)
	c.must(err)
	c.later(l.Close)
	return func(ctx context.Context, name string) (hold, error) {
		held, cancel, err := l.WithContext(ctx, name)
		if err != nil {
			return nil, err
		}
		// Its unlock has no context and no error.
		return theirs{free: func(context.Context) error { cancel(); return nil }, lost: held}, nil
	}
}
