package stallmeter

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestOnlyAFairAttemptDecides(t *testing.T) {
	const long = time.Second
	failure, violation := errors.New("failure"), Conclusive(errors.New("violation"))
	type attempt struct {
		err  error
		lost time.Duration
	}
	for what, c := range map[string]struct {
		attempts []attempt
		want     string // of the error's beginning
		excused  int
	}{
		"passes":                        {[]attempt{{}}, "", 0},
		"passes in spite of a stall":    {[]attempt{{lost: long}}, "", 0},
		"fails":                         {[]attempt{{err: failure}}, "failure", 0},
		"fails in a stall, then passes": {[]attempt{{failure, long}, {}}, "", 1},
		"fails in a stall, then fails":  {[]attempt{{failure, long}, {err: failure}}, "failure", 1},
		"violates in a stall":           {[]attempt{{violation, long}}, "violation", 0},
		"fails in a stall, violates in next": {
			[]attempt{{failure, long}, {fmt.Errorf("%w", violation), long}}, "violation", 1,
		},
		"fails in three stalls": {[]attempt{{failure, long}, {failure, long}, {failure, long}}, "inconclusive", 3},
	} {
		n := 0
		measure := func() func() Lost {
			return func() Lost { return Lost{Longest: c.attempts[n-1].lost, Total: c.attempts[n-1].lost} }
		}
		waited := 0
		excused, err := fairly(100*time.Millisecond, measure, func() { waited++ }, func() error { n++; return c.attempts[n-1].err })
		if waited != n-1 {
			t.Errorf("what %s waited %d times before %d attempts", what, waited, n)
		}
		if n != len(c.attempts) || len(excused) != c.excused {
			t.Errorf("what %s was tried %d times, and excused %q", what, n, excused)
		}
		if text := fmt.Sprint(err); c.want == "" && err != nil || !strings.HasPrefix(text, c.want) && c.want != "" {
			t.Errorf("what %s ended with %v, want %q", what, err, c.want)
		}
		if c.excused > 0 && !strings.HasPrefix(excused[0], "failure (1s, 1s of it at once lost") {
			t.Errorf("what %s is excused with %q", what, excused)
		}
	}
}

// What fails thrice in the same words, on a machine that is only busy, has failed.
func TestThriceTheSameIsAVerdict(t *testing.T) {
	const slack = 100 * time.Millisecond
	busy := Lost{Longest: slack / 2, Total: 2 * slack}
	for what, c := range map[string]struct {
		words [Attempts]string
		lost  [Attempts]Lost
		want  string
	}{
		"the same, but for figures": {
			[Attempts]string{"at 7.5ms: lost", "at 12s: lost", "at 3: lost"}, [Attempts]Lost{busy, busy, busy}, "at",
		},
		"something else": {[Attempts]string{"late", "late", "lost"}, [Attempts]Lost{busy, busy, busy}, "inconclusive"},
		"a stall in one of them": {
			[Attempts]string{"late", "late", "late"},
			[Attempts]Lost{busy, {2 * slack, 2 * slack}, busy}, "inconclusive",
		},
		"hardly any processor": {
			[Attempts]string{"late", "late", "late"}, [Attempts]Lost{busy, {0, 9 * slack}, busy}, "inconclusive",
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := 0
			excused, err := fairly(slack, func() func() Lost { return func() Lost { return c.lost[n-1] } },
				func() {}, func() error {
					time.Sleep(time.Second)
					n++
					return errors.New(c.words[n-1])
				})
			if n != Attempts || len(excused) != Attempts || !strings.HasPrefix(fmt.Sprint(err), c.want) {
				t.Errorf("%s: %v after %d attempts", what, err, n)
			}
		})
	}
}

