package cluster

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/fencing"
)

func believes() error { return nil }

func TestRegisterFinds(t *testing.T) {
	for what, c := range map[string]struct {
		do   func(r *register)
		want string
	}{
		"a holder with a refused write": {func(r *register) {
			r.write("n", 2, believes)
			r.write("n", 1, believes)
		}, "was refused"},
		"an error that no fault explains": {func(r *register) {
			r.failed("release", errors.New("odd"), false)
		}, "unexpected error: odd"},
	} {
		r := newRegister()
		if err := r.alarm(); err != nil {
			t.Errorf("before: %v", err)
		}
		c.do(r)
		if err := r.alarm(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: found %v, want %q", what, err, c.want)
		}
	}
	r := newRegister()
	r.write("n", 2, believes)
	r.write("n", 1, func() error { return errors.New("lost") }) // the lease reports the loss
	r.failed("release", errors.New("away"), true)
	if err := r.alarm(); err != nil {
		t.Errorf("found %v, and nothing was wrong", err)
	}
}

// forgetful is a guard that admits every write.
type forgetful struct{}

func (forgetful) Check(context.Context, fencing.Claims) error { return nil }

func TestRegisterDetectsAGuardThatAdmitsLateWrites(t *testing.T) {
	for _, c := range []struct {
		guard   fencing.Guard
		refused int
		found   bool
	}{
		{new(fencing.Memory), 1, false},
		{forgetful{}, 0, true},
	} {
		r := newRegister()
		r.guard = c.guard
		r.write("n", 1, believes)
		r.lost("n", 1)
		r.write("n", 2, believes)
		if err := r.alarm(); r.refused != c.refused || (err != nil) != c.found {
			t.Errorf("%T: %d late writes refused, found %v", c.guard, r.refused, err)
		}
	}
}
