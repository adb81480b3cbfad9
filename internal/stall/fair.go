package stall

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Attempts is how often something is tried whose failures the machine may have caused.
const Attempts = 3

// InconclusiveError is the error of what failed each time that it was tried, and each time the machine stood still.
type InconclusiveError struct {
	Excused []string // what each attempt said, and what it lost
	Err     error    // of the last one
}

// Error implements error.
func (e *InconclusiveError) Error() string {
	return fmt.Sprintf("inconclusive, the machine stood still in each of %d attempts: %s",
		len(e.Excused), strings.Join(e.Excused, "; "))
}

// Unwrap returns the error of the last attempt.
func (e *InconclusiveError) Unwrap() error { return e.Err }

// Conclusive marks an error that no stall excuses: two holders at once, tokens out of order. Of nil it is nil.
func Conclusive(err error) error {
	if err == nil {
		return nil
	}
	return conclusive{err}
}

type conclusive struct{ error }

func (c conclusive) Unwrap() error { return c.error }

// Fairly calls attempt again, twice at most, where it failed while the machine lost time that Matters, unless the error
// is Conclusive. It returns what was excused, and the error of the last attempt, which is an InconclusiveError if none
// was fair.
//
// Where every attempt said the same but for figures, and lost only a little here and there, nothing is excused: what
// stalls break breaks elsewhere each time.
func Fairly(slack time.Duration, attempt func() error) (excused []string, err error) {
	return fairly(slack, func() func() Lost { return Begin().End }, attempt)
}

// figures are what differs between two errors that say the same.
var figures = regexp.MustCompile(`[0-9.]+(ns|µs|ms|m|s)?`)

func fairly(slack time.Duration, measure func() (end func() Lost), attempt func() error) (excused []string, err error) {
	alike := true // what was excused so far
	for said := ""; ; {
		began := time.Now()
		end := measure()
		err := attempt()
		lost, took := end(), time.Since(began)
		if err == nil || errors.As(err, new(conclusive)) || !lost.Matters(slack, took) {
			return excused, err
		}
		words := figures.ReplaceAllString(err.Error(), "0")
		alike = alike && (said == "" || said == words) && lost.little(slack, took)
		said = words
		excused = append(excused, fmt.Sprintf("%v (%v lost, in %v)", err, lost, took.Round(time.Millisecond)))
		switch {
		case len(excused) < Attempts:
		case alike:
			return excused, err
		default:
			return excused, &InconclusiveError{excused, err}
		}
	}
}

// Report tells t of what Fairly returned. What is inconclusive is logged as such and does not fail: a machine that is
// too busy for a verdict says nothing against what is tested. The CI fails if there is more of it than a few in a
// hundred tests.
func Report(t testing.TB, what string, excused []string, err error) {
	t.Helper()
	switch inconclusive := (*InconclusiveError)(nil); {
	case errors.As(err, &inconclusive):
		t.Logf("INCONCLUSIVE  %s: %v", what, err)
	case err != nil:
		t.Errorf("%s: %v", what, err)
	case len(excused) > 0:
		t.Logf("%s: passed after attempts that failed while the machine stood still: %s",
			what, strings.Join(excused, "; "))
	}
}

// Errorf ends the window and fails t, unless what it lost Matters: then it logs that nothing is known.
func (w *Window) Errorf(t testing.TB, slack time.Duration, format string, args ...any) {
	t.Helper()
	took := time.Since(w.begin)
	if lost := w.End(); lost.Matters(slack, took) {
		t.Logf("INCONCLUSIVE  %s (%v lost, in %v)", fmt.Sprintf(format, args...), lost, took.Round(time.Millisecond))
		return
	}
	t.Errorf(format, args...)
}

// Late starts to measure something that should be over within a bound, and returns what to call at its end. That
// returns how long it took. Where it took longer it fails t, unless the machine lost at least half of the time by which
// it came late: then the log says that nothing is known.
func Late(t testing.TB) (end func(bound time.Duration, what string) (took time.Duration)) {
	w, began := Begin(), time.Now()
	t.Cleanup(func() { w.End() })
	return func(bound time.Duration, what string) time.Duration {
		t.Helper()
		took := time.Since(began)
		late(t, w.End(), took, bound, what)
		return took
	}
}

func late(t testing.TB, lost Lost, took, bound time.Duration, what string) {
	t.Helper()
	switch {
	case took <= bound:
	case lost.Total >= (took-bound)/2:
		t.Logf("INCONCLUSIVE  %s took %v, more than %v; %v lost", what, took, bound, lost)
	default:
		t.Errorf("%s took %v, more than %v", what, took, bound)
	}
}
