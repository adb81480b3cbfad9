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
	"github.com/fencelock/fencelock/internal/testfacts"
)

// Plan determines a run, together with the service.
type Plan struct {
	Seed     uint64
	Duration time.Duration // how long faults are drawn for; the run takes as long as they need

	// Kinds are the slugs of the kinds to draw from. Nil: all that the service supports.
	Kinds []string
	// Reported draws from the kinds that no driver promises to survive. Violations are then counted only.
	Reported bool
	// OneByOne never strikes with two faults at once.
	OneByOne bool

	// Recovery bounds the time from the end of a fault until every client and every name had a turn. Default
	// 30 s, which is far more than a busy machine needs.
	Recovery time.Duration
	// Patience bounds the wait of an attack for each of its required effects. Default one minute.
	Patience time.Duration
	// Search bounds conformance/check's search of an epoch: see check.Rules.Timeout.
	Search time.Duration
}

// patience bounds the waits of a run for required events. It is far more than a busy machine needs.
const patience = time.Minute

// The environment decides about Run:
const (
	// SeedEnv is the seed, or "random". Default 1.
	SeedEnv = "FENCELOCK_SEED"
	// DurationEnv is for how long faults are drawn. Default 30s.
	DurationEnv = "FENCELOCK_SOAK"
	// KindsEnv is Plan.Kinds, with commas between them. Default all.
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

// Run breaks a service that start makes, as the environment plans it, and fails the test if anything is wrong. It is
// skipped with -short.
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

// RunReported is Run with the kinds that no driver promises to survive: it prints how often there were violations, and
// fails only if a fault did not happen or the clients do not go on after it.
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
	testfacts.Write(t, r.fact())
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
