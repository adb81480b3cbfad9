package main

import (
	"context"
	"math"
	"net"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	syncredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	fenceredis "github.com/fencelock/fencelock/redis"
)

// section runs work while it holds a lock.
type section func(ctx context.Context, work func()) error

// The claim of docs/MIGRATING.md on a rollout: binaries of two consecutive steps never work concurrently.
func TestRolloutSteps(t *testing.T) {
	need(t, "redis-server")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_, port, _ := net.SplitHostPort(addr)
	l.Close()
	server := exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", t.TempDir())
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		server.Process.Kill()
		server.Wait()
	}()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client := goredis.NewClient(&goredis.Options{Addr: addr})
	defer client.Close()
	for client.Ping(ctx).Err() != nil {
		if ctx.Err() != nil {
			t.Fatal("redis-server does not answer")
		}
		time.Sleep(5 * time.Millisecond)
	}
	locks, err := fencelock.ForEfficiency(fenceredis.New(client, nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer locks.Close(ctx)

	const name, ttl = "reports/daily", 30 * time.Second
	rs, locker := redsync.New(syncredis.NewPool(client)), redislock.New(client)
	step1 := map[string]section{
		"redsync": func(ctx context.Context, work func()) error {
			mutex := rs.NewMutex(name, redsync.WithExpiry(ttl), redsync.WithTries(math.MaxInt),
				redsync.WithRetryDelay(2*time.Millisecond))
			if err := mutex.LockContext(ctx); err != nil {
				return err
			}
			work()
			_, err := mutex.UnlockContext(ctx)
			return err
		},
		"redislock": func(ctx context.Context, work func()) error {
			again := redislock.LinearBackoff(2 * time.Millisecond)
			lock, err := locker.Obtain(ctx, name, ttl, &redislock.Options{RetryStrategy: again})
			if err != nil {
				return err
			}
			work()
			return lock.Release(ctx)
		},
	}
	step3 := func(ctx context.Context, work func()) error {
		return locks.Do(ctx, name, func(context.Context, *fencelock.Lease) error {
			work()
			return nil
		})
	}
	for library, old := range step1 {
		step2 := func(ctx context.Context, work func()) error {
			return locks.Do(ctx, name, func(ctx context.Context, _ *fencelock.Lease) error { return old(ctx, work) })
		}
		for what, both := range map[string][2]section{"steps 1 and 2": {old, step2}, "steps 2 and 3": {step2, step3}} {
			if n := overlaps(ctx, t, both); n != 0 {
				t.Errorf("%s, %s: %d overlaps", library, what, n)
			}
		}
		if overlaps(ctx, t, [2]section{old, step3}) == 0 {
			t.Errorf("%s: steps 1 and 3 exclude each other, so this test proves nothing", library)
		}
	}
}

// overlaps returns how often one of two workers of each section found another one at work.
func overlaps(ctx context.Context, t *testing.T, both [2]section) int64 {
	var inside, found atomic.Int64
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for range 40 {
				err := both[i%2](ctx, func() {
					if inside.Add(1) > 1 {
						found.Add(1)
					}
					time.Sleep(500 * time.Microsecond) // so that another worker would overlap
					inside.Add(-1)
				})
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	return found.Load()
}
