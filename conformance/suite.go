package conformance

import (
	"context"
	"flag"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// suite runs clauses against one harness.
type suite struct {
	tb       testing.TB
	h        Harness
	desc     backend.Description
	cases    []*oneCase
	seats    chan struct{} // how many clauses run side by side
	parallel sync.WaitGroup

	simulated bool // runs in a bubble of testing/synctest
}

// oneCase is a clause in one run.
type oneCase struct {
	clause Clause
	once   sync.Once
	done   chan struct{}
	result Result // valid after done
}

const sideBySide = 16

func newSuite(tb testing.TB, h Harness, clauses []Clause) *suite {
	tb.Helper()
	if h.New == nil {
		tb.Fatal("conformance: Harness.New is nil")
	}
	s := &suite{tb: tb, h: h, seats: make(chan struct{}, sideBySide)}
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

// describe asks a driver what it declares, after a probe if it has one, since a probe may change the answer.
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
			s.parallel.Add(1)
			go func() {
				defer s.parallel.Done()
				s.seats <- struct{}{}
				defer func() { <-s.seats }()
				s.start(c)
			}()
		}
	}
}

// result returns the outcome of c, and runs it now if nobody has.
func (s *suite) result(c *oneCase) Result {
	if c.clause.serial || c.clause.crowd {
		s.parallel.Wait()
	}
	s.start(c)
	<-c.done
	return c.result
}

func (s *suite) start(c *oneCase) {
	c.once.Do(func() {
		began := time.Now()
		c.result = s.try(c.clause)
		c.result.Took = time.Since(began)
		close(c.done)
	})
}

func (s *suite) try(c Clause) Result {
	if missing := s.desc.Capabilities.Missing(c.caps); missing != 0 {
		return Result{
			Clause: c, Outcome: NotApplicable, Messages: []string{"the driver does not declare " + missing.String()},
		}
	}
	if lacks := s.h.lacking(c.needs); lacks != "" {
		return Result{Clause: c, Outcome: Skipped, Messages: []string{lacks + " is nil"}}
	}
	if s.simulated { // nothing stalls
		r, _ := s.attempt(c)
		return r
	}
	return fairly(s.h.TTL/10, func() (Result, bool) { return s.attempt(c) })
}

// attempt runs the clause once.
func (s *suite) attempt(c Clause) (r Result, violated bool) {
	rec := newRecorder(s.tb)
	t := &trial{recorder: rec, h: &s.h, desc: s.desc, clause: c, ttl: s.h.TTL}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer rec.cleanup()
		defer rec.catch()
		c.run(t)
	}()
	// A driver that ignores contexts must not hang the suite; its goroutines stay behind in that case.
	rounds := 1
	if c.rounds != nil {
		rounds = max(c.rounds(), 1)
	}
	limit := time.NewTimer(time.Duration(rounds) * (time.Minute + 20*s.h.TTL))
	defer limit.Stop()
	select {
	case <-ended:
	case <-limit.C:
		rec.Errorf("the clause did not come to an end; a call ignores its context: %s", t.underWay())
	}
	rec.mu.Lock()
	violated = rec.violated
	rec.mu.Unlock()
	return rec.result(c), violated
}

// selected tells whether -test.run may want the test of that name. It decides only what is started ahead,
// so it need not be exact: a clause that it misses, as behind a | that is in no brackets, runs when its turn comes.
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
