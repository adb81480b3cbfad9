package stallmeter

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Attempts bounds the tries of a step with failures that the machine may have caused.
const Attempts = 3

// InconclusiveError is the error of a step that failed in every attempt, each time while the machine stood still.
type InconclusiveError struct {
	Excused []string // each attempt's error and lost time
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

// Fairly repeats attempt, at most twice, if it failed while the machine lost time that Matters, unless the error is
// Conclusive. It returns the excused errors, and the error of the last attempt, which is an InconclusiveError if no
// attempt was fair.
//
// If all attempts had the same error except for figures, and lost only a little, no error is excused: the failures of
// stalls differ each time.
func Fairly(slack time.Duration, attempt func() error) (excused []string, err error) {
	return FairlyAfter(slack, func() {}, attempt)
}

// FairlyAfter is Fairly that calls before ahead of each further attempt, to wait for a better moment.
func FairlyAfter(slack time.Duration, before func(), attempt func() error) (excused []string, err error) {
	return fairly(slack, func() func() Lost { return Begin().End }, before, attempt)
}

// Calm waits until the machine loses little, for most at most.
func Calm(most time.Duration) {
	const look = 300 * time.Millisecond
	for end := time.Now().Add(most); time.Now().Before(end); {
		w := Begin()
		time.Sleep(look)
		if !w.End().Matters(look/10, look) {
			return
		}
	}
}

// figures match the differences between two equal errors.
var figures = regexp.MustCompile(`[0-9.]+(ns|µs|ms|m|s)?`)

func fairly(
	slack time.Duration, measure func() (end func() Lost), before func(), attempt func() error,
) (excused []string, err error) {
	alike := true // the excused errors so far
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
		before()
	}
}

// Mark is the beginning of a test's message about an inconclusive step.
const Mark = "INCONCLUSIVE  "

// TooMany reports whether n of ran tests are too many to be inconclusive: more than one in a hundred, and at least two.
func TooMany(n, ran int) bool { return n > 1 && n*100 > ran }

// undecided makes t a skip with a message about the open question, unless t fails otherwise.
func undecided(t testing.TB, format string, args ...any) {
	t.Helper()
	said := Mark + fmt.Sprintf(format, args...)
	t.Log(said)
	t.Cleanup(func() {
		if !t.Failed() {
			t.Skip(said)
		}
	})
}

// Report reports the results of Fairly to t. An inconclusive one makes t a skip: a machine that is too busy for a
// verdict is no evidence against the tested code, nor for it.
func Report(t testing.TB, what string, excused []string, err error) {
	t.Helper()
	switch inconclusive := (*InconclusiveError)(nil); {
	case errors.As(err, &inconclusive):
		undecided(t, "%s: %v", what, err)
	case err != nil:
		t.Errorf("%s: %v", what, err)
	case len(excused) > 0:
		t.Logf("%s: passed after attempts that failed while the machine stood still: %s",
			what, strings.Join(excused, "; "))
	}
}

// Errorf ends the window and fails t, unless its lost time Matters: then t is a skip.
func (w *Window) Errorf(t testing.TB, slack time.Duration, format string, args ...any) {
	t.Helper()
	took := time.Since(w.begin)
	if lost := w.End(); lost.Matters(slack, took) {
		undecided(t, "%s (%v lost, in %v)", fmt.Sprintf(format, args...), lost, took.Round(time.Millisecond))
		return
	}
	t.Errorf(format, args...)
}

// Late starts to measure something that should be over within a bound, and returns what to call at its end. That
// returns how long it took. Where it took longer it fails t, unless the machine lost at least half of the time by which
// it came late: then t is a skip.
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
		undecided(t, "%s took %v, more than %v; %v lost", what, took, bound, lost)
	default:
		t.Errorf("%s took %v, more than %v", what, took, bound)
	}
}
