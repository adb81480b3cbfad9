package conformance_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/conformance"
)

func TestUnsupportedClausesAreSkippedByName(t *testing.T) {
	store := memory.NewStore(nil)
	h := conformance.Harness{New: func(testing.TB) backend.Driver { return store.Driver() }}
	want := map[string]string{
		"A1": "Harness.Linked", "S1": "Harness.Server.Stop",
		"S2": "Harness.Server.Pause", "S3": "Harness.Server.Restart",
		"D2": "Harness.Server.Evict", "S6": "Harness.Server.Wipe", "K2": "Harness.Leftovers", "N4": "Harness.Intrude",
		"P14": "Harness.Server.Compact",
	}
	for _, r := range conformance.Check(t, h, "A1", "S1", "S2", "S3", "D2", "S6", "K2", "N4", "P14") {
		if r.Outcome != conformance.Skipped || !strings.HasPrefix(r.Messages[0], want[r.Clause.ID]) {
			t.Errorf("%v = %v %q, want it skipped for lack of %s", r.Clause, r.Outcome, r.Messages, want[r.Clause.ID])
		}
	}
	if r := conformance.Check(t, h, "L6"); r.Count(conformance.Passed) != 1 {
		t.Errorf("a clause that needs no faults:\n%v", r)
	}
}

// A driver that asks first whether its request holds the name is cut off there. The failure says what it may leave out.
func TestAFailureNamesFresh(t *testing.T) {
	h := mutant{apply: func(b *broken) {
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			if _, err := b.Driver.Look(ctx, r.Name); err != nil {
				return backend.Grant{}, errors.Join(ctx.Err()) // nothing was asked for yet
			}
			return b.Driver.Acquire(ctx, r)
		}
	}}.harness
	for _, r := range conformance.CheckSimulated(t, h, "A1", "A2") {
		if r.Outcome != conformance.Failed || !strings.Contains(r.Messages[0], "Request.Fresh") {
			t.Errorf("%v = %v %q, want Request.Fresh named", r.Clause, r.Outcome, r.Messages)
		}
	}
}

func TestUndeclaredCapabilityIsNoSkip(t *testing.T) {
	h := mutant{apply: func(b *broken) {
		b.describe = func() backend.Description {
			d := b.Driver.Describe()
			d.Capabilities &^= backend.CapFair
			return d
		}
	}}.harness(t)
	if r := conformance.Check(t, h, "W2", "W3"); r.Count(conformance.NotApplicable) != 2 {
		t.Errorf("clauses about order, of a driver that is not fair:\n%v", r)
	}
}

func TestPanicAndFailureEndOneClauseOnly(t *testing.T) {
	h := mutant{apply: func(b *broken) {
		b.release = func(ctx context.Context, g backend.Grant) error {
			if g.Owner == "conformance O2" {
				panic("released")
			}
			return b.Driver.Release(ctx, g)
		}
	}}.harness(t)
	var outcomes []conformance.Outcome
	for _, r := range conformance.Check(t, h, "O2", "O6") {
		outcomes = append(outcomes, r.Outcome)
		if r.Outcome == conformance.Failed && !slices.Contains(r.Messages, "panic: released") {
			t.Errorf("%v failed with %q, want the panic", r.Clause, r.Messages)
		}
	}
	if want := []conformance.Outcome{conformance.Failed, conformance.Passed}; !slices.Equal(outcomes, want) {
		t.Errorf("outcomes = %v, want %v", outcomes, want)
	}
}

func TestACallThatDoesNotEndIsNamed(t *testing.T) {
	h := mutant{apply: func(b *broken) {
		const long = time.Hour                             // than any clause may take
		b.world.t.Cleanup(func() { time.Sleep(2 * long) }) // until all have come to an end
		b.acquire = func(ctx context.Context, r backend.Request) (backend.Grant, error) {
			g, err := b.Driver.Acquire(ctx, r)
			if r.Wait {
				time.Sleep(long)
			}
			return g, err
		}
	}}.harness
	for _, r := range conformance.CheckSimulated(t, h, "W7") {
		if r.Outcome != conformance.Failed ||
			!strings.Contains(
				strings.Join(r.Messages, "\n"), `Acquire with Wait "conformance/dead-waiter-blocks-nobody/`) {
			t.Errorf("%v = %v %q, want the call that goes on named", r.Clause, r.Outcome, r.Messages)
		}
	}
}
