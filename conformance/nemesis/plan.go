package nemesis

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/internal/stallmeter"
	"github.com/fencelock/fencelock/internal/testfindings"
)

// Plan determines a run, together with the service.
type Plan struct {
	Seed     uint64
	Duration time.Duration // faults are drawn for this time; the run may take longer

	// Kinds are the slugs of the kinds to draw from. Nil: all kinds that the service supports.
	Kinds []string
	// Reported draws from the kinds that no driver promises to survive. Violations are then only counted.
	Reported bool
	// OneByOne excludes two simultaneous faults.
	OneByOne bool

	// Recovery bounds the time from the end of a fault until every client and every name has had a turn. Default 30 s,
	// far more than a busy machine needs.
	Recovery time.Duration
	// Patience bounds the wait of an attack for each required effect. Default one minute.
	Patience time.Duration
	// Search bounds the search of conformance/check in an epoch: see check.Rules.Timeout.
	Search time.Duration
}

// patience bounds the waits of a run for required events. It is far longer than a busy machine needs.
const patience = time.Minute

// Environment variables of Run.
const (
	// SeedEnv is the seed, or "random". Default 1.
	SeedEnv = "FENCELOCK_SEED"
	// DurationEnv is Plan.Duration. Default 30s.
	DurationEnv = "FENCELOCK_SOAK"
	// KindsEnv is Plan.Kinds, separated by commas. Default all.
	KindsEnv = "FENCELOCK_FAULTS"
)

// PlanFromEnvironment returns the plan of Run.
func PlanFromEnvironment() (Plan, error) {
	p := Plan{Seed: 1, Duration: 30 * time.Second}
	switch text := os.Getenv(SeedEnv); text {
	case "":
	case "random":
		p.Seed = rand.Uint64()
	default:
		seed, err := strconv.ParseUint(text, 0, 64)
		if err != nil {
			return p, fmt.Errorf("nemesis: %s=%q is no seed: %w", SeedEnv, text, err)
		}
		p.Seed = seed
	}
	if text := os.Getenv(DurationEnv); text != "" {
		d, err := time.ParseDuration(text)
		if err != nil || d <= 0 {
			return p, fmt.Errorf("nemesis: %s=%q is no duration", DurationEnv, text)
		}
		p.Duration = d
	}
	if text := os.Getenv(KindsEnv); text != "" {
		p.Kinds = strings.Split(text, ",")
	}
	return p, nil
}

// Run breaks a service that start makes, with the plan from the environment, and fails the test if the run fails. It
// is skipped with -short.
func Run(t *testing.T, start func(t testing.TB) Service) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: no soak")
	}
	p, err := PlanFromEnvironment()
	if err != nil {
		t.Fatal(err)
	}
	play(t, start(t), p)
}

// RunReported is Run with the kinds that no driver promises to survive: it prints the number of violations, and fails
// only if a fault does not happen or the clients do not go on after it.
func RunReported(t *testing.T, start func(t testing.TB) Service) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: no soak")
	}
	p, err := PlanFromEnvironment()
	if err != nil {
		t.Fatal(err)
	}
	p.Reported = true
	if os.Getenv(DurationEnv) == "" {
		p.Duration /= 3
	}
	play(t, start(t), p)
}

func play(t *testing.T, s Service, p Plan) {
	t.Helper()
	r := Play(t, s, p)
	t.Logf("%v", r)
	testfindings.Write(t, r.fact())
	for _, v := range r.Failures() {
		t.Error(v)
	}
	for _, v := range r.Violations {
		if v.Kind == Inconclusive && !t.Failed() {
			t.Skipf("%s%v", stallmeter.Mark, v)
		}
	}
	if t.Failed() {
		only := ""
		if p.Kinds != nil {
			only = KindsEnv + "=" + strings.Join(p.Kinds, ",") + " "
		}
		t.Errorf("once more: %s=%d %s=%v %sgo test -run '^%s$'", SeedEnv, r.Seed, DurationEnv, p.Duration, only,
			t.Name())
	}
}
