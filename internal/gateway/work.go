package gateway

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/metrics"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/fencelock/fencelock/backend/kit"
)

const (
	// lineTime is the maximum time that a request waits for its turn while the replica is saturated.
	lineTime = time.Second
	// grantTime is the time for which a request that waits for a lock counts as work of the replica.
	grantTime = 20 * time.Millisecond
	// The replica is saturated if more than one in ten goroutines waits for a processor for lateTime or longer. lateEvery
	// is the minimum interval between two measurements.
	lateTime  = 500 * time.Microsecond
	lateEvery = 50 * time.Millisecond
	// leastRate is the minimum rate, in requests a second for each processor, of clients with more requests than the
	// average. mostRate is the rate without delays.
	leastRate = 250
	mostRate  = 1 << 20
)

// work shares a saturated replica between its clients. Clients with more concurrent requests than the average client
// share one rate. The rate decreases while goroutines wait for a processor, and increases otherwise, so work does not
// need to know the speed of the machine or of the lock service. The requests of these clients wait for their turn. work
// refuses a request only after lineTime: after an immediate refusal, the client would use the processor for its next
// request. The requests of other clients are served immediately. So are those of a client that is the only client.
type work struct {
	late func() bool // reports whether goroutines have waited for a processor since the previous call

	mu       sync.Mutex     // protects the following fields
	of       map[string]int // requests of each client, being served and waiting
	all      int
	line     *rate.Limiter // the rate of the clients above the average
	served   int           // requests of these clients since measured
	measured time.Time
}

func newWork(late func() bool) *work {
	return &work{late: late, of: map[string]int{}, line: rate.NewLimiter(mostRate, 1)}
}

// enter waits until a request of a client may be served. The caller calls leave when the request was served, or waits
// for something other than the replica. leave may be called more than once.
func (w *work) enter(ctx context.Context, principal string) (leave func(), p *Problem) {
	leave = sync.OnceFunc(func() { w.leave(principal) })
	delay := w.delay(principal)
	if delay == 0 {
		return leave, nil
	}
	if err := kit.Sleep(ctx, min(delay, lineTime)); err == nil && delay <= lineTime {
		return leave, nil
	}
	leave()
	return nil, quota("client-work", "the replica is saturated, and this client has more requests at a time than others")
}

// delay counts a request, and returns the time until its turn. If that is more than lineTime, the request has no turn.
func (w *work) delay(principal string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all++
	w.of[principal]++
	// By one request more, a client is above the average by chance: while another one is between two requests.
	if (w.of[principal]-1)*len(w.of) <= w.all {
		return 0
	}
	now := time.Now()
	w.measure(now)
	turn := w.line.ReserveN(now, 1)
	delay := turn.DelayFrom(now)
	if delay > lineTime {
		turn.CancelAt(now)
	} else {
		w.served++
	}
	return delay
}

func (w *work) leave(principal string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all--
	if w.of[principal]--; w.of[principal] == 0 {
		delete(w.of, principal)
	}
}

// measure adapts the rate. The caller holds w.mu.
func (w *work) measure(now time.Time) {
	since := now.Sub(w.measured)
	if since < lateEvery {
		return
	}
	least := rate.Limit(leastRate * runtime.GOMAXPROCS(0))
	switch late := w.late(); {
	case since > lineTime: // the previous measurement is too old
		w.line.SetLimitAt(now, mostRate)
	case late:
		served := rate.Limit(float64(w.served) / since.Seconds())
		if less := max(least, min(w.line.Limit(), served)/2); less < w.line.Limit() {
			w.line = rate.NewLimiter(less, 1) // the old limiter has reserved turns at a greater rate
		}
	default:
		w.line.SetLimitAt(now, min(mostRate, w.line.Limit()+least/20))
	}
	w.measured, w.served = now, 0
}

// lateness returns a function that reports whether goroutines or threads have waited for a processor since its previous
// call: more than one in ten goroutines for lateTime or longer, or the threads of this process for more than lateTime
// on average.
func lateness() func() bool {
	sample := []metrics.Sample{{Name: "/sched/latencies:seconds"}}
	var before []uint64
	var waitedBefore, runsBefore int64
	return func() bool {
		metrics.Read(sample)
		h := sample[0].Value.Float64Histogram()
		var all, late uint64
		for i, n := range h.Counts {
			if before != nil {
				n -= before[i]
			}
			all += n
			if h.Buckets[i] >= lateTime.Seconds() {
				late += n
			}
		}
		before = append(before[:0], h.Counts...)
		waited, runs := threadWaits()
		average := time.Duration((waited - waitedBefore) / max(runs-runsBefore, 1))
		waitedBefore, runsBefore = waited, runs
		return late*10 > all || average > lateTime
	}
}

// threadWaits returns the total time in nanoseconds for which the threads of this process waited for a processor, and
// the number of times they ran. It returns zeros if the system does not report them.
func threadWaits() (waited, runs int64) {
	threads, _ := os.ReadDir("/proc/self/task")
	for _, thread := range threads {
		text, _ := os.ReadFile("/proc/self/task/" + thread.Name() + "/schedstat") // a thread may have ended
		var ran, waits, often int64
		if n, _ := fmt.Sscan(string(text), &ran, &waits, &often); n == 3 {
			waited, runs = waited+waits, runs+often
		}
	}
	return waited, runs
}
