package conformance

import (
	"testing"
	"time"
)

// No stall explains a violation, or a panic.
func TestRecorderKnowsViolations(t *testing.T) {
	r := newRecorder(t)
	r.Errorf("late")
	if r.violated {
		t.Error("Errorf is a violation")
	}
	r.Violatedf("two holders")
	if result := r.result(Clause{}); !r.violated || result.Outcome != Failed || len(result.Messages) != 2 {
		t.Errorf("violated: %v, result %+v", r.violated, result)
	}
	r = newRecorder(t)
	func() {
		defer r.catch()
		panic("out of step")
	}()
	if !r.violated {
		t.Error("a panic is excused")
	}
}

func TestViolationIsNotTriedAgain(t *testing.T) {
	// No slack at all: any machine loses more.
	for violated, want := range map[bool]struct {
		outcome  Outcome
		attempts int
	}{true: {Failed, 1}, false: {Inconclusive, 3}} {
		n := 0
		r := fairly(-1, func() (Result, bool) {
			n++
			time.Sleep(10 * time.Millisecond)
			return Result{Outcome: Failed, Messages: []string{"found"}}, violated
		})
		if r.Outcome != want.outcome || n != want.attempts || r.Messages[0] != "found" {
			t.Errorf("violated: %v: %v %q after %d attempts, want %v after %d",
				violated, r.Outcome, r.Messages, n, want.outcome, want.attempts)
		}
	}
	if r := fairly(-1, func() (Result, bool) { return Result{Outcome: Passed}, false }); r.Outcome != Passed ||
		len(r.Messages) > 0 {
		t.Errorf("a clause that passes: %+v", r)
	}
}
