package testtier

import "testing"

func TestOnly(t *testing.T) {
	for value, want := range map[string]bool{"": false, "1": true} {
		t.Setenv(Env, value)
		ran := false
		t.Run(Env+"="+value, func(t *testing.T) {
			// The skip of an inner test would be a skip of the CI's: a recorder takes it instead.
			r := recorder{TB: t}
			func() {
				defer func() { _ = recover() }()
				Only(&r)
				ran = true
			}()
			if r.skipped == want {
				t.Errorf("skipped: %v", r.skipped)
			}
		})
		if ran != want || Wanted() != want {
			t.Errorf("%s=%q: ran: %v, wanted: %v; want %v", Env, value, ran, Wanted(), want)
		}
	}
}

type recorder struct {
	testing.TB
	skipped bool
}

func (r *recorder) Helper() {}

func (r *recorder) Skip(...any) {
	r.skipped = true
	panic("skipped")
}
