package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// redisSystem is one Redis server: started here, or running already.
type redisSystem struct {
	address string
	admin   *goredis.Client
	server  *process
	info    string
	calls   float64 // of counters
}

// startRedis starts redis-server from PATH without persistence, or connects to a running server.
func startRedis(ctx context.Context, running string) (system, error) { return openRedis(ctx, running) }

func openRedis(ctx context.Context, running string) (*redisSystem, error) {
	s := &redisSystem{address: running}
	if running == "" {
		if err := s.start(); err != nil {
			return nil, err
		}
	}
	if err := s.connect(ctx); err != nil {
		return nil, errors.Join(err, s.close())
	}
	if running != "" {
		// Every scenario begins with an empty store: that must not be somebody's data.
		n, err := s.admin.DBSize(ctx).Result()
		if err == nil && n > 0 {
			err = fmt.Errorf("redis at %s has %d keys, which the benchmark would delete", s.address, n)
		}
		if err != nil {
			s.close()
			return nil, err
		}
	}
	return s, nil
}

// connect waits until the server answers, and learns its version.
func (s *redisSystem) connect(ctx context.Context) error {
	s.admin = goredis.NewClient(&goredis.Options{Addr: s.address, PoolSize: 1})
	err := s.server.answers(ctx, func(ctx context.Context) error { return s.admin.Ping(ctx).Err() })
	if err != nil {
		return fmt.Errorf("redis at %s: %w", s.address, err)
	}
	fields, err := s.fields(ctx, "server")
	s.info = "redis " + fields["redis_version"]
	return err
}

func (s *redisSystem) start(more ...string) error {
	addrs, err := freeAddrs(1)
	if err != nil {
		return err
	}
	s.address = addrs[0]
	_, port, _ := net.SplitHostPort(s.address)
	s.server, err = startProcess("redis-server", func(dir string) []string {
		return append([]string{"--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
			"--dir", dir, "--loglevel", "warning", "--maxclients", "4000"}, more...)
	})
	return err
}

func (s *redisSystem) name() string    { return "redis" }
func (s *redisSystem) version() string { return s.info }
func (s *redisSystem) addr() string    { return s.address }

// fields returns one section of INFO.
func (s *redisSystem) fields(ctx context.Context, sections ...string) (map[string]string, error) {
	fields := map[string]string{}
	pipe := s.admin.Pipeline()
	for _, section := range sections {
		pipe.Info(ctx, section)
	}
	cmds, err := pipe.Exec(ctx)
	if err != nil {
		return nil, err
	}
	for _, cmd := range cmds {
		for lines := bufio.NewScanner(strings.NewReader(cmd.(*goredis.StringCmd).Val())); lines.Scan(); {
			if key, value, ok := strings.Cut(strings.TrimSpace(lines.Text()), ":"); ok {
				fields[key] = value
			}
		}
	}
	return fields, nil
}

// counters implements system. Its own commands are taken out of the difference between two calls.
func (s *redisSystem) counters(ctx context.Context) (counters, error) {
	fields, err := s.fields(ctx, "stats", "cpu")
	if err != nil {
		return counters{}, err
	}
	number := func(key string) float64 {
		v, err := strconv.ParseFloat(fields[key], 64)
		if err != nil {
			return math.NaN()
		}
		return v
	}
	// Each call of this method is counted before the next one reads: 2 commands in 1 read.
	s.calls++
	c := counters{
		commands: number("total_commands_processed") - 2*s.calls,
		trips:    number("total_reads_processed") - s.calls,
	}
	if cpu := number("used_cpu_sys") + number("used_cpu_user"); !math.IsNaN(cpu) {
		c.cpu = time.Duration(cpu * float64(time.Second))
	}
	return c, nil
}

func (s *redisSystem) reset(ctx context.Context) error { return s.admin.FlushDB(ctx).Err() }

func (s *redisSystem) erase(ctx context.Context, key string) error {
	n, err := s.admin.Del(ctx, key).Result()
	if err == nil && n == 0 {
		return fmt.Errorf("the key %q does not exist", key)
	}
	return err
}

func (s *redisSystem) missing(ctx context.Context, keys []string) (int, error) {
	gone := len(keys)
	for len(keys) > 0 {
		n := min(len(keys), 1000)
		found, err := s.admin.Exists(ctx, keys[:n]...).Result()
		if err != nil {
			return 0, err
		}
		gone -= int(found)
		keys = keys[n:]
	}
	return gone, nil
}

func (s *redisSystem) pause() bool { return s.server.pause() }
func (s *redisSystem) resume()     { s.server.resume() }

func (s *redisSystem) close() error {
	if s.admin != nil {
		s.admin.Close()
	}
	return s.server.close()
}
