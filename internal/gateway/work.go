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
	// lineTime bounds how long a request waits for its turn while the replica is saturated.
	lineTime = time.Second
	// grantTime is how long a request that waits for a lock counts as work of the replica.
	grantTime = 20 * time.Millisecond
	// lateTime is the delay for a processor, of one in ten goroutines, at which the replica is saturated. It is measured over
	// lateEvery.
	lateTime  = 500 * time.Microsecond
	lateEvery = 50 * time.Millisecond
	// leastRate is how many requests a second a processor serves to clients with more requests than the average, even if
	// the replica is saturated. mostRate does not delay them.
	leastRate = 250
	mostRate  = 1 << 20
)

// work shares a saturated replica between its clients. A client with more requests at a time than the average of the
// clients gets a rate, which sinks while goroutines wait for a processor, and grows otherwise; so the speed of the
// machine and of the lock service need not be known. Its requests wait for their turn, and are refused after lineTime:
// refused at once, the client would take the processor with its next request. Others are served at once, as is a
// client that alone sends requests.
type work struct {
	late func() bool // whether goroutines have waited for a processor since the call before

	mu       sync.Mutex     // protects the following fields
	of       map[string]int // requests of each client, in work and in line
	all      int
	line     *rate.Limiter // of requests of clients above the average
	served   int           // of these since measured
	measured time.Time
}

func newWork(late func() bool) *work {
	return &work{late: late, of: map[string]int{}, line: rate.NewLimiter(mostRate, 1)}
}

// enter waits until a request of a client may be served. The returned function is called when it was served, or waits
// for something else than the replica, and may be called again.
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

// delay counts a request in, and returns how long it waits for its turn; more than lineTime if it gets none.
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
	case since > lineTime: // it is of the past
		w.line.SetLimitAt(now, mostRate)
	case late:
		served := rate.Limit(float64(w.served) / since.Seconds())
		if less := max(least, min(w.line.Limit(), served)/2); less < w.line.Limit() {
			w.line = rate.NewLimiter(less, 1) // turns in the old line were given at a greater rate
		}
	default:
		w.line.SetLimitAt(now, min(mostRate, w.line.Limit()+least/20))
	}
	w.measured, w.served = now, 0
}

// lateness returns a function that reports whether what could run has waited for a processor since the call before: one
// in ten goroutines for lateTime, or threads of this process for lateTime on average.
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

// threadWaits returns for how many nanoseconds the threads of this process were ready to run and did not, and how often
// they ran. It returns zeros if the system does not report them.
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
