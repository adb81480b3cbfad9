package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/backend"
)

// recorder is the testing.TB of clauses and harness functions: it records failures instead of failing the test.
type recorder struct {
	testing.TB

	mu       sync.Mutex // protects the following fields
	failures []string
	verdict  bool // a failure that no stall of the machine explains
	logs     []string
	skipped  string
	foreign  bool // skipped as not applicable
	ended    bool
	cleanups []func()

	behind atomic.Bool // a step came too late for the rest of the clause

	// ranOut reports whether a hold of the clause has expired. Nil: no hold has.
	ranOut func() bool

	ctx    context.Context
	cancel context.CancelFunc
}

func newRecorder(tb testing.TB) *recorder {
	r := &recorder{TB: tb}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// stopped is the panic value of FailNow and SkipNow, so that deferred calls of the clause run.
type stopped struct{}

// catch ends a clause that failed, skipped or panicked.
func (r *recorder) catch() {
	switch p := recover().(type) {
	case nil, stopped:
	default:
		r.Violatedf("panic: %v", p)
	}
}

// cleanup runs the functions passed to Cleanup, last first.
func (r *recorder) cleanup() {
	r.cancel()
	for {
		r.mu.Lock()
		n := len(r.cleanups)
		if n == 0 {
			r.ended = true
			r.mu.Unlock()
			return
		}
		f := r.cleanups[n-1]
		r.cleanups = r.cleanups[:n-1]
		r.mu.Unlock()
		func() {
			defer r.catch()
			f()
		}()
	}
}

func (r *recorder) result(c Clause) Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	result := Result{Clause: c, Outcome: Passed}
	switch {
	case len(r.failures) > 0:
		result.Outcome, result.Messages = Failed, append(r.failures, r.logs...)
	case r.foreign:
		result.Outcome, result.Messages = NotApplicable, []string{r.skipped}
	case r.skipped != "":
		result.Outcome, result.Messages = Skipped, []string{r.skipped}
	}
	return result
}

// Cleanup implements testing.TB.
func (r *recorder) Cleanup(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cleanups = append(r.cleanups, f)
}

// Context implements testing.TB.
func (r *recorder) Context() context.Context { return r.ctx }

// Helper implements testing.TB.
func (r *recorder) Helper() {}

// Errorf implements testing.TB. It keeps only the first messages, since clauses fail in loops.
//
// Only the first failure of a clause decides whether a busy machine may be the reason, since it may cause the others.
// A busy machine may be the reason for a call without an answer in time, or for the end of an expired hold.
func (r *recorder) Errorf(format string, args ...any) {
	r.fail(r.late(args), format, args...)
}

// Latef is Errorf for a step that is late, or so late that the clause shows nothing.
func (r *recorder) Latef(format string, args ...any) { r.fail(true, format, args...) }

// FatalLatef is Latef, and ends the clause.
func (r *recorder) FatalLatef(format string, args ...any) {
	r.Latef(format, args...)
	panic(stopped{})
}

// Violatedf is Errorf for a failure that no slow machine excuses, even after a failure that a busy machine explains:
// two holders at once by the drivers' own clock, tokens out of order. The clause is not retried.
func (r *recorder) Violatedf(format string, args ...any) {
	r.mu.Lock()
	r.verdict = true
	r.mu.Unlock()
	r.fail(false, format, args...)
}

func (r *recorder) fail(late bool, format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.verdict = r.verdict || !late && !r.behind.Load() && len(r.failures) == 0
	if len(r.failures) < 10 {
		r.failures = append(r.failures, fmt.Sprintf(format, args...))
	}
}

// late reports whether a stall of the machine may explain a failure.
func (r *recorder) late(args []any) bool {
	for _, arg := range args {
		switch err, is := arg.(error); {
		case arg == nil: // the nil error of an attempt that should have found a hold, or of a rival of a hold
		case !is:
			continue
		case vague(err):
			return true
		case !errors.Is(err, backend.ErrNotHeld) && !errors.Is(err, fencelock.ErrLost) && !errors.Is(err, backend.ErrHeld):
			continue
		}
		if r.ranOut != nil && r.ranOut() || lapsed(arg) {
			return true
		}
	}
	return false
}

// lapsed reports whether arg is the service's error for an expired hold: renewals of the hold, or of its session, did
// not arrive in time.
func lapsed(arg any) bool {
	err, _ := arg.(error)
	gone, is := errors.AsType[*backend.NotHeldError](err)
	return is && (gone.Reason == backend.ReasonExpired || gone.Reason == backend.ReasonSessionExpired)
}

// Error implements testing.TB.
func (r *recorder) Error(args ...any) {
	r.Errorf("%s", strings.TrimSuffix(fmt.Sprintln(args...), "\n"))
}

// Fail implements testing.TB.
func (r *recorder) Fail() { r.Errorf("failed") }

// FailNow implements testing.TB.
func (r *recorder) FailNow() {
	if !r.Failed() {
		r.Fail()
	}
	panic(stopped{})
}

// Failed implements testing.TB.
func (r *recorder) Failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.failures) > 0
}

// Fatal implements testing.TB.
func (r *recorder) Fatal(args ...any) {
	r.Error(args...)
	panic(stopped{})
}

// Fatalf implements testing.TB.
func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	panic(stopped{})
}

// Log implements testing.TB.
func (r *recorder) Log(args ...any) { r.Logf("%s", strings.TrimSuffix(fmt.Sprintln(args...), "\n")) }

// Logf implements testing.TB.
func (r *recorder) Logf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.logs) < 50 {
		r.logs = append(r.logs, fmt.Sprintf(format, args...))
	}
}

// Skip implements testing.TB.
func (r *recorder) Skip(args ...any) { r.Skipf("%s", strings.TrimSuffix(fmt.Sprintln(args...), "\n")) }

// Skipf implements testing.TB.
func (r *recorder) Skipf(format string, args ...any) {
	r.mu.Lock()
	r.skipped = fmt.Sprintf(format, args...)
	r.mu.Unlock()
	panic(stopped{})
}

// inapplicable ends a clause that does not apply to this driver.
func (r *recorder) inapplicable(why string) {
	r.mu.Lock()
	r.foreign = true
	r.mu.Unlock()
	r.Skipf("%s", why)
}

// SkipNow implements testing.TB.
func (r *recorder) SkipNow() { r.Skipf("skipped") }

// Skipped implements testing.TB.
func (r *recorder) Skipped() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.skipped != ""
}
