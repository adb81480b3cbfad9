package conformance

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
)

// No stall explains a violation, or a panic.
func TestRecorderKnowsViolations(t *testing.T) {
	r := newRecorder(t)
	r.Latef("late")
	r.Errorf("a consequence")
	if r.verdict {
		t.Error("a failure that follows what came late is a verdict")
	}
	r.Violatedf("two holders")
	if result := r.result(Clause{}); !r.verdict || result.Outcome != Failed || len(result.Messages) != 3 {
		t.Errorf("verdict: %v, result %+v", r.verdict, result)
	}
	r = newRecorder(t)
	func() {
		defer r.catch()
		panic("out of step")
	}()
	if !r.verdict {
		t.Error("a panic is excused")
	}
}

func TestViolationIsNotTriedAgain(t *testing.T) {
	// No slack at all: any machine loses more.
	for verdict, want := range map[bool]struct {
		outcome  Outcome
		attempts int
	}{true: {Failed, 1}, false: {Inconclusive, 3}} {
		n := 0
		r := fairly(-1, func() {}, func() (Result, bool) {
			n++
			time.Sleep(10 * time.Millisecond)
			return Result{Outcome: Failed, Messages: []string{"found"}}, verdict
		})
		if r.Outcome != want.outcome || n != want.attempts || r.Messages[0] != "found" {
			t.Errorf("verdict: %v: %v %q after %d attempts, want %v after %d",
				verdict, r.Outcome, r.Messages, n, want.outcome, want.attempts)
		}
	}
	if r := fairly(-1, func() {}, func() (Result, bool) { return Result{Outcome: Passed}, false }); r.Outcome != Passed ||
		len(r.Messages) > 0 {
		t.Errorf("a clause that passes: %+v", r)
	}
}

// Only what a busy machine explains is excused.
func TestOnlyLatenessIsExcused(t *testing.T) {
	held := &backend.HeldError{Name: "name"}
	gone := &backend.NotHeldError{Name: "name"}
	for what, c := range map[string]struct {
		args   []any
		ranOut bool
		want   bool // a verdict
	}{
		"a wrong answer":                        {[]any{backend.ErrInvalidTTL}, true, true},
		"a wrong figure":                        {[]any{7}, true, true},
		"no answer in time":                     {[]any{fmt.Errorf("call: %w", context.DeadlineExceeded)}, false, false},
		"no connection":                         {[]any{"now", backend.ErrUnavailable}, false, false},
		"a hold that is gone":                   {[]any{gone}, false, true},
		"a hold that has run out":               {[]any{gone}, true, false},
		"a hold that its service let expire":    {[]any{backend.Loss{Reason: backend.ReasonExpired}.NotHeld("name")}, false, false},
		"a hold with an expired session":        {[]any{backend.Loss{Reason: backend.ReasonSessionExpired}.NotHeld("name")}, false, false},
		"a hold that was evicted":               {[]any{backend.Loss{Reason: backend.ReasonEvicted}.NotHeld("name")}, false, true},
		"a grant beside a hold":                 {[]any{nil}, false, true},
		"a grant after the end of one":          {[]any{nil}, true, false},
		"a name that is held":                   {[]any{held}, false, true},
		"a name that is held after a late step": {[]any{held}, true, false},
	} {
		r := newRecorder(t)
		r.ranOut = func() bool { return c.ranOut }
		r.Errorf(strings.Repeat("%v ", len(c.args)), c.args...)
		if r.verdict != c.want {
			t.Errorf("%s is a verdict: %v, want %v", what, r.verdict, c.want)
		}
	}
	r := newRecorder(t)
	if r.behind.Store(true); r.verdict {
		t.Error("a clause with late steps has a verdict without a failure")
	}
	if r.Errorf("the order is wrong"); r.verdict {
		t.Error("the failure of a clause with late steps is a verdict")
	}
}
