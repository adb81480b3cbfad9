package conformance_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/fencelock/fencelock/backend"
	"github.com/fencelock/fencelock/backend/memory"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/fault"
	"github.com/fencelock/fencelock/fencing"
	"github.com/fencelock/fencelock/internal/testtier"
)

func TestMain(m *testing.M) {
	// The in-process driver needs nothing installed, so nothing may be skipped.
	os.Setenv("FENCELOCK_REQUIRE", "all")
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/fencelock/fencelock/conformance.staysForever"))
}

// memoryHarness uses everything that a separate store offers.
func memoryHarness(testing.TB) conformance.Harness {
	store := memory.NewStore(&memory.Options{Clock: backend.GoClock()})
	return conformance.Harness{
		New: func(testing.TB) backend.Driver { return store.Driver() },
		Linked: func(testing.TB) (backend.Driver, fault.Link) {
			d := store.Driver()
			return d, conformance.NetworkLink(d)
		},
		Server: conformance.Server{
			Restart:     func(testing.TB) { store.Restart() },
			Stop:        func(testing.TB) { store.Stop() },
			Start:       func(testing.TB) { store.Start() },
			Pause:       func(testing.TB) { store.Pause() },
			Resume:      func(testing.TB) { store.Resume() },
			Evict:       func(_ testing.TB, name string) { store.Evict(name) },
			EvictWaiter: func(_ testing.TB, name string) int { return store.EvictWaiters(name) },
			Wipe:        func(testing.TB) { store.Wipe() },
			Compact:     func(testing.TB, string) { store.Compact() },

			RefuseRelease: refuse(store, memory.RefuseReleases),
			RefuseWrites:  refuse(store, memory.RefuseWrites),
		},
		Ahead: func(t testing.TB, token fencing.Token) {
			if err := store.Ahead(token); err != nil {
				t.Fatal(err)
			}
		},
		Leftovers: func() ([]string, error) { return make([]string, store.Names()), nil },
		// There is no place beside the driver's own entries where anybody could leave something.
		Intrude: func(testing.TB, string) {},
	}
}

// refuse is a hook that has the store refuse calls.
func refuse(store *memory.Store, what memory.Refusal) func(testing.TB, string) func() {
	return func(testing.TB, string) func() {
		store.Refuse(what)
		return func() { store.Refuse(memory.RefuseNothing) }
	}
}

func TestMemory(t *testing.T) { conformance.RunSimulated(t, memoryHarness) }

// TestMemoryInRealTime is how a driver of a real service runs the suite.
func TestMemoryInRealTime(t *testing.T) {
	testtier.NotShort(t)
	conformance.Run(t, memoryHarness(t), testtier.Some(t, "exclusion", "lease", "waiting", "cancellation")...)
}

// The suite runs through permits too: one of one, and two of three, of which no two fit at once.
func TestMemoryAsPermits(t *testing.T) {
	for name, n := range map[string][2]int{"1 of 1": {1, 1}, "2 of 3": {2, 3}} {
		t.Run(name, func(t *testing.T) {
			conformance.RunSimulated(t, func(t testing.TB) conformance.Harness {
				return conformance.AsPermits(memoryHarness(t), n[0], n[1])
			})
		})
	}
}
