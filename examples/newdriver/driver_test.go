package newdriver

import (
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/conformance"
)

// The suite runs in simulated time, since the service is in this process, and leaves out what would break the service:
// over a real one write conformance.Run, and tell the harness what can be broken. See package conformance.
func TestConformance(t *testing.T) {
	report := conformance.CheckSimulated(t, func(testing.TB) conformance.Harness {
		service := &Service{}
		return conformance.Harness{
			New: func(testing.TB) backend.Driver { return New(service, backend.GoClock()) },
		}
	})
	passed, failed := report.Count(conformance.Passed), report.Count(conformance.Failed)
	t.Logf("%d clauses passed, %d failed, %d need something to break, %d do not apply",
		passed, failed, report.Count(conformance.Skipped), report.Count(conformance.NotApplicable))
	if failed > 0 || passed < 50 {
		t.Errorf("%v", report)
	}
}
