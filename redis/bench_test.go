package redis

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/backend"
)

// The raw floors: the same two round trips without additions.

var rawRelease = goredis.NewScript(`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)

type rawClient interface {
	goredis.Scripter
	SetNX(ctx context.Context, key string, value any, ttl time.Duration) *goredis.BoolCmd
}

func rawCycle(b *testing.B, c rawClient, key, value string) {
	ctx := context.Background()
	if ok, err := c.SetNX(ctx, key, value, 10*time.Second).Result(); err != nil || !ok {
		b.Error("raw acquire:", ok, err)
	}
	if err := rawRelease.Run(ctx, c, []string{key}, value).Err(); err != nil {
		b.Error(err)
	}
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// cpuTime returns the processor time of the server so far, from /proc.
func (s *testServer) cpuTime() time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.cmd.Process.Pid))
	if err != nil {
		return 0 // not Linux
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')'):]))
	user, _ := strconv.Atoi(fields[12])
	system, _ := strconv.Atoi(fields[13])
	return time.Duration(user+system) * 10 * time.Millisecond
}

// parallel runs n callers that share b.N cycles and reports rates.
func parallel(b *testing.B, s *testServer, n int, cycle func(i int)) {
	b.ReportAllocs()
	server := s.cpuTime()
	var left atomic.Int64
	left.Store(int64(b.N))
	var wg sync.WaitGroup
	cpu := cpuTime()
	b.ResetTimer()
	for i := range n {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				cycle(i)
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "cycles/s")
	b.ReportMetric(float64((s.cpuTime()-server).Microseconds())/float64(b.N), "server-µs/cycle")
	b.ReportMetric(float64((cpuTime()-cpu).Microseconds())/float64(b.N), "cpu-µs/cycle")
}

func benchCycle(b *testing.B, n int) {
	s := startServer(b)
	b.Run("pooled", func(b *testing.B) {
		c := goredis.NewClient(fitOptions(s.addr))
		defer c.Close()
		parallel(b, s, n, func(i int) { rawCycle(b, c, fmt.Sprint("raw", i), "value-of-some-length") })
	})
	if n > 1 {
		b.Run("autopipelined", func(b *testing.B) {
			c := goredis.NewClient(fitOptions(s.addr))
			defer c.Close()
			ap, err := c.AutoPipeline()
			if err != nil {
				b.Fatal(err)
			}
			parallel(b, s, n, func(i int) { rawCycle(b, ap, fmt.Sprint("raw", i), "value-of-some-length") })
		})
	}
	for name, open := range drivers {
		b.Run(name, func(b *testing.B) {
			d := open(b, s.addr)
			if err := d.(backend.Pinger).Ping(b.Context()); err != nil {
				b.Fatal(err)
			}
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			names := make([]string, n)
			for i := range names {
				names[i] = fmt.Sprint("name", i)
			}
			parallel(b, s, n, func(i int) {
				g, err := d.Acquire(ctx, request(names[i], 10*time.Second, true))
				if err == nil {
					err = d.Release(ctx, g)
				}
				if err != nil {
					b.Error(err)
				}
			})
		})
	}
}

// drivers are the drivers to compare.
var drivers = map[string]func(testing.TB, string) backend.Driver{
	"fencelock": func(t testing.TB, addr string) backend.Driver { return openAt(t, addr) },
}

func BenchmarkCycle1(b *testing.B)  { benchCycle(b, 1) }
func BenchmarkCycle64(b *testing.B) { benchCycle(b, 64) }

func benchHandoff(b *testing.B, n int) {
	for name, open := range drivers {
		b.Run(name, func(b *testing.B) { benchHandoffOf(b, n, open) })
	}
}

func benchHandoffOf(b *testing.B, n int, open func(testing.TB, string) backend.Driver) {
	s := startServer(b)
	admin := s.admin(b)
	drivers := make([]backend.Driver, n)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	cycle := func(i int, name string) {
		r := request(name, 10*time.Second, true)
		r.Renews = true
		g, err := drivers[i].Acquire(ctx, r)
		if err == nil {
			err = drivers[i].Release(ctx, g)
		}
		if err != nil {
			b.Error(err)
		}
	}
	for i := range drivers {
		drivers[i] = open(b, s.addr)
		cycle(i, "warm-up")
	}
	before := commands(b, admin)
	parallel(b, s, n, func(i int) { cycle(i, "one") })
	b.ReportMetric(float64(commands(b, admin)-before)/float64(b.N), "commands/grant")
}

func BenchmarkHandoff16(b *testing.B) { benchHandoff(b, 16) }
func BenchmarkHandoff64(b *testing.B) { benchHandoff(b, 64) }
