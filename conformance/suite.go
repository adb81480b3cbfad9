package conformance

import (
	"context"
	"flag"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/internal/stallmeter"
)

// suite runs clauses against one harness.
type suite struct {
	tb       testing.TB
	h        Harness
	desc     backend.Description
	cases    []*oneCase
	parallel sync.WaitGroup // the clauses that run beside others
	firsts   sync.WaitGroup // their first attempts

	simulated bool                  // runs in a bubble of testing/synctest
	moves     atomic.Int64          // calls to drivers that began or ended
	current   atomic.Pointer[trial] // the trial of a simulated clause
}

// oneCase is a clause in one run.
type oneCase struct {
	clause Clause
	ahead  bool // runs beside others
	once   sync.Once
	done   chan struct{}
	result Result // valid after done
}

// seats bounds the concurrent first attempts, which mostly wait, in all suites of the process. More than four for
// each processor starve a server: with 16, beside other tests, nearly all first attempts failed for PostgreSQL on two
// cores, and the repetitions, one at a time, took longer than the suite.
var seats = make(chan struct{}, max(8, 4*runtime.GOMAXPROCS(0)))

// again is held by a clause during its retries: one at a time, after the first attempts of its suite, since the suite
// is the main load on the machine.
var again sync.Mutex

func newSuite(tb testing.TB, h Harness, clauses []Clause) *suite {
	tb.Helper()
	if h.New == nil {
		tb.Fatal("conformance: Harness.New is nil")
	}
	s := &suite{tb: tb, h: h}
	s.describe()
	if s.h.TTL == 0 {
		s.h.TTL = max(s.desc.MinTTL, time.Second)
		if step := s.desc.TTLGranularity; step > 0 && s.h.TTL%step != 0 {
			s.h.TTL += step - s.h.TTL%step
		}
	}
	if err := s.desc.ValidateTTL(s.h.TTL); err != nil {
		tb.Fatalf("conformance: Harness.TTL: %v", err)
	}
	for _, c := range clauses {
		s.cases = append(s.cases, &oneCase{clause: c, done: make(chan struct{})})
	}
	return s
}

// describe asks a driver for its Description, after a Ping if it has one, since Ping may change the answer.
func (s *suite) describe() {
	rec := newRecorder(s.tb)
	defer rec.cleanup()
	d := s.h.New(rec)
	rec.Cleanup(func() { _ = closeWithin(d, 5*time.Second) })
	if p, ok := backend.As[backend.Pinger](d); ok {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := p.Ping(ctx); err != nil {
			s.tb.Errorf("conformance: Ping: %v", err)
		}
	}
	if s.desc = d.Describe(); s.desc.Clock == nil {
		s.desc.Clock = backend.SystemClock()
	}
}

// startParallel starts the chosen clauses that may run beside others.
func (s *suite) startParallel(chosen func(*Clause) bool) {
	for _, c := range s.cases {
		if !c.clause.serial && !c.clause.crowd && chosen(&c.clause) {
			c.ahead = true
			s.firsts.Add(1)
			s.parallel.Go(func() { s.start(c) })
		}
	}
}

// result returns the outcome of c. It runs c now, unless c already runs in parallel.
func (s *suite) result(c *oneCase) Result {
	if c.clause.serial || c.clause.crowd {
		s.parallel.Wait()
	}
	if !c.ahead {
		s.start(c)
	}
	<-c.done
	return c.result
}

func (s *suite) start(c *oneCase) {
	first := func() {} // ends the first attempt
	if c.ahead {
		seats <- struct{}{}
		first = sync.OnceFunc(func() {
			<-seats
			s.firsts.Done()
		})
		defer first()
	}
	c.once.Do(func() {
		began := time.Now()
		c.result = s.try(c.clause, first)
		c.result.Took = time.Since(began)
		close(c.done)
	})
}

func (s *suite) try(c Clause, first func()) Result {
	if missing := s.desc.Capabilities.Missing(c.caps); missing != 0 {
		return Result{
			Clause: c, Outcome: NotApplicable, Messages: []string{"the driver does not declare " + missing.String()},
		}
	}
	if lacks := s.h.lacking(c.needs); lacks != "" {
		return Result{Clause: c, Outcome: Skipped, Messages: []string{lacks + " is nil"}}
	}
	if s.simulated { // simulated time does not stall
		r, _ := s.attempt(c)
		return r
	}
	locked := false
	defer func() {
		if locked {
			again.Unlock()
		}
	}()
	return fairly(s.h.TTL/10, func() {
		if first(); !locked {
			s.firsts.Wait()
			again.Lock()
			locked = true
		}
		stallmeter.Calm(30 * time.Second)
	}, func() (Result, bool) { return s.attempt(c) })
}

// attempt runs the clause once.
func (s *suite) attempt(c Clause) (r Result, verdict bool) {
	rec := newRecorder(s.tb)
	t := &trial{recorder: rec, desc: s.desc, clause: c, ttl: s.h.TTL, moves: &s.moves}
	t.h = t.noting(s.h)
	rec.ranOut = func() bool { return t.ledger.ranOut(t.now()) }
	s.current.Store(t)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer rec.cleanup()
		defer rec.catch()
		c.run(t)
	}()
	// A driver that ignores contexts must not hang the suite; in that case its goroutines are left running.
	rounds := 1
	if c.rounds != nil {
		rounds = max(c.rounds(), 1)
	}
	limit := time.NewTimer(time.Duration(rounds)*(time.Minute+20*s.h.TTL) + s.h.longRefusal)
	defer limit.Stop()
	select {
	case <-ended:
	case <-limit.C:
		rec.Latef("the clause did not end; a call ignores its context: %s", t.underWay())
	}
	rec.mu.Lock()
	verdict = rec.verdict
	rec.mu.Unlock()
	return rec.result(c), verdict
}

// underWay describes the calls of a simulated clause that have not ended. It may be called outside its bubble.
func (s *suite) underWay() string {
	if t := s.current.Load(); t != nil {
		return t.underWay()
	}
	return "no call has begun"
}

// selected reports whether -test.run may select the test of that name. It only decides which clauses start early, so
// it need not be exact: a clause that it misses, such as after a | outside brackets, runs when its turn comes.
func selected(name string) bool {
	parts := strings.Split(name, "/")
	if f := flag.Lookup("test.run"); f != nil && f.Value.String() != "" {
		for i, pattern := range strings.Split(f.Value.String(), "/") {
			if i >= len(parts) {
				break
			}
			re, err := regexp.Compile(pattern)
			if err == nil && !re.MatchString(parts[i]) {
				return false
			}
		}
	}
	return true
}
