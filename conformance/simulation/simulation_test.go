package simulation

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/check"
	"github.com/fencelock/fencelock/internal/race"
	"github.com/fencelock/fencelock/internal/testfindings"
	"github.com/fencelock/fencelock/internal/testtier"
)

// TestSimulation runs worlds until the requested hours have been simulated. See the package comment for the
// environment.
func TestSimulation(t *testing.T) {
	if text := os.Getenv("FENCELOCK_SEED"); text != "" {
		one(t, text)
		return
	}
	s := &sum{closest: forever, want: time.Duration(hours(t) * float64(time.Hour))}
	t.Cleanup(func() { s.report(t) })
	for i := range runtime.GOMAXPROCS(0) {
		t.Run(fmt.Sprint("worker-", i), func(t *testing.T) {
			t.Parallel()
			for seed, more := s.next(); more; seed, more = s.next() {
				s.add(t, simulate(t, seed, how{}))
			}
		})
	}
}

// one runs one seed and logs every event.
func one(t *testing.T, text string) {
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("FENCELOCK_SEED: %v", err)
	}
	o := simulate(t, seed, how{logged: true, traced: true})
	for _, e := range o.log {
		t.Log(e)
	}
	for _, v := range o.violations {
		t.Error(v)
	}
	t.Logf("seed %d: %v, %d operations, %d faults, %d grants, %d losses, exact replay: %v", seed, o.length,
		o.operations, o.faults, o.acquires, o.losses, o.single)
}

// hours returns the number of hours to simulate.
func hours(t *testing.T) float64 {
	if text := os.Getenv("FENCELOCK_SIM_HOURS"); text != "" {
		h, err := strconv.ParseFloat(text, 64)
		if err != nil || h <= 0 {
			t.Fatalf("FENCELOCK_SIM_HOURS is %q, want a positive number", text)
		}
		return h
	}
	if testtier.Wanted() && !race.Enabled {
		return 1000
	}
	return 10
}

// sum has the sums of the outcomes of all worlds.
type sum struct {
	want time.Duration

	mu      sync.Mutex // protects the following fields
	started uint64     // seeds
	seeds   int
	failed  int
	done    time.Duration
	closest time.Duration

	operations, acquires, renewals, losses, refused, faults, violations int
}

const forever = time.Duration(1<<63 - 1)

// next returns the next seed, or false if no further one is needed.
func (s *sum) next() (uint64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	const enough = 10 // failures to report
	if s.done >= s.want || s.failed >= enough {
		return 0, false
	}
	s.started++
	return s.started, true
}

func (s *sum) add(t *testing.T, o outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seeds++
	s.done += o.length
	s.closest = min(s.closest, o.closest)
	s.operations += o.operations
	s.acquires += o.acquires
	s.renewals += o.renewals
	s.losses += o.losses
	s.refused += o.refused
	s.faults += o.faults
	s.violations += len(o.violations)
	if len(o.violations) > 0 {
		s.failed++
		exact := "it repeats exactly"
		if !o.single {
			exact = "it may take another turn: try -count=20"
		}
		t.Errorf("seed %d: %d violations, the first:\n    %s\n%s # %s",
			o.seed, len(o.violations), o.violations[0], replay(o.seed), exact)
	}
}

// report logs the sum, and fails if the hours were not busy.
func (s *sum) report(t *testing.T) {
	h := s.done.Hours()
	text := fmt.Sprintf("%d seeds, %d operations, %d grants, %d renewals, %d faults, %d losses, %d stale writes refused, "+
		"shortest time from a loss to the rival %.1f ms, %d violations",
		s.seeds, s.operations, s.acquires, s.renewals, s.faults,
		s.losses, s.refused, s.closest.Seconds()*1000, s.violations)
	testfindings.Write(t, testfindings.Simulation{What: "the core", Hours: h, Text: text})
	t.Logf("%.1f h simulated: %s", h, text)
	if s.failed > 0 || s.done < 10*time.Hour {
		return
	}
	for _, d := range []struct {
		what     string
		n, least int // per hour
	}{
		{"operations", s.operations, 2500},
		{"grants", s.acquires, 500},
		{"renewals", s.renewals, 500},
		{"faults", s.faults, 60},
		{"losses", s.losses, 5},
	} {
		if float64(d.n) < float64(d.least)*h {
			t.Errorf("%d %s in %.1f h, want at least %d in an hour: the hours are idle ones", d.n, d.what, h, d.least)
		}
	}
}

// A world depends only on its seed: two runs have the same log, whatever the scheduler does.
func TestReplayIsExact(t *testing.T) {
	t.Parallel()
	worlds := 40
	if race.Enabled {
		worlds = 8
	}
	for seed := uint64(1); worlds > 0; seed++ {
		first := simulate(t, seed, how{logged: true, traced: true})
		if !first.single {
			continue
		}
		worlds--
		second := simulate(t, seed, how{logged: true, traced: true})
		for i := range max(len(first.log), len(second.log)) {
			if i >= len(first.log) || i >= len(second.log) || first.log[i] != second.log[i] {
				t.Errorf("seed %d: two logs part at event %d:\n%v\n%v", seed, i,
					first.log[max(i-3, 0):min(i+3, len(first.log))], second.log[max(i-3, 0):min(i+3, len(second.log))])
				break
			}
		}
	}
}

// Histories of short worlds are possible for a lock with tokens: package check finds an order for each.
func TestHistories(t *testing.T) {
	t.Parallel()
	worlds, calls := 60, 0
	if race.Enabled {
		worlds = 10
	}
	for seed := range uint64(worlds) {
		o := simulate(t, seed, how{checked: true})
		report := check.Verify(t.Context(), o.past, check.Rules{Fencing: true, Exact: true, Timeout: 20 * time.Second})
		for _, v := range report.Violations {
			t.Errorf("seed %d: %s: %s", seed, v.Kind, v.Text)
		}
		for _, v := range o.violations {
			t.Errorf("seed %d: %s", seed, v)
		}
		calls += report.Operations
	}
	t.Logf("%d calls in %d worlds", calls, worlds)
	if calls < 30*worlds {
		t.Error("hardly anything happened")
	}
}
