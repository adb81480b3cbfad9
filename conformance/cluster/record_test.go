package cluster

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/fencing"
)

// fake is a lease that believes until it is told otherwise.
type fake struct {
	err      error
	deadline time.Time
}

func (f *fake) Err() error          { return f.err }
func (f *fake) Deadline() time.Time { return f.deadline }

func believing() *fake { return &fake{deadline: time.Now().Add(time.Hour)} }

// expire ends the lease as one that was not renewed.
func (f *fake) expire() { f.err, f.deadline = errLost, time.Now() }

var errLost = errors.New("lost")

// The record must find what a broken service would show.
func TestRecordFinds(t *testing.T) {
	for name, c := range map[string]struct {
		history func(r *record)
		want    string
	}{
		"two that believe at once": {func(r *record) {
			a := r.granted(0, "n", 1, believing())
			b := r.granted(1, "n", 2, believing())
			r.ended(a, false)
			r.ended(b, false)
		}, "while"},
		"an overlap that nobody saw when it began": {func(r *record) {
			late := believing()
			late.err = errLost // and true again when it is asked for the end
			a := r.granted(0, "n", 1, late)
			b := r.granted(1, "n", 2, believing())
			r.ended(a, true)
			r.ended(b, false)
		}, "before the end of"},
		"tokens that go back": {func(r *record) {
			r.ended(r.granted(0, "n", 2, believing()), false)
			r.ended(r.granted(1, "n", 1, believing()), false)
		}, "before the end of"},
		"a token issued twice": {func(r *record) {
			r.ended(r.granted(0, "n", 1, believing()), false)
			r.ended(r.granted(1, "n", 1, believing()), false)
		}, "one token"},
		"a token that fences nothing": {func(r *record) {
			r.ended(r.granted(0, "n", 0, believing()), false)
		}, "fences nothing"},
		"a holder whose write is refused": {func(r *record) {
			r.write(r.granted(0, "n", 2, believing()))
			r.write(r.granted(1, "n", 1, believing()))
		}, "its write was refused"},
		"a hold that is gone while its holder may believe in it": {func(r *record) {
			lost := believing()
			a := r.granted(0, "n", 1, lost)
			lost.err = errLost
			r.ended(a, true)
		}, "was acknowledged until"},
		"a hold that the service does not know": {func(r *record) {
			a := r.granted(0, "n", 1, believing())
			r.asked(a, backend.Info{Held: true, Holders: []backend.Holder{{Token: 2}}})
			r.ended(a, false)
		}, "the service knows of"},
		"an error that no fault explains": {func(r *record) {
			r.failed("release", errLost, false)
		}, "unexpected error"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRecord()
			c.history(r)
			if p := r.verify(); !strings.Contains(strings.Join(p.violations, "\n"), c.want) {
				t.Errorf("found %q, want %q", p.violations, c.want)
			}
		})
	}
}

// forgetful is a guard that admits everything.
type forgetful struct{}

func (forgetful) Check(context.Context, string, fencing.Token) error { return nil }

func TestRecordNoticesAGuardThatAdmitsLateWrites(t *testing.T) {
	for _, c := range []struct {
		guard               fencing.Guard
		refused, violations int
	}{
		{fencing.NewMemory(""), 1, 0},
		{forgetful{}, 0, 1},
	} {
		r := newRecord()
		r.guard = c.guard
		lost := believing()
		a := r.granted(0, "n", 1, lost)
		r.write(a)
		lost.expire()
		r.ended(a, true)
		b := r.granted(1, "n", 2, believing())
		r.write(b)
		r.ended(b, false)
		if p := r.verify(); p.refused != c.refused || len(p.violations) != c.violations {
			t.Errorf("%T: %d late writes refused, violations %q", c.guard, p.refused, p.violations)
		}
	}
}

// A history without fault has no violation, and tells how long before the rival the loss was known.
func TestRecordMeasures(t *testing.T) {
	r := newRecord()
	lost := believing()
	a := r.granted(0, "n", 1, lost)
	lost.expire()
	r.ended(a, true)
	for begin := time.Now(); time.Since(begin) < time.Millisecond; {
		runtime.Gosched()
	}
	b := r.granted(1, "n", 2, believing())
	r.ended(b, false)
	p := r.verify()
	if len(p.violations) != 0 || p.grants != 2 || p.lost != 1 || p.worst < time.Millisecond || p.worst == forever || p.overlap != 0 {
		t.Errorf("%v, violations %q", p, p.violations)
	}
}
