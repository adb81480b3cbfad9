package conformance

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
)

// acquiring is the in-process driver with something else in its Acquire.
type acquiring struct {
	*memory.Driver
	also func(context.Context, backend.Request)
}

func (d *acquiring) Acquire(ctx context.Context, r backend.Request) (backend.Grant, error) {
	d.also(ctx, r)
	return d.Driver.Acquire(ctx, r)
}

func with(also func(context.Context, backend.Request)) func(testing.TB) Harness {
	return func(testing.TB) Harness {
		store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
		return Harness{New: func(testing.TB) backend.Driver { return &acquiring{store.Driver(), also} }}
	}
}

func staysForever() { select {} }

// A goroutine that outlives a simulated clause fails that clause, and those after it run.
func TestLeakedGoroutineFailsItsClause(t *testing.T) {
	var once sync.Once
	h := with(func(context.Context, backend.Request) { once.Do(func() { go staysForever() }) })
	report := CheckSimulated(t, h, "X2", "O1")
	if r := report[0]; r.Outcome != Failed || r.Clause.ID != "X2" ||
		!strings.Contains(strings.Join(r.Messages, "\n"), "conformance.staysForever") {
		t.Errorf("a clause that leaves a goroutine behind: %v %q", r.Outcome, r.Messages)
	}
	if r := report[1]; r.Outcome != Passed {
		t.Errorf("the clause after it: %v %q", r.Outcome, r.Messages)
	}
}

// A mutex that blocks in a simulated clause, where time cannot pass, fails that clause and names the call.
func TestBlockingMutexFailsItsClause(t *testing.T) {
	var mu sync.Mutex
	mu.Lock()
	h := with(func(context.Context, backend.Request) {
		mu.Lock()
		defer mu.Unlock()
	})
	const patience = 5 * time.Second // by then a busy machine has come to the mutex
	began := time.Now()
	r := simulate(t, h, find(t, "X2"), patience)
	if text := strings.Join(r.Messages, "\n"); r.Outcome != Failed || r.Clause.ID != "X2" ||
		!strings.Contains(text, `Acquire without Wait "conformance/`) || !strings.Contains(text, "sync.Mutex.Lock") {
		t.Errorf("a clause that blocks on a mutex: %v %q", r.Outcome, r.Messages)
	}
	if took := time.Since(began); took < patience {
		t.Errorf("it failed after %v, before %v had passed", took, patience)
	}
	mu.Unlock() // so that the clause ends
}

// Too many clauses without a verdict fail the run.
func TestTooManyInconclusiveClausesFail(t *testing.T) {
	for _, c := range []struct {
		passed, inconclusive int
		fails                bool
	}{{1, 1, false}, {150, 1, false}, {150, 2, true}, {300, 3, false}, {0, 2, true}} {
		var report Report
		for i := range c.passed + c.inconclusive {
			r := Result{Outcome: Passed}
			if i >= c.passed {
				r = Result{Outcome: Inconclusive, Messages: []string{"late"}}
			}
			report = append(report, r)
		}
		r := newRecorder(t)
		if tellAll(r, report); r.Failed() != c.fails {
			t.Errorf("%d of %d inconclusive: failed: %v", c.inconclusive, len(report), r.Failed())
		}
	}
	func() {
		r := newRecorder(t)
		defer func() {
			if p := recover(); p != (stopped{}) || !r.Skipped() || !strings.HasPrefix(r.skipped, "INCONCLUSIVE  X1") {
				t.Errorf("an inconclusive clause ends with %v, skipped: %q", p, r.skipped)
			}
		}()
		tell(r, Result{Clause: Clause{ID: "X1"}, Outcome: Inconclusive, Messages: []string{"late"}})
	}()
}
