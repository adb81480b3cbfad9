package conformance

import (
	"fmt"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// RunSimulated is Run in simulated time, where a TTL passes immediately: for a driver without a service outside this
// process, such as backend/memory, or a driver over a service that the test simulates. The driver's clock must be
// backend.GoClock. Each clause has its own bubble of testing/synctest and its own harness, made in that bubble. A
// goroutine that outlives its clause, or that blocks where simulated time cannot pass, on a mutex for example, fails
// the clause.
func RunSimulated(t *testing.T, harness func(t testing.TB) Harness) {
	t.Helper()
	run(t, Clauses(), func(t *testing.T, c Clause) Result { return simulate(t, harness, c, stuckAfter) })
}

// CheckSimulated is Check in simulated time, as RunSimulated is Run.
func CheckSimulated(t *testing.T, harness func(t testing.TB) Harness, only ...string) Report {
	t.Helper()
	var report Report
	for _, c := range chosen(t, only) {
		report = append(report, simulate(t, harness, c, stuckAfter))
	}
	return report
}

// stuckAfter bounds the real time of a simulated clause without the beginning or end of a call to its drivers.
const stuckAfter = 10 * time.Second

// bubble runs one clause in simulated time.
type bubble struct {
	clause Clause
	suite  atomic.Pointer[suite] // nil until the harness is made
	id     atomic.Pointer[string]
	done   chan struct{}
	result Result // valid after done
}

// simulate runs one clause. It does not wait for a stuck clause: blocked goroutines are left behind.
func simulate(t *testing.T, harness func(testing.TB) Harness, c Clause, patience time.Duration) Result {
	t.Helper()
	b := &bubble{clause: c, done: make(chan struct{})}
	go b.run(t, harness)
	const step = 50 * time.Millisecond
	tick := time.NewTicker(step)
	defer tick.Stop()
	// Count ticks, and not time: a process that the machine did not run is not stuck.
	for moves, still := int64(0), time.Duration(0); still < patience; still += step {
		select {
		case <-b.done:
			return b.result
		case <-tick.C:
		}
		if s := b.suite.Load(); s != nil && s.moves.Load() != moves {
			moves, still = s.moves.Load(), 0
		}
	}
	return b.stuck(patience)
}

func (b *bubble) run(t *testing.T, harness func(testing.TB) Harness) {
	defer close(b.done)
	b.result = Result{Clause: b.clause, Outcome: Failed, Messages: []string{"the harness failed"}}
	defer func() {
		if p := recover(); p != nil { // a panic of package synctest, after the clause
			if b.result.Outcome != Failed {
				b.result.Messages = nil
			}
			b.result.Outcome = Failed
			b.result.Messages = append(b.result.Messages,
				fmt.Sprintf("a goroutine outlives the clause: %v\n%s", p, b.stacks("")))
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		b.learn()
		s := newSuite(t, harness(t), []Clause{b.clause})
		s.simulated = true
		b.suite.Store(s)
		b.result = s.result(s.cases[0])
	})
}

// stuck is the result of a clause that is stuck.
func (b *bubble) stuck(patience time.Duration) Result {
	calls := "no call has begun"
	if s := b.suite.Load(); s != nil {
		calls = s.underWay()
	}
	return Result{Clause: b.clause, Outcome: Failed, Messages: []string{fmt.Sprintf(
		"no call began or ended for %v of real time, and simulated time does not pass: a goroutine blocks on a mutex, "+
			"or on something outside its bubble; %s\n%s", patience, calls, b.stacks(durable))}}
}

// header is the first line of a goroutine's stack: its state, and the number of its bubble.
var header = regexp.MustCompile(`^goroutine \d+ .*\[(.*), synctest bubble (\d+)\]:`)

// durable marks stacks of goroutines that only other goroutines of the bubble, or its clock, can wake.
const durable = "(durable)"

// learn records the number of the calling goroutine's bubble.
func (b *bubble) learn() {
	line := make([]byte, 200)
	if m := header.FindSubmatch(line[:runtime.Stack(line, false)]); m != nil {
		id := string(m[2])
		b.id.Store(&id)
	}
}

// stacks returns the stacks of some goroutines of the bubble: those with a state that does not contain without.
func (b *bubble) stacks(without string) string {
	id := b.id.Load()
	if id == nil {
		return ""
	}
	all := make([]byte, 1<<20)
	all = all[:runtime.Stack(all, true)]
	const most = 6
	var found []string
	for stack := range strings.SplitSeq(string(all), "\n\n") {
		m := header.FindStringSubmatch(stack)
		if m == nil || m[2] != *id || without != "" && strings.Contains(m[1], without) {
			continue
		}
		if found = append(found, stack); len(found) == most {
			break
		}
	}
	return strings.Join(found, "\n\n")
}
