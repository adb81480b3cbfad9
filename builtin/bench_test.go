package builtin_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin"
)

// BenchmarkAcquireRelease acquires and releases free names on one durable server in this process.
func BenchmarkAcquireRelease(b *testing.B) {
	n := startNode(b)
	for _, way := range []struct {
		name string
		open func() *builtin.Driver
	}{
		{"attached", func() *builtin.Driver { return builtin.Attach(n.attach, nil) }},
		{"tcp", func() *builtin.Driver { return builtin.New([]string{n.addr()}, nil) }},
	} {
		for _, callers := range []int{1, 16, 256} {
			b.Run(fmt.Sprintf("%s/callers=%d", way.name, callers), func(b *testing.B) {
				d := way.open()
				defer d.Close(context.Background())
				var left atomic.Int64
				left.Store(int64(b.N))
				errs := make(chan error, callers)
				for i := range callers {
					go func() { errs <- churn(b.Context(), d, fmt.Sprintf("bench/%d", i), &left) }()
				}
				for range callers {
					if err := <-errs; err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pairs/s")
			})
		}
	}
}

func churn(ctx context.Context, d backend.Driver, name string, left *atomic.Int64) error {
	for left.Add(-1) >= 0 {
		r := backend.Request{Name: name, Owner: "bench", RequestID: backend.NewRequestID(), TTL: time.Minute, Fresh: true}
		g, err := d.Acquire(ctx, r)
		if err == nil {
			err = d.Release(ctx, g)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
