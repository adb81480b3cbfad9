package conformance_test

import (
	"testing"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/conformance"
)

// named is a driver under another name.
type named struct {
	*memory.Driver
	name string
}

func (d *named) Describe() backend.Description {
	s := d.Driver.Describe()
	s.Name = d.name
	return s
}

// If a pair of the table passes, that is an error; if it fails, a known failure.
func TestKnownToFail(t *testing.T) {
	for _, k := range conformance.KnownToFail() {
		harness := func(t testing.TB) conformance.Harness {
			h := memoryHarness(t)
			inner := h.New
			h.New = func(t testing.TB) backend.Driver {
				return &named{Driver: inner(t).(*memory.Driver), name: k.Driver}
			}
			return h
		}
		if r := conformance.CheckSimulated(t, harness, k.Clause); r.Count(conformance.Failed) != 1 {
			t.Errorf("%s passes for %s and ends with %v, want it to fail because of the table", k.Clause, k.Driver, r)
		}
	}
}
