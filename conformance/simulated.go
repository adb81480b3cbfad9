package conformance

import (
	"testing"
	"testing/synctest"
)

// RunSimulated is Run in simulated time, where a TTL passes at once: for a driver that needs nothing outside this
// process, such as backend/memory, or one over a service that a test plays. The driver's clock must be backend.GoClock.
// Each clause has a bubble of testing/synctest and a harness of its own, made in that bubble. A call or a goroutine
// that does not end is a panic of package synctest.
func RunSimulated(t *testing.T, harness func(t testing.TB) Harness) {
	t.Helper()
	run(t, Clauses(), func(t *testing.T, c Clause) Result { return simulate(t, harness, c) })
}

// CheckSimulated is to Check what RunSimulated is to Run.
func CheckSimulated(t *testing.T, harness func(t testing.TB) Harness, only ...string) Report {
	t.Helper()
	var report Report
	for _, c := range chosen(t, only) {
		report = append(report, simulate(t, harness, c))
	}
	return report
}

// simulate runs one clause.
func simulate(t *testing.T, harness func(testing.TB) Harness, c Clause) (r Result) {
	synctest.Test(t, func(t *testing.T) {
		s := newSuite(t, harness(t), []Clause{c})
		s.simulated = true
		r = s.result(s.cases[0])
	})
	return r
}
