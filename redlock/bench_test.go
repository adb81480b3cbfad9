package redlock

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// BenchmarkAcquireRelease measures one caller on a free name: one parallel round for the acquire, and one for the
// release.
func BenchmarkAcquireRelease(b *testing.B) {
	s := start(b, 5)
	d := s.driver(b, nil)
	ctx := context.Background()
	for b.Loop() {
		g, err := d.Acquire(ctx, request("bench"))
		if err != nil {
			b.Fatal(err)
		}
		if err := d.Release(ctx, g); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkWaiters measures 64 waiters of eight clients on one name, without pauses. It reports grants per second, and
// the minimum of grants of one waiter, per thousand.
func BenchmarkWaiters(b *testing.B) {
	s := start(b, 5)
	const clients, waiters = 8, 64
	var drivers []*Driver
	for range clients {
		drivers = append(drivers, s.driver(b, nil))
	}
	ctx := context.Background()
	var left atomic.Int64
	left.Store(int64(b.N))
	var got [waiters]int
	var all sync.WaitGroup
	b.ResetTimer()
	began := time.Now()
	for i := range waiters {
		all.Go(func() {
			for left.Add(-1) >= 0 {
				r := request("bench")
				r.Wait = true
				g, err := drivers[i%clients].Acquire(ctx, r)
				if err != nil {
					b.Error(err)
					return
				}
				got[i]++
				if err := drivers[i%clients].Release(ctx, g); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	least := b.N
	for _, n := range got {
		least = min(least, n)
	}
	b.ReportMetric(float64(b.N)/time.Since(began).Seconds(), "grants/s")
	b.ReportMetric(1000*float64(least)/float64(b.N), "least‰")
}

func request(name string) backend.Request {
	return backend.Request{
		Name: name, Owner: "test", RequestID: backend.NewRequestID(), HoldID: backend.NewRequestID(), Fresh: true,
		TTL: 30 * time.Second,
	}
}