func TestReport(t *testing.T) {
	inconclusive := &InconclusiveError{Excused: []string{"late"}, Err: errors.New("late")}
	for _, c := range []struct {
		excused []string
		err     error
		failed  bool
		says    string
	}{
		{nil, nil, false, ""},
		{[]string{"late"}, nil, false, "round: passed after"},
		{nil, errors.New("broken"), true, "round: broken"},
		{nil, inconclusive, false, "INCONCLUSIVE  round"},
	} {
		r := &told{TB: t}
		Report(r, "round", c.excused, c.err)
		if r.skipped != strings.HasPrefix(c.says, Mark) {
			t.Errorf("%q, %v: skipped: %v", c.excused, c.err, r.skipped)
		}
		if r.failed != c.failed || !strings.HasPrefix(r.said, c.says) || c.says == "" && r.said != "" {
			t.Errorf("%q, %v: failed: %v, %q", c.excused, c.err, r.failed, r.said)
		}
	}
}

type told struct {
	testing.TB
	failed, skipped bool
	said            string
}

func (r *told) Log(args ...any)  { r.said = fmt.Sprint(args...) }
func (r *told) Skip(...any)      { r.skipped = true }
func (r *told) Failed() bool     { return r.failed }
func (r *told) Cleanup(f func()) { f() }

func (r *told) Helper()                         {}
func (r *told) Logf(format string, args ...any) { r.said = fmt.Sprintf(format, args...) }
func (r *told) Errorf(format string, args ...any) {
	r.failed, r.said = true, fmt.Sprintf(format, args...)
}

func TestLate(t *testing.T) {
	const bound = time.Second
	for _, c := range []struct {
		took, lost time.Duration
		failed     bool
		says       string
	}{
		{bound, 0, false, ""},
		{bound, bound, false, ""},
		{bound + 2*Step, 0, true, "it took 1.01s, more than 1s"},
		{2 * bound, bound/2 - 1, true, "it took 2s, more than 1s"},
		{2 * bound, bound / 2, false, "INCONCLUSIVE  it took 2s"},
	} {
		r := &told{TB: t}
		late(r, Lost{Total: c.lost}, c.took, bound, "it")
		if r.failed != c.failed || !strings.HasPrefix(r.said, c.says) || c.says == "" && r.said != "" {
			t.Errorf("%v with %v lost: failed: %v, %q", c.took, c.lost, r.failed, r.said)
		}
	}
	r := &told{TB: t}
	end := Late(r)
	if took := end(time.Hour, "it"); took <= 0 || r.failed || r.said != "" {
		t.Errorf("took %v, failed: %v, %q", took, r.failed, r.said)
	}
}

func TestErrorfOfAWindow(t *testing.T) {
	for lost, failed := range map[time.Duration]bool{0: true, time.Hour: false} {
		r := &told{TB: t}
		w := &Window{m: &shared, begin: time.Now(), sum: Lost{Longest: lost, Total: lost}}
		w.Errorf(r, time.Second, "it is %d", 1)
		want := "it is 1"
		if !failed {
			want = "INCONCLUSIVE  it is 1 (1h0m0s, 1h0m0s of it at once lost"
		}
		if r.failed != failed || !strings.HasPrefix(r.said, want) {
			t.Errorf("%v lost: failed: %v, %q", lost, r.failed, r.said)
		}
	}
}

// What cannot be decided is a skip, and a failure beside it a failure.
func TestInconclusiveIsASkip(t *testing.T) {
	r := &told{TB: t}
	if late(r, Lost{Total: time.Hour}, time.Hour, time.Second, "it"); !r.skipped || r.failed {
		t.Errorf("skipped: %v, failed: %v", r.skipped, r.failed)
	}
	failed := &told{TB: t, failed: true}
	if late(failed, Lost{Total: time.Hour}, time.Hour, time.Second, "it"); failed.skipped {
		t.Error("a test that has failed is a skip")
	}
	for _, c := range []struct {
		n, ran int
		want   bool
	}{{0, 0, false}, {1, 1, false}, {1, 50, false}, {2, 2, true}, {2, 199, true}, {2, 200, false}, {3, 299, true}} {
		if TooMany(c.n, c.ran) != c.want {
			t.Errorf("%d of %d are too many: %v", c.n, c.ran, !c.want)
		}
	}
}
