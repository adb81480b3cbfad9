package main

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/redis"
)

// BenchmarkObserved compares clients with an observer to one without, on the Redis that FENCELOCK_REDIS names. The
// clients take turns of 200 acquires, so that all run under the same load; ratio is that of the medians.
func BenchmarkObserved(b *testing.B) {
	addr := os.Getenv("FENCELOCK_REDIS")
	if addr == "" {
		b.Skip("set FENCELOCK_REDIS to the address of a Redis server")
	}
	count := func(context.Context, fencelock.Event) {}
	ways := []fencelock.Observer{nil, fencelock.ObserverFunc(count)}
	var clients []*fencelock.Client
	for _, observer := range ways {
		driver := redis.New(goredis.NewClient(&goredis.Options{Addr: addr}), nil)
		c, err := fencelock.ForEfficiency(driver, &fencelock.Options{Observer: observer})
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close(context.Background()) //nolint:errcheck // the program ends
		clients = append(clients, c)
	}
	took := make([][]time.Duration, len(clients))
	for b.Loop() {
		for i, c := range clients {
			for range 200 {
				began := time.Now()
				lease, err := c.Acquire(b.Context(), "observed")
				if err == nil {
					err = lease.Release(b.Context())
				}
				if err != nil {
					b.Fatal(err)
				}
				took[i] = append(took[i], time.Since(began))
			}
			time.Sleep(20 * time.Millisecond) // leftovers of the turn must not disturb the next
		}
	}
	median := func(d []time.Duration) float64 { slices.Sort(d); return float64(d[len(d)/2]) }
	base := median(took[0])
	b.ReportMetric(base/1000, "µs/cycle")
	b.ReportMetric(median(took[1])/base, "ratio")
	b.ReportMetric(0, "ns/op")
}
