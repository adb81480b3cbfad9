package server

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/builtin/lockpb"
)

// BenchmarkAcquireRelease has callers take and release locks of their own, over gRPC, durably. One op is both.
func BenchmarkAcquireRelease(b *testing.B) {
	for _, nodes := range []int{1, 3} {
		for _, callers := range []int{1, 16, 256, 1024} {
			b.Run(fmt.Sprintf("nodes=%d/callers=%d", nodes, callers), func(b *testing.B) {
				c := newCluster(b, nodes, nil)
				address := c.configs[c.leader()].Listen
				clients := make([]*client, min(callers, 4))
				sessions := make([][]byte, len(clients))
				for i := range clients {
					clients[i] = dial(b, address)
					sessions[i] = clients[i].open(time.Minute)
				}
				load(b, callers, func(caller int) {
					x, session := clients[caller%len(clients)], sessions[caller%len(clients)]
					name, id := fmt.Sprint("lock/", caller), backend.NewRequestID()
					r := x.call(acquireOf(session, name, id, false))
					if r.GetAcquired() == nil {
						b.Errorf("acquire: %v", r)
						return
					}
					token := r.GetAcquired().Grants[0].Token
					if r := x.call(releaseOf(session, name, id, token)); r.GetDone() == nil {
						b.Errorf("release: %v", r)
					}
				})
			})
		}
	}
}

// BenchmarkKeepAlive has callers renew a session each: it costs no log entry, only the proof of leadership.
func BenchmarkKeepAlive(b *testing.B) {
	for _, callers := range []int{1, 256} {
		b.Run(fmt.Sprintf("nodes=3/callers=%d", callers), func(b *testing.B) {
			c := newCluster(b, 3, nil)
			x := dial(b, c.configs[c.leader()].Listen)
			sessions := make([][]byte, callers)
			for i := range sessions {
				sessions[i] = x.open(time.Minute)
			}
			load(b, callers, func(caller int) {
				if r := x.call(keepAliveOf(sessions[caller])); !r.Renewed {
					b.Errorf("keepalive: %v", r)
				}
			})
		})
	}
}

// load runs op b.N times, from so many callers.
func load(b *testing.B, callers int, op func(caller int)) {
	var left atomic.Int64
	left.Store(int64(b.N))
	var running sync.WaitGroup
	b.ResetTimer()
	for caller := range callers {
		running.Go(func() {
			for left.Add(-1) >= 0 {
				op(caller)
			}
		})
	}
	running.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
}

// BenchmarkHandOff has callers wait for the same lock, one after the other.
func BenchmarkHandOff(b *testing.B) {
	c := newCluster(b, 3, nil)
	x := dial(b, c.configs[c.leader()].Listen)
	session := x.open(time.Minute)
	const waiters = 16
	ids := make(chan string, waiters)
	for range waiters {
		id := backend.NewRequestID()
		ids <- id
		x.send(acquireOf(session, "x", id, true))
	}
	holders := make(chan *lockpb.Grant, 1)
	go func() {
		for r := range x.pushes {
			for _, g := range r.GetGranted().GetGrants() {
				holders <- g
			}
		}
	}()
	first := x.call(acquireOf(session, "x", <-ids, true)).GetAcquired().GetGrants()[0]
	b.ResetTimer()
	for range b.N {
		next := backend.NewRequestID()
		x.send(acquireOf(session, "x", next, true))
		x.send(releaseOf(session, "x", first.RequestId, first.Token))
		first = <-holders
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
}
