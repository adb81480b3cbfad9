package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	fenceredis "github.com/fencelock/fencelock/redis"
)

// redisCluster is three masters that share the slots.
type redisCluster struct{ redisSystems }

func startRedisCluster(ctx context.Context, _ string) (system, error) {
	s := &redisCluster{}
	for range 3 {
		one := &redisSystem{}
		bus, err := freeAddrs(1)
		if err == nil {
			_, port, _ := net.SplitHostPort(bus[0])
			err = one.start("--cluster-enabled", "yes", "--cluster-port", port)
		}
		if err == nil {
			s.redisSystems = append(s.redisSystems, one)
			err = one.connect(ctx)
		}
		if err == nil {
			err = s.join(ctx, one, bus[0])
		}
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	for _, one := range s.redisSystems {
		err := one.server.answers(ctx, func(ctx context.Context) error {
			text, err := one.admin.ClusterInfo(ctx).Result()
			if err == nil && !(strings.Contains(text, "cluster_state:ok") && strings.Contains(text, "cluster_known_nodes:3")) {
				err = errors.New("the cluster is not complete")
			}
			return err
		})
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	return s, nil
}

// join gives the newest server its slots and makes the first one know it.
func (s *redisCluster) join(ctx context.Context, one *redisSystem, bus string) error {
	i := len(s.redisSystems) - 1
	if err := one.admin.ClusterAddSlotsRange(ctx, i*16384/3, (i+1)*16384/3-1).Err(); err != nil {
		return err
	}
	if err := one.admin.Do(ctx, "cluster", "set-config-epoch", i+1).Err(); err != nil || i == 0 {
		return err
	}
	host, port, _ := net.SplitHostPort(one.address)
	_, busPort, _ := net.SplitHostPort(bus)
	return s.redisSystems[0].admin.Do(ctx, "cluster", "meet", host, port, busPort).Err()
}

func (s *redisCluster) name() string    { return "redis-cluster" }
func (s *redisCluster) version() string { return "cluster of 3 × " + s.redisSystems[0].version() }

func (s *redisCluster) dial() *goredis.ClusterClient {
	var addrs []string
	for _, one := range s.redisSystems {
		addrs = append(addrs, one.address)
	}
	return goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: addrs})
}

func (s *redisCluster) peers() []peer {
	dial := func(clientOptions) rawConnection { return s.dial() }
	return append(rawRedis(dial), peer{
		name: ours, role: roleOurs, waits: true, renewEvery: ourRenewal, open: func(o clientOptions) (client, error) {
			c := s.dial()
			return newOurs(fenceredis.New(c, nil), o.ttl, func() { _ = c.Close() })
		},
	})
}

// redisSystems are several servers; figures are the sums over all.
type redisSystems []*redisSystem

func (s redisSystems) addr() string { return "" }

func (s redisSystems) counters(ctx context.Context) (counters, error) {
	var sum counters
	for _, one := range s {
		c, err := one.counters(ctx)
		if err != nil {
			return counters{}, err
		}
		sum.commands += c.commands
		sum.trips += c.trips
		sum.cpu += c.cpu
	}
	return sum, nil
}

func (s redisSystems) reset(ctx context.Context) error {
	return s.each(func(one *redisSystem) error { return one.reset(ctx) })
}

func (s redisSystems) erase(ctx context.Context, key string) error {
	return s.each(func(one *redisSystem) error { return one.erase(ctx, key) })
}

func (s redisSystems) missing(context.Context, []string) (int, error) {
	return 0, fmt.Errorf("keys on several servers: %w", errors.ErrUnsupported)
}

func (s redisSystems) pause() bool { return false }
func (s redisSystems) resume()     {}

func (s redisSystems) close() error {
	return s.each(func(one *redisSystem) error { return one.close() })
}

func (s redisSystems) each(act func(*redisSystem) error) error {
	var errs []error
	for _, one := range s {
		errs = append(errs, act(one))
	}
	return errors.Join(errs...)
}
