package gateway

import (
	"context"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// asks counts the requests that a client sends after the instant from.
type asks struct {
	from                    time.Time
	served, waited, refused atomic.Int64
}

// ask sends requests until ctx ends. Each takes a millisecond.
func (a *asks) ask(ctx context.Context, t *testing.T, w *work, principal string) {
	for ctx.Err() == nil {
		began := time.Now()
		leave, p := w.enter(ctx, principal)
		counts := ctx.Err() == nil && began.After(a.from)
		if waited := time.Since(began); waited > 0 {
			if counts {
				a.waited.Add(1)
			}
			if p != nil && ctx.Err() == nil && (p.Status != http.StatusTooManyRequests || waited < lineTime) {
				t.Errorf("refused after %v: %v", waited, p)
			}
		}
		if p == nil {
			time.Sleep(time.Millisecond)
			leave()
			leave()
		}
		switch {
		case !counts:
		case p != nil:
			a.refused.Add(1)
		default:
			a.served.Add(1)
		}
	}
}

// While the replica is saturated, a client with more concurrent requests than another client is limited, and the
// replica refuses its requests only after a wait. The other client never waits.
func TestASaturatedReplicaIsShared(t *testing.T) {
	const settles, lasts = 3 * time.Second, 5 * time.Second
	rate := leastRate * runtime.GOMAXPROCS(0)
	for _, x := range []struct {
		name      string
		late      bool
		many, few int
		want      int // served requests of the client with many requests
		refusals  bool
	}{
		{"saturated", true, 32, 4, 5 * rate, false},
		{"flooded", true, 8 * rate, 4, 5 * rate, true},
		{"not saturated", false, 32, 4, 32 * 5000, false},
		{"alone", true, 32, 0, 32 * 5000, false},
		{"alike", true, 8, 8, 8 * 5000, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				from := time.Now().Add(settles)
				large, small := &asks{from: from}, &asks{from: from}
				var all sync.WaitGroup
				w := newWork(func() bool { return x.late })
				ctx, stop := context.WithTimeout(t.Context(), settles+lasts)
				defer stop()
				for range x.many {
					all.Go(func() { large.ask(ctx, t, w, "large") })
				}
				for range x.few {
					all.Go(func() { small.ask(ctx, t, w, "small") })
				}
				all.Wait()
				if w.all != 0 || len(w.of) != 0 {
					t.Errorf("after the last request %d are in work, of %v", w.all, w.of)
				}
				if n := small.waited.Load() + small.refused.Load(); n > 0 && x.many != x.few {
					t.Errorf("%d requests of the small client had to wait", n)
				}
				if got, want := int(small.served.Load()), x.few*5000; got < want*9/10 {
					t.Errorf("the small client got %d answers, want %d", got, want)
				}
				if got := int(large.served.Load()); got > x.want*11/10 || got < x.want*7/10 {
					t.Errorf("the large client got %d answers, want %d", got, x.want)
				}
				if refused := large.refused.Load(); refused > 0 != x.refusals {
					t.Errorf("%d requests of the large client were refused", refused)
				}
			})
		})
	}
}

// Soon after the replica is no longer saturated, it no longer limits a client.
func TestASaturatedReplicaRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all sync.WaitGroup
		var late atomic.Bool
		var large, small asks
		late.Store(true)
		w := newWork(late.Load)
		ctx, stop := context.WithCancel(t.Context())
		defer all.Wait()
		defer stop()
		all.Go(func() { small.ask(ctx, t, w, "small") })
		for range 8 {
			all.Go(func() { large.ask(ctx, t, w, "large") })
		}
		time.Sleep(10 * time.Second)
		late.Store(false)
		time.Sleep(30 * time.Second)
		before := large.served.Load()
		time.Sleep(time.Second)
		if got := large.served.Load() - before; got < 7500 {
			t.Errorf("%d answers in a second, want 8000", got)
		}
	})
}

// Requests that wait for a lock, for another state or for events do not count as work of the replica.
func TestWaitsAreNoWork(t *testing.T) {
	simulated(t, func(t *testing.T, d *door) {
		d.granted(d.post(acquireX, acquireOf("a", "")))
		etag := d.get(atX).header.Get(headerETag)
		ctx, stop := context.WithCancel(t.Context())
		var all sync.WaitGroup
		defer all.Wait()
		defer stop()
		all.Go(func() { d.send(ctx, http.MethodPost, acquireX, acquireOf("b", `,"wait":true`)) })
		all.Go(func() { d.send(ctx, http.MethodGet, atX+"/watch", "") })
		all.Go(func() {
			d.send(ctx, http.MethodGet, atX, "", func(r *http.Request) {
				r.Header.Set("If-None-Match", etag)
				r.Header.Set("Prefer", "wait=30")
			})
		})
		time.Sleep(2 * grantTime)
		synctest.Wait()
		d.g.mu.Lock()
		waits, watches := d.g.waits.all, d.g.watches.all
		d.g.mu.Unlock()
		d.g.works.mu.Lock()
		defer d.g.works.mu.Unlock()
		if d.g.works.all != 0 || waits == 0 || watches != 1 {
			t.Errorf("%d in work, beside %d waits and %d watches", d.g.works.all, waits, watches)
		}
	})
}
